"""Low-rank adapters beside frozen projections (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


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
    """``scale · x · a · b``; b starts at 0, so that the initial model is unchanged."""

    def __init__(
        self,
        spec: Lora,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        *,
        logical_axes: tuple[str, ...],
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        a = jax.random.normal(rngs.params(), (*in_shape, spec.rank), weight_dtype)
        b = jnp.zeros((spec.rank, *out_shape), weight_dtype)
        in_axes, out_axes = logical_axes[: len(in_shape)], logical_axes[len(in_shape) :]
        scale = 1 / math.sqrt(math.prod(in_shape))
        self.lora_a = nnx.Param(a * scale, logical_axes=(*in_axes, "norm"))
        self.lora_b = nnx.Param(b, logical_axes=("norm", *out_axes))
        self.in_rank, self.scale, self.dtype = len(in_shape), spec.scale, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, *in_shape] → [batch, sequence, *out_shape]."""
        a, b = (weights[...].astype(self.dtype) for weights in (self.lora_a, self.lora_b))
        with jax.named_scope("lora_a"):
            low = jnp.tensordot(x, a, self.in_rank)
        with jax.named_scope("lora_b"):
            return jnp.tensordot(low, b, 1) * self.scale


class ExpertsAdapter(nnx.Module):
    """An adapter for each expert's matrix: a is [experts, in, rank], b [experts, rank, out].

    It only holds the weights; `Experts` multiplies them, by sorted rows or by slots.
    """

    def __init__(
        self,
        spec: Lora,
        shape: tuple[int, int, int],
        *,
        logical_axes: tuple[str, str, str],
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        experts, inputs, outputs = shape
        of_experts, of_inputs, of_outputs = logical_axes
        a = jax.random.normal(rngs.params(), (experts, inputs, spec.rank), weight_dtype)
        b = jnp.zeros((experts, spec.rank, outputs), weight_dtype)
        scale = 1 / math.sqrt(inputs)
        self.lora_a = nnx.Param(a * scale, logical_axes=(of_experts, of_inputs, "norm"))
        self.lora_b = nnx.Param(b, logical_axes=(of_experts, "norm", of_outputs))
