"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + ε) · scale`` over the last dimension."""

    def __init__(self, features: int, *, epsilon: float, weight_dtype: jnp.dtype) -> None:
        self.scale = nnx.Param(jnp.ones(features, weight_dtype), logical_axes=("norm",))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """[…, features] → […, features], in the dtype of `x`."""
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(variance + self.epsilon)
        return (normed * self.scale[...]).astype(x.dtype)


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


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
