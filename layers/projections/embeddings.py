"""Token embedding with the tied output head, and learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

# GPT-2's value; small, so that a tied head starts near the uniform distribution.
_EMBEDDING_STD = 0.02


class Embed(nnx.Module):
    """A table [rows, emb_dim], for lookups and, as the output head, for a matmul."""

    def __init__(
        self,
        rows: int,
        emb_dim: int,
        *,
        row_axis: str,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        table = jax.random.normal(rngs.params(), (rows, emb_dim), weight_dtype) * _EMBEDDING_STD
        self.embedding = nnx.Param(table, logical_axes=(row_axis, "embed"))
        self.dtype = dtype

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[batch, sequence] of row numbers → [batch, sequence, emb_dim]. A gather: no matmul."""
        return self.embedding[...].astype(self.dtype)[ids]

    def attend(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, emb_dim] → logits [batch, sequence, rows]."""
        return jnp.einsum("bsd,vd->bsv", x, self.embedding[...].astype(self.dtype))
