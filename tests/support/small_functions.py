"""Abstract arrays, and the two-layer function whose FLOPs several tests write out by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


B, D, F = 3, 5, 7
TWO_LAYERS = {"a": shape(D, F), "b": shape(F, 1)}
FIRST, SECOND = 2 * B * D * F, 2 * B * F  # FLOPs of the two products


def two_layers(w: Any, x: jax.Array) -> jax.Array:
    """Σ tanh(x·a)·b for x [B, D]."""
    return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])
