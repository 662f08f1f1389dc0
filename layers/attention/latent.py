"""Multi-head latent attention, optionally sparse through an indexer."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..building import Builder, Inputs
from .indexer import Indexer, IndexerSpec, Picked, divergence
from .ops import (
    CAUSAL,
    CONTEXT,
    PICKED,
    PROBABILITIES,
    VALUE_DIM,
    AttentionInputs,
    AttentionPattern,
    attended,
    attended_with_probabilities,
)
from .rope import Rope, apply_rope


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """MLA (DeepSeek-V2, arXiv 2405.04434), without weight absorption.

    Attributes:
        q_lora_rank: rank of the queries; 0: a single full-rank matrix.
        kv_lora_rank: rank of keys and values.
        nope_dim, rope_dim: size of a query and key without and with rotary positions.
        v_dim: size of a value.
        indexer: picks keys; None: every earlier key is attended to.
        pattern: of the attention scores.
    """

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    indexer: IndexerSpec | None = None
    pattern: AttentionPattern = CAUSAL
    scope: str = "self_attention"

    @property
    def needs(self) -> frozenset[str]:
        """What this layer needs from the attention implementation."""
        wanted = {
            VALUE_DIM: self.v_dim != self.nope_dim + self.rope_dim,
            PICKED: self.indexer is not None,
            PROBABILITIES: self.indexer is not None and bool(self.indexer.loss),
        }
        return frozenset(name for name, is_wanted in wanted.items() if is_wanted)

    def make(self, build: Builder) -> LatentAttention:
        """The layer's weights."""
        return LatentAttention(self, build)


class LatentAttention(nnx.Module):
    """Queries, keys and values through low ranks; all heads share one rotary key."""

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
        self.packed = build.packed

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
        found = None
        if spec.indexer is not None and x.shape[1] > spec.indexer.topk:
            with jax.named_scope("indexer"):
                found = self.indexer(x, latent, inputs)
        with jax.named_scope("attention_op"):
            picked = None if found is None or found.is_dense else found.keys
            of = AttentionInputs(
                q,
                k,
                v,
                inputs.segment_ids,
                pattern=spec.pattern,
                picked=picked,
                packed=self.packed,
            )
            context = self._attended(of, found, inputs)
        with jax.named_scope("out"):
            return checkpoint_name(self.out(context), "out_proj")

    def _attended(self, of: AttentionInputs, found: Picked | None, inputs: Inputs) -> jax.Array:
        """The heads' results. Notes the indexer's loss, if there is one."""
        if found is None or not found.is_trained:
            return attended(self.attention, of)
        context, probabilities = attended_with_probabilities(of)
        inputs.notes["indexer_loss"] = divergence(probabilities, found.scores, of.mask)
        return checkpoint_name(context, CONTEXT)

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
