"""The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556): picks each query's keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from .ops import CAUSAL
from .rope import Rope, apply_rope

SPARSE, DENSE = "sparse", "dense"


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Each query attends to `topk` keys.

    The model's gradients neither reach nor leave it: its inputs are detached, and its choice has
    no gradient. It learns from its own loss, if it has one.

    Attributes:
        loss: ``sparse`` compares its scores with the attention over the picked keys; ``dense``, for
            warm-up, with the attention over all keys, which queries then attend to; empty: none.
    """

    heads: int
    head_dim: int
    topk: int
    loss: str = ""


class Picked(NamedTuple):
    """An indexer's result for [batch, queries, keys].

    Attributes:
        keys: whether a query attends to a key.
        scores: of each key for each query.
        loss: as in `IndexerSpec`.
    """

    keys: jax.Array
    scores: jax.Array
    loss: str

    @property
    def is_dense(self) -> bool:
        """Whether queries attend to all keys regardless of the choice."""
        return self.loss == DENSE

    @property
    def is_trained(self) -> bool:
        """Whether there is a loss."""
        return bool(self.loss)


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

    def __call__(self, x: jax.Array, latent: jax.Array, inputs: Inputs) -> Picked:
        """Scores all keys for all queries.

        Args:
            x: [batch, sequence, emb_dim].
            latent: what queries are computed from, [batch, sequence, q_width].
        """
        x, latent = jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent)
        k = self.key_norm(self.key(x))[:, :, None]
        q, k = (
            apply_rope(y, inputs.positions, self.rope, rotary_dim=self.rope_dim)
            for y in (self.query(latent), k)
        )
        seen = CAUSAL.mask(inputs.segment_ids)
        return picked(self.spec, q, k[:, :, 0], self.head_weights(x), seen)


def picked(
    spec: IndexerSpec, q: jax.Array, k: jax.Array, head_weights: jax.Array, seen: jax.Array
) -> Picked:
    """The best of the keys that are `seen`, [B, S, T]; others are as for `indexer_scores`."""
    scores = indexer_scores(q, k, head_weights)
    best = jax.lax.stop_gradient(jnp.where(seen, scores, -jnp.inf))
    return Picked(top_keys(best, spec.topk), scores, spec.loss)


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


def divergence(probabilities: jax.Array, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of KL(attention ‖ softmax of the scores) over queries that see a key.

    Equation 3 of section 2.1.1.

    Args:
        probabilities: of the attention, averaged over heads, [B, S, T]; they get no gradient.
        scores: of the indexer, [B, S, T].
        mask: the keys that the attention sees, [B, S, T].
    """
    target = jax.lax.stop_gradient(probabilities.astype(jnp.float32))
    learned = jax.nn.log_softmax(jnp.where(mask, scores, -1e30), axis=-1)
    terms = jnp.where(target > 0, target * (jnp.log(jnp.maximum(target, 1e-30)) - learned), 0.0)
    return terms.sum() / jnp.maximum(mask.any(-1).sum(), 1)
