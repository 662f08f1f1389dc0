"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), computed in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def scaled_to_one(x: jax.Array, epsilon: float) -> jax.Array:
    """``x / sqrt(mean(x²) + ε)`` over the last dimension, in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + ε) · scale`` over the last dimension.

    Args:
        features: size of the last dimension.
        zero_centered: the weight is ``scale − 1`` (Gemma, Qwen3-Next).
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float,
        weight_dtype: jnp.dtype,
        zero_centered: bool = False,
    ) -> None:
        first = jnp.zeros if zero_centered else jnp.ones
        self.scale = nnx.Param(first(features, weight_dtype), logical_axes=("norm",))
        self.offset = 1.0 if zero_centered else 0.0
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[…, features] → […, features], in the dtype of `x`."""
        normed = scaled_to_one(x.astype(jnp.float32), self.epsilon)
        return (normed * (self.scale[...] + self.offset)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x − mean) / sqrt(var + ε) · scale + bias`` over the last dimension."""

    def __init__(self, features: int, *, epsilon: float, weight_dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(features, weight_dtype), logical_axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(features, weight_dtype), logical_axes=("norm",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[…, features] → […, features], in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x32 - mean), axis=-1, keepdims=True)
        normed = (x32 - mean) * jax.lax.rsqrt(variance + self.epsilon)
        return (normed * self.scale[...] + self.bias[...]).astype(x.dtype)


@jax.custom_vjp
def with_whole_gradient(x: jax.Array) -> jax.Array:
    """`x` of any shape, whose gradient is computed and stored before anything reads it.

    XLA for TPUs may otherwise compute the sums of a norm's gradient, over the width and over the
    tokens, inside the matmul that produces that gradient. On v5p and v6e that costs more than it
    saves (scripts/results/weight_gathers.json).
    """
    return x


def _keep_nothing(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _stored(_: None, dx: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.optimization_barrier(dx),)


with_whole_gradient.defvjp(_keep_nothing, _stored)


NORMS: dict[str, Callable[..., Any]] = {
    "rmsnorm": RMSNorm,
    "zero_centered_rmsnorm": functools.partial(RMSNorm, zero_centered=True),
    "layernorm": LayerNorm,
}
