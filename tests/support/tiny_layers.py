"""What a layer alone is built with, in float32 and without kernels."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from mfu_jax.layers.building import Builder


def tiny_builder(emb_dim: int, *, epsilon: float = 1e-5, rngs: nnx.Rngs | None = None) -> Builder:
    """A builder of layers of a width; `rngs` are those of seed 0 by default."""
    f32 = jnp.dtype("float32")
    return Builder(
        emb_dim=emb_dim,
        dtype=f32,
        weight_dtype=f32,
        normalization="rmsnorm",
        epsilon=epsilon,
        attention="dot_product",
        rngs=nnx.Rngs(params=0) if rngs is None else rngs,
    )
