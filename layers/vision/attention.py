"""Attention in a vision tower: every patch sees every patch."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..building import Builder, Inputs
from ..normalizations import scaled_to_one


@dataclass(frozen=True, kw_only=True)
class GridRope:
    """The first half of a head is rotated by its patch's column, the rest by its row.

    Attributes:
        timescale: of the slowest pair, approximately.
        first: the index of the first row and column.
        neighbours: a pair is two adjacent values; else it spans the two halves of an axis's part.
        across: pairs span the two halves of a head, and the first of them are rotated by row.
    """

    timescale: float
    first: int = 0
    neighbours: bool = False
    across: bool = False


@dataclass(frozen=True, kw_only=True)
class VisionAttentionSpec:
    """Multi-head attention without a mask.

    Attributes:
        columns: patches in a row.
        rope: None: no rotation.
        bias: whether projections have biases.
        normed: queries and keys have their own norms, values one without weights, and scores are
            not scaled (Gemma 4).
    """

    heads: int
    columns: int
    rope: GridRope | None = None
    bias: bool = True
    normed: bool = False
    scope: str = "self_attention"
    needs: frozenset[str] = frozenset()

    def make(self, build: Builder) -> VisionAttention:
        """The layer's weights."""
        return VisionAttention(self, build)


class VisionAttention(nnx.Module):
    """See `VisionAttentionSpec`."""

    def __init__(self, spec: VisionAttentionSpec, build: Builder) -> None:
        width, heads = build.emb_dim, (spec.heads, build.emb_dim // spec.heads)
        inwards, outwards = ("embed", "q_heads", "head_dim"), ("q_heads", "head_dim", "embed")
        self.query, self.key, self.value = (
            build.dense((width,), heads, inwards, bias=spec.bias, name=name)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if spec.normed:
            self.query_norm, self.key_norm = (build.norm(heads[1]) for _ in range(2))
        self.out = build.dense(heads, (width,), outwards, bias=spec.bias, name="o_proj")
        self.spec, self.epsilon = spec, build.epsilon

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[images, patches, width] → the same; `inputs.positions` are the patches' numbers."""
        spec = self.spec
        q, k, v = (
            checkpoint_name(make(x), f"{name}_proj")
            for name, make in (("query", self.query), ("key", self.key), ("value", self.value))
        )
        if spec.normed:
            q, k, v = self.query_norm(q), self.key_norm(k), scaled_to_one(v, self.epsilon)
        if spec.rope is not None:
            q, k = (grid_rotated(y, inputs.positions, spec.columns, spec.rope) for y in (q, k))
        scale = 1.0 if spec.normed else None
        with jax.named_scope("attention_op"):
            context = jax.nn.dot_product_attention(q, k, v, scale=scale, implementation="xla")
        return checkpoint_name(self.out(checkpoint_name(context, "context")), "out_proj")


def grid_rotated(x: jax.Array, numbers: jax.Array, columns: int, rope: GridRope) -> jax.Array:
    """Rotates heads by their patches' positions.

    Args:
        x: [images, patches, heads, head_dim]; head_dim is a multiple of 4.
        numbers: of the patches, row by row; −1: not rotated; [images, patches].
        columns: patches in a row.
    """
    pairs = x.shape[-1] // 4  # per axis
    steps = rope.timescale ** -(jnp.arange(pairs) / pairs)
    turns = [numbers % columns, numbers // columns]
    places = jnp.stack(turns[::-1] if rope.across else turns, axis=-1) + rope.first
    angle = places[:, :, None, :, None] * steps
    angle = jnp.where(numbers[:, :, None, None, None] < 0, 0.0, angle)
    cut = (2, pairs, 2) if rope.neighbours else (2, 2, pairs)
    axis = -1 if rope.neighbours else -3 if rope.across else -2
    values = x.astype(jnp.float32).reshape(*x.shape[:-1], *cut)
    first, second = jnp.moveaxis(values, axis, 0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.stack(turned, axis=axis).reshape(x.shape).astype(x.dtype)
