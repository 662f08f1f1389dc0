"""Low-rank adapters beside frozen projections (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

if TYPE_CHECKING:
    from ..building import Builder


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which projections have adapters, and of what rank.

    Attributes:
        scale: factor of an adapter's output.
        targets: names of projections, as in the analytic count: ``q_proj``, ``wi_0``, …
    """

    rank: int
    scale: float
    targets: frozenset[str]


def lora(config: Any) -> Lora | None:
    """The adapters of a config; None: no adapters."""
    if not config.lora_rank:
        return None
    scale = config.lora_alpha / config.lora_rank
    return Lora(rank=config.lora_rank, scale=scale, targets=frozenset(config.lora_targets))


def lora_of_tower(config: Any) -> Lora | None:
    """The vision tower's adapters: as in `lora`, but None while the tower is frozen."""
    return None if config.freeze_vision_encoder_params else lora(config)


def trains_only_above_the_embedding(config: Any) -> bool:
    """Whether the first layer's input may need no gradient, unlike the other layers' inputs."""
    return bool(config.lora_rank) or bool({"tokens", "embedding"} & set(config.frozen))


class Adapter(nnx.Module):
    """``scale · x · a · b``; b starts at 0, so that the initial model is unchanged.

    Args:
        shape: of the adapted matrix: [*stacked, *inputs, *outputs]. A stack of matrices, the
            experts', only keeps its weights here; `Experts` multiplies them, by rows or by slots.
        logical_axes: of the matrix.
        in_rank: number of dimensions of the inputs.
        stacked: of the stack.
    """

    def __init__(
        self,
        spec: Lora,
        build: Builder,
        shape: tuple[int, ...],
        logical_axes: tuple[str, ...],
        *,
        in_rank: int,
        stacked: int = 0,
    ) -> None:
        end = stacked + in_rank
        a = jax.random.normal(build.rngs.params(), (*shape[:end], spec.rank), build.weight_dtype)
        b = jnp.zeros((*shape[:stacked], spec.rank, *shape[end:]), build.weight_dtype)
        scale = 1 / math.sqrt(math.prod(shape[stacked:end]))
        self.lora_a = nnx.Param(a * scale, logical_axes=(*logical_axes[:end], "norm"))
        b_axes = (*logical_axes[:stacked], "norm", *logical_axes[end:])
        self.lora_b = nnx.Param(b, logical_axes=b_axes)
        self.in_rank, self.scale, self.dtype = in_rank, spec.scale, build.dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, *inputs] → [batch, sequence, *outputs]."""
        a, b = (weights[...].astype(self.dtype) for weights in (self.lora_a, self.lora_b))
        with jax.named_scope("lora_a"):
            low = jnp.tensordot(x, a, self.in_rank)
        with jax.named_scope("lora_b"):
            return jnp.tensordot(low, b, 1) * self.scale
