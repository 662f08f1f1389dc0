"""Projections and the MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .gathered_products import Gathers, gathered_product
from .lora import Adapter, Lora
from .quantization import Quantization, quantized_dot

if TYPE_CHECKING:
    from ..building import Builder

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
}


class Dense(nnx.Module):
    """``x @ kernel (+ bias)``, contracting the last `len(in_shape)` dimensions of `x`.

    The kernel is [*in_shape, *out_shape]; it is stored in `weight_dtype` and multiplied in `dtype`,
    or as `quantization` says. `lora` adds an adapter. `gathers` says when a kernel that is not
    quantised is gathered.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        *,
        logical_axes: tuple[str, ...],
        use_bias: bool,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
        quantization: Quantization | None = None,
        lora: Lora | None = None,
        gathers: Gathers = "xla",
    ) -> None:
        # Scaled by fan-in, so that every layer's output keeps its input's variance.
        scale = 1 / math.sqrt(math.prod(in_shape))
        kernel = jax.random.truncated_normal(
            rngs.params(), -2, 2, (*in_shape, *out_shape), weight_dtype
        )
        self.kernel = nnx.Param(kernel * scale, logical_axes=logical_axes)
        if use_bias:
            bias_axes = logical_axes[len(in_shape) :]
            self.bias = nnx.Param(jnp.zeros(tuple(out_shape), weight_dtype), logical_axes=bias_axes)
        self.use_bias = use_bias
        if lora is not None:
            self.adapter = Adapter(
                lora,
                in_shape,
                out_shape,
                logical_axes=logical_axes,
                dtype=dtype,
                weight_dtype=weight_dtype,
                rngs=rngs,
            )
        self.is_adapted = lora is not None
        self.in_rank = len(in_shape)
        self.dtype = dtype
        self.quantization = quantization
        self.logical_axes = logical_axes
        self.gathers = gathers

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, *in_shape] → [batch, sequence, *out_shape]."""
        kernel = self.kernel[...]
        if self.quantization is not None:
            y = quantized_dot(x, kernel.astype(self.dtype), self.in_rank, self.quantization)
        else:
            dot = functools.partial(_dot, self.in_rank)
            y = gathered_product(
                dot, x, kernel, self.gathers, axes=self.logical_axes, dtype=self.dtype
            )
        if self.is_adapted:
            y = y + self.adapter(x)
        return y + self.bias[...].astype(self.dtype) if self.use_bias else y


def _dot(in_rank: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    contracted = tuple(range(x.ndim - in_rank, x.ndim))
    return jax.lax.dot_general(x, kernel, ((contracted, tuple(range(in_rank))), ((), ())))


class Mlp(nnx.Module):
    """Plain, ``wo(act(wi(x)))``, or gated, ``wo(act(wi_0(x)) · wi_1(x))`` (arXiv 2002.05202)."""

    def __init__(
        self, build: Builder, hidden: int, activations: Sequence[str], *, use_bias: bool
    ) -> None:
        width, inwards = build.emb_dim, ("embed", "mlp")
        self.activations = tuple(activations)
        first = "wi_0" if len(self.activations) > 1 else "wi"
        self.wi_0 = build.dense((width,), (hidden,), inwards, bias=use_bias, name=first)
        if len(self.activations) > 1:
            self.wi_1 = build.dense((width,), (hidden,), inwards, bias=use_bias, name="wi_1")
        outwards = ("mlp", "embed")
        self.wo = build.dense((hidden,), (width,), outwards, bias=use_bias, name="wo")

    def __call__(self, x: jax.Array, inputs: Any = None) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        with jax.named_scope("wi_0"):
            hidden = checkpoint_name(self.wi_0(x), "mlpwi_0")
        hidden = ACTIVATIONS[self.activations[0]](hidden)
        if len(self.activations) > 1:
            with jax.named_scope("wi_1"):
                gate = checkpoint_name(self.wi_1(x), "mlpwi_1")
            hidden = hidden * ACTIVATIONS[self.activations[1]](gate)
        with jax.named_scope("wo"):
            return checkpoint_name(self.wo(hidden), "mlpwo")
