"""Ring attention: sequences are split over devices, keys and values travel around a ring."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..sharding import SEQUENCE_AXIS, axis_size
from .ops import (
    SINKS,
    SOFT_CAP,
    SPLIT,
    STAGED,
    VALUE_DIM,
    WINDOW,
    AttentionInputs,
    over_shards,
    register_attention,
)


class Keys(NamedTuple):
    """One device's part of keys [B, S, K, h], values [B, S, K, v] and their segments [B, S]."""

    k: Any
    v: Any
    segment_ids: Any


class _SoftmaxSums(NamedTuple):
    """Running sums of a softmax (arXiv 1805.02867), all in float32.

    Attributes:
        largest: score so far, [B, K, G, S].
        weights: sum of exp(score - largest), [B, K, G, S].
        values: sum of these weights times values, [B, K, G, S, v].
    """

    largest: jax.Array
    weights: jax.Array
    values: jax.Array

    def lowered_to(self, largest: jax.Array) -> _SoftmaxSums:
        """The same sums relative to another score, which must not be smaller."""
        factor = jnp.exp(self.largest - largest)
        return _SoftmaxSums(largest, self.weights * factor, self.values * factor[..., None])


@register_attention("ring", supports=(WINDOW, SOFT_CAP, SINKS, VALUE_DIM, SPLIT, STAGED))
def ring(x: AttentionInputs) -> jax.Array:
    """Ring attention (arXiv 2310.01889): a device holds at most one other part of the keys.

    Every pair is computed, then masked; the backward pass recomputes the scores.
    """
    attended = functools.partial(_attended, axis_size(SEQUENCE_AXIS))
    return over_shards(attended, x, queries=SEQUENCE_AXIS, keys=SEQUENCE_AXIS)


def _attended(parts: int, x: AttentionInputs) -> jax.Array:
    """One device's queries [B, S, N, h] against all parts of the keys → [B, S, N, v]."""
    q, keys = x.q, Keys(x.k, x.v, x.segment_ids)
    B, S, N, h = q.shape
    K = keys.k.shape[2]
    own = jax.lax.axis_index(SEQUENCE_AXIS) if parts > 1 else jnp.zeros((), jnp.int32)
    grouped = q.reshape(B, S, K, N // K, h) * jnp.asarray(x.pattern.scale_of(h), q.dtype)
    of_queries = keys.segment_ids
    places = jnp.arange(S)

    @jax.checkpoint
    def add(sums: _SoftmaxSums, keys: Keys, part: jax.Array) -> _SoftmaxSums:
        seen = x.pattern.seen(own * S + places, part * S + places)
        seen = seen & (of_queries[:, :, None] == keys.segment_ids[:, None, :])
        with jax.named_scope("scores"):
            scores = jnp.einsum("bskgh,btkh->bkgst", grouped, keys.k).astype(jnp.float32)
        if x.pattern.soft_cap:
            scores = x.pattern.soft_cap * jnp.tanh(scores / x.pattern.soft_cap)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        largest = jax.lax.stop_gradient(jnp.maximum(sums.largest, scores.max(-1)))
        weights = jnp.exp(scores - largest[..., None])
        with jax.named_scope("values"):
            values = jnp.einsum("bkgst,btkv->bkgsv", weights.astype(q.dtype), keys.v)
        before = sums.lowered_to(largest)
        return _SoftmaxSums(
            largest,
            before.weights + weights.sum(-1),
            before.values + values.astype(jnp.float32),
        )

    def turn(
        state: tuple[_SoftmaxSums, Keys], number: jax.Array
    ) -> tuple[tuple[_SoftmaxSums, Keys], None]:
        sums, keys = state
        keys = passed_on(keys)
        return (add(sums, keys, (own - number) % parts), keys), None

    sums = add(_nothing(x.sinks, grouped, keys.v), keys, own)
    if parts > 1:
        (sums, _), _ = jax.lax.scan(turn, (sums, keys), jnp.arange(1, parts))
    out = sums.values / sums.weights[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(B, S, N, -1).astype(q.dtype)


def passed_on(arrays: Any) -> Any:
    """Those of the device before this one, around the ring."""
    parts = axis_size(SEQUENCE_AXIS)
    around = [(i, (i + 1) % parts) for i in range(parts)]
    return jax.lax.ppermute(arrays, SEQUENCE_AXIS, around)


def _nothing(sinks: jax.Array | None, grouped: jax.Array, v: jax.Array) -> _SoftmaxSums:
    """The sums before the first key: those of the heads' sinks, if any."""
    B, S, K, G, _ = grouped.shape
    values = jnp.zeros((B, K, G, S, v.shape[-1]), jnp.float32)
    if sinks is None:
        smallest = jnp.full((B, K, G, S), jnp.finfo(jnp.float32).min)
        return _SoftmaxSums(smallest, jnp.zeros((B, K, G, S), jnp.float32), values)
    sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, G, 1), (B, K, G, S))
    return _SoftmaxSums(sink, jnp.ones((B, K, G, S), jnp.float32), values)
