"""Multi-head, grouped-query and multi-query causal self-attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention_ops import ATTENTION_OPS
from .embeddings import apply_rope
from .linears import Dense


class Attention(nnx.Module):
    """Projections, rotary positions, masked attention, output projection.

    MHA (arXiv 1706.03762, section 3.2) where `num_kv_heads` equals `num_query_heads`, GQA (arXiv
    2305.13245) where it divides it, MQA (arXiv 1911.02150) where it is 1.
    """

    def __init__(
        self,
        *,
        emb_dim: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope_max_timescale: float | None,
        attention: str,
        use_bias: bool,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        options: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "weight_dtype": weight_dtype,
            "rngs": rngs,
        }
        q_shape, kv_shape = (num_query_heads, head_dim), (num_kv_heads, head_dim)
        q_axes, kv_axes = ("q_heads", "head_dim"), ("kv_heads", "head_dim")
        self.query = Dense((emb_dim,), q_shape, logical_axes=("embed", *q_axes), **options)
        self.key = Dense((emb_dim,), kv_shape, logical_axes=("embed", *kv_axes), **options)
        self.value = Dense((emb_dim,), kv_shape, logical_axes=("embed", *kv_axes), **options)
        self.out = Dense(q_shape, (emb_dim,), logical_axes=(*q_axes, "embed"), **options)
        self.attention = attention
        self.rope_max_timescale = rope_max_timescale

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[batch, sequence, emb_dim] → the same; the other two are [batch, sequence]."""
        with jax.named_scope("query"):
            q = checkpoint_name(self.query(x), "query_proj")
        with jax.named_scope("key"):
            k = checkpoint_name(self.key(x), "key_proj")
        with jax.named_scope("value"):
            v = checkpoint_name(self.value(x), "value_proj")
        if self.rope_max_timescale is not None:
            with jax.named_scope("rope"):
                q = apply_rope(q, positions, max_timescale=self.rope_max_timescale)
                k = apply_rope(k, positions, max_timescale=self.rope_max_timescale)
        with jax.named_scope("attention_op"):
            context = ATTENTION_OPS[self.attention](q, k, v, segment_ids)
        context = checkpoint_name(context, "context")
        with jax.named_scope("out"):
            return checkpoint_name(self.out(context), "out_proj")
