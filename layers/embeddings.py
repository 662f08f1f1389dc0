"""Token embedding with the tied output head, learned positions, and rotary positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

# GPT-2's; small, so that a tied head starts near the uniform distribution.
_EMBEDDING_STD = 0.02


class Embed(nnx.Module):
    """A table [rows, emb_dim]: for lookups and, as the output head, for a matmul."""

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


def apply_rope(
    x: jax.Array, positions: jax.Array, *, max_timescale: float, rotary_dim: int = 0
) -> jax.Array:
    """Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4.2), halves paired.

    Args:
        x: queries or keys, [batch, sequence, heads, head_dim].
        positions: the position of each token in its document, [batch, sequence]; negative ones
            turn back.
        max_timescale: the wavelength of the slowest pair, over 2π.
        rotary_dim: how many of the first values of a head are rotated; 0: all.
    """
    rotary_dim = rotary_dim or x.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated, rest = jnp.split(x, [rotary_dim], axis=-1)
        return jnp.concatenate(
            [apply_rope(rotated, positions, max_timescale=max_timescale), rest], axis=-1
        )
    half = rotary_dim // 2
    timescale = max_timescale ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) / timescale
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
