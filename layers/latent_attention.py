"""Multi-head latent attention, and the indexer that makes it sparse."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention_ops import ATTENTION_OPS, CAUSAL, PICKED, VALUE_DIM, AttentionInputs, Pattern
from .building import Builder, Inputs
from .rope import Rope, apply_rope


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556): each query attends to `topk` keys.

    No gradient reaches it or leaves it: what it reads is detached, and its choice has none.
    """

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """MLA (DeepSeek-V2, arXiv 2405.04434), without weight absorption.

    Attributes:
        q_lora_rank: rank of the queries; 0: one matrix.
        kv_lora_rank: of keys and values.
        nope_dim, rope_dim: values of a query and key without and with rotary positions.
        v_dim: values of a value.
        indexer: None: every earlier key is attended to.
        pattern: of the scores.
    """

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    indexer: IndexerSpec | None = None
    pattern: Pattern = CAUSAL
    scope: str = "self_attention"

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of the attention implementation."""
        other = {VALUE_DIM} if self.v_dim != self.nope_dim + self.rope_dim else set()
        return frozenset(other | ({PICKED} if self.indexer else set()))

    def make(self, build: Builder) -> LatentAttention:
        """The layer's weights."""
        return LatentAttention(self, build)


class LatentAttention(nnx.Module):
    """Queries, keys and values through low ranks; one rotary key for all heads."""

    def __init__(self, spec: LatentAttentionSpec, build: Builder) -> None:
        D, N, qk_dim = build.emb_dim, spec.heads, spec.nope_dim + spec.rope_dim
        heads = ("q_heads", "head_dim")
        q_width, q_axis = D, "embed"
        if spec.q_lora_rank:
            q_width, q_axis = spec.q_lora_rank, "q_lora"
            self.query_a = build.dense((D,), (q_width,), ("embed", "q_lora"), name="q_a")
            self.query_norm = build.norm(q_width)
        first = "q_b" if spec.q_lora_rank else "q_proj"
        self.query_b = build.dense((q_width,), (N, qk_dim), (q_axis, *heads), name=first)
        joined = spec.kv_lora_rank + spec.rope_dim
        self.kv_a = build.dense((D,), (joined,), ("embed", "kv_lora"), name="kv_a")
        self.kv_norm = build.norm(spec.kv_lora_rank)
        kv_shape = (N, spec.nope_dim + spec.v_dim)
        self.kv_b = build.dense((spec.kv_lora_rank,), kv_shape, ("kv_lora", *heads), name="kv_b")
        self.out = build.dense((N, spec.v_dim), (D,), (*heads, "embed"), name="o_proj")
        if spec.indexer is not None:
            self.indexer = Indexer(spec.indexer, q_width, spec.rope_dim, spec.rope, build)
        self.spec = spec
        self.attention = build.attention

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        spec = self.spec
        latent = x
        if spec.q_lora_rank:
            with jax.named_scope("query_a"):
                latent = self.query_norm(checkpoint_name(self.query_a(x), "query_wa_proj"))
        with jax.named_scope("query_b"):
            q = checkpoint_name(self.query_b(latent), "query_proj")
        q_nope, q_rope = jnp.split(q, [spec.nope_dim], axis=-1)
        q = jnp.concatenate([q_nope, self._rotated(q_rope, inputs)], axis=-1)
        k, v = self._keys_and_values(x, inputs)
        picked = None
        if spec.indexer is not None and x.shape[1] > spec.indexer.topk:
            with jax.named_scope("indexer"):
                picked = self.indexer(x, latent, inputs)
        with jax.named_scope("attention_op"):
            of = AttentionInputs(q, k, v, inputs.segment_ids, pattern=spec.pattern, picked=picked)
            context = ATTENTION_OPS[self.attention](of)
        context = checkpoint_name(context, "context")
        with jax.named_scope("out"):
            return checkpoint_name(self.out(context), "out_proj")

    def _keys_and_values(self, x: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        spec = self.spec
        with jax.named_scope("kv_a"):
            joined = checkpoint_name(self.kv_a(x), "kv_wa_proj")
        latent, k_rope = jnp.split(joined, [spec.kv_lora_rank], axis=-1)
        with jax.named_scope("kv_b"):
            kv = self.kv_b(self.kv_norm(latent))
        k_nope, v = jnp.split(kv, [spec.nope_dim], axis=-1)
        k_rope = self._rotated(k_rope[:, :, None], inputs)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], spec.rope_dim))
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
        return checkpoint_name(k, "key_proj"), checkpoint_name(v, "value_proj")

    def _rotated(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        with jax.named_scope("rope"):
            return apply_rope(x, inputs.positions, self.spec.rope)


class Indexer(nnx.Module):
    """Scores every key for every query with a few narrow heads, and picks the best."""

    def __init__(
        self, spec: IndexerSpec, q_width: int, rope_dim: int, rope: Rope, build: Builder
    ) -> None:
        shape = (spec.heads, spec.head_dim)
        self.query = build.dense((q_width,), shape, ("q_lora", "indexer_heads", "head_dim"))
        self.key = build.dense((build.emb_dim,), (spec.head_dim,), ("embed", "head_dim"))
        self.key_norm = build.norm(spec.head_dim, "layernorm")
        self.head_weights = build.dense((build.emb_dim,), (spec.heads,), ("embed", "indexer_heads"))
        self.spec, self.rope, self.rope_dim = spec, rope, min(rope_dim, spec.head_dim)

    def __call__(self, x: jax.Array, latent: jax.Array, inputs: Inputs) -> jax.Array:
        """Which keys each query attends to, [batch, sequence, sequence] of booleans.

        Args:
            x: [batch, sequence, emb_dim].
            latent: what queries are made from, [batch, sequence, q_width].
        """
        x, latent = jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent)
        k = self.key_norm(self.key(x))[:, :, None]
        q, k = (
            apply_rope(y, inputs.positions, self.rope, rotary_dim=self.rope_dim)
            for y in (self.query(latent), k)
        )
        seen = CAUSAL.mask(inputs.segment_ids)
        scores = indexer_scores(q, k[:, :, 0], self.head_weights(x))
        return jax.lax.stop_gradient(top_keys(jnp.where(seen, scores, -jnp.inf), self.spec.topk))


def indexer_scores(q: jax.Array, k: jax.Array, head_weights: jax.Array) -> jax.Array:
    """``Σ_h w_h · relu(q_h · k) / √(h·d)``, in float32.

    Args:
        q: [B, S, heads, d].
        k: [B, T, d].
        head_weights: [B, S, heads].

    Returns:
        [B, S, T].
    """
    with jax.named_scope("scores"):
        scores = jnp.einsum("bshe,bte->bsht", q, k).astype(jnp.float32)
    scores = jax.nn.relu(scores) / math.sqrt(q.shape[-1])
    weights = head_weights.astype(jnp.float32) / math.sqrt(q.shape[2])
    with jax.named_scope("reduce"):
        return jnp.einsum("bsht,bsh->bst", scores, weights)


def top_keys(scores: jax.Array, count: int) -> jax.Array:
    """[B, S, T] → whether a key is among the `count` best of its query."""
    B, S, T = scores.shape
    best = jax.lax.top_k(scores, min(count, T))[1]
    rows, queries = jnp.arange(B)[:, None, None], jnp.arange(S)[None, :, None]
    return jnp.zeros((B, S, T), bool).at[rows, queries, best].set(True)
