"""DeepSeek-V4's attention: a window of tokens, and keys that each summarise several tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..building import Builder, Inputs
from ..normalizations import scaled_to_one
from .indexer import IndexerSpec, Picked, divergence, picked
from .ops import WHOLE, AttentionPattern, masked_probabilities, weighted
from .rope import Rope, apply_rope


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec:
    """Keys double as values; queries and outputs go through low ranks.

    Attributes:
        window: tokens that a query sees individually.
        ratio: tokens per compressed key; 0: no compressed keys.
        indexer: picks compressed keys; None: all of them are attended to.
        rope_dim: rotated values of each head.
        out_groups: groups of heads, each projected by ``[heads·head_dim / out_groups, out_rank]``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_lora_rank: int
    out_groups: int
    out_rank: int
    window: int
    ratio: int
    rope: Rope
    rope_dim: int
    indexer: IndexerSpec | None = None
    scope: str = "self_attention"
    needs: frozenset[str] = frozenset({WHOLE})

    def make(self, build: Builder) -> CompressedAttention:
        """The layer's weights."""
        return CompressedAttention(self, build)


class CompressedAttention(nnx.Module):
    """One softmax over the window, the compressed keys and a sink."""

    def __init__(self, spec: CompressedAttentionSpec, build: Builder) -> None:
        D, N, h = build.emb_dim, spec.heads, spec.head_dim
        rank = spec.q_lora_rank
        self.query_a = build.dense((D,), (rank,), ("embed", "q_lora"))
        self.query_norm = build.norm(rank)
        self.query_b = build.dense((rank,), (N, h), ("q_lora", "q_heads", "head_dim"))
        kv_axes = ("embed", "kv_heads", "head_dim")
        self.key = build.dense((D,), (spec.kv_heads, h), kv_axes)
        self.key_norm = build.norm(h)
        self.sinks = build.vector((N,), 0.0, ("q_heads",))
        if spec.ratio:
            self.compressor = Compressor(spec.ratio, h, spec.indexer is not None, spec, build)
        if spec.indexer is not None:
            self.indexer = CompressedIndexer(spec.indexer, spec, build)
        groups, joined = spec.out_groups, N * h // spec.out_groups
        shape = (groups, joined, spec.out_rank)
        self.out_a = build.matrix(shape, joined, ("streams", "joined_heads", "q_lora"))
        self.out_b = build.dense((groups * spec.out_rank,), (D,), ("mlp", "embed"))
        self.spec, self.epsilon = spec, build.epsilon

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        spec = self.spec
        with jax.named_scope("query_a"):
            latent = self.query_norm(checkpoint_name(self.query_a(x), "query_wa_proj"))
        with jax.named_scope("query_b"):
            q = scaled_to_one(checkpoint_name(self.query_b(latent), "query_proj"), self.epsilon)
        with jax.named_scope("key"):
            kv = self.key_norm(checkpoint_name(self.key(x), "key_proj"))
        q, kv = (rotated(y, inputs.positions, spec) for y in (q, kv))
        mask = AttentionPattern(window=spec.window).mask(inputs.segment_ids)
        found = None
        if spec.ratio and x.shape[1] >= spec.ratio:
            with jax.named_scope("compressor"):
                keys, seen, found = self._compressed(x, latent, inputs)
            keys = jnp.repeat(keys[:, :, None], spec.kv_heads, axis=2)
            kv = jnp.concatenate([kv, keys], axis=1)
            mask = jnp.concatenate([mask, seen], axis=-1)
        with jax.named_scope("attention_op"):
            probabilities = masked_probabilities(q, kv, mask, sinks=self.sinks[...])
            context = weighted(kv, probabilities, q.dtype)
            if found is not None and found.is_trained:
                target = of_compressed_keys(probabilities, found.scores.shape[-1])
                inputs.notes["indexer_loss"] = divergence(target, found.scores, seen)
        # Keys double as values: the rotation is undone at the query's position.
        context = checkpoint_name(rotated(context, -inputs.positions, spec), "context")
        grouped = context.reshape(*x.shape[:2], spec.out_groups, -1)
        with jax.named_scope("out_a"):
            y = jnp.einsum("bsgi,gio->bsgo", grouped, self.out_a[...].astype(x.dtype))
        with jax.named_scope("out_b"):
            return checkpoint_name(self.out_b(y.reshape(*x.shape[:2], -1)), "out_proj")

    def _compressed(
        self, x: jax.Array, latent: jax.Array, inputs: Inputs
    ) -> tuple[jax.Array, jax.Array, Picked | None]:
        """Keys [batch, keys, head_dim], which each query sees [batch, sequence, keys], the pick."""
        keys = self.compressor(x, inputs)
        seen = closed_windows(inputs.segment_ids, self.spec.ratio)
        if self.spec.indexer is None:
            return keys, seen, None
        with jax.named_scope("indexer"):
            found = self.indexer(x, latent, seen, inputs)
        return keys, seen if found.is_dense else seen & found.keys, found


def rotated(x: jax.Array, positions: jax.Array, spec: CompressedAttentionSpec) -> jax.Array:
    """Rotates the first `rope_dim` values of each head, [batch, sequence, heads, head_dim]."""
    dim = min(spec.rope_dim, x.shape[-1])
    return apply_rope(x, positions, spec.rope, rotary_dim=dim)


def of_compressed_keys(probabilities: jax.Array, count: int) -> jax.Array:
    """The softmax over the compressed keys alone, averaged over heads.

    Args:
        probabilities: over the window, the compressed keys and a sink, [B, K, G, S, T + count].

    Returns:
        [B, S, count]; 0 for queries that see no compressed key.
    """
    own = probabilities[..., -count:]
    whole = own.sum(-1, keepdims=True)
    return jnp.where(whole > 0, own / jnp.where(whole > 0, whole, 1), 0).mean(axis=(1, 2))


def closed_windows(segment_ids: jax.Array, ratio: int) -> jax.Array:
    """Which windows of `ratio` tokens lie before a token and wholly in its document.

    [B, S] → [B, S, S // ratio]; a token sees the window that ends with it.
    """
    length = segment_ids.shape[1]
    count = length // ratio
    starts = segment_ids[:, : count * ratio : ratio]
    ends = segment_ids[:, ratio - 1 : count * ratio : ratio]
    own = segment_ids[:, :, None]
    closed = (jnp.arange(length)[:, None] + 1) // ratio > jnp.arange(count)
    return closed & (starts[:, None] == own) & (ends[:, None] == own)


class Compressor(nnx.Module):
    """One key for every `ratio` tokens: a gated sum of their projections.

    With `overlap`, a key also takes a second projection of the previous window.
    """

    def __init__(
        self,
        ratio: int,
        dim: int,
        overlap: bool,
        spec: CompressedAttentionSpec,
        build: Builder,
    ) -> None:
        outputs = (1 + overlap) * dim
        self.content = build.dense((build.emb_dim,), (outputs,), ("embed", "head_dim"))
        self.gate = build.dense((build.emb_dim,), (outputs,), ("embed", "head_dim"))
        self.places = build.vector((ratio, outputs), 0.0, ("conv", "head_dim"))
        self.norm = build.norm(dim)
        self.ratio, self.dim, self.overlap, self.spec = ratio, dim, overlap, spec

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → [batch, sequence // ratio, dim]."""
        count = x.shape[1] // self.ratio
        used = x[:, : count * self.ratio]
        content, gate = (
            y.reshape(x.shape[0], count, self.ratio, -1)
            for y in (self.content(used), self.gate(used))
        )
        gate = gate.astype(jnp.float32) + self.places[...]
        if self.overlap:
            content, gate = (
                _with_previous(y, self.dim, fill) for y, fill in ((content, 0.0), (gate, -jnp.inf))
            )
        weights = jax.nn.softmax(gate, axis=2).astype(content.dtype)
        keys = self.norm((content * weights).sum(axis=2))
        first = inputs.positions[:, : count * self.ratio : self.ratio]
        return rotated(keys[:, :, None], first, self.spec)[:, :, 0]


def _with_previous(x: jax.Array, dim: int, fill: float) -> jax.Array:
    """[B, windows, ratio, 2·dim] → [B, windows, 2·ratio, dim]: the previous window's first half,
    then each window's second half."""
    before = jnp.pad(x[:, :-1, :, :dim], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=fill)
    return jnp.concatenate([before, x[..., dim:]], axis=2)


class CompressedIndexer(nnx.Module):
    """Picks compressed keys by its own keys, compressed the same way."""

    def __init__(self, spec: IndexerSpec, outer: CompressedAttentionSpec, build: Builder) -> None:
        shape = (spec.heads, spec.head_dim)
        axes = ("q_lora", "indexer_heads", "head_dim")
        self.query = build.dense((outer.q_lora_rank,), shape, axes)
        self.compressor = Compressor(outer.ratio, spec.head_dim, True, outer, build)
        self.head_weights = build.dense((build.emb_dim,), (spec.heads,), ("embed", "indexer_heads"))
        self.spec, self.outer = spec, outer

    def __call__(self, x: jax.Array, latent: jax.Array, seen: jax.Array, inputs: Inputs) -> Picked:
        """Scores of `seen` keys for each query, and which it picks, [batch, sequence, keys]."""
        x, latent = jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent)
        keys = self.compressor(x, inputs)
        q = rotated(self.query(latent), inputs.positions, self.outer)
        return picked(self.spec, q, keys, self.head_weights(x), seen)
