"""Ring attention by the splash kernel, for TPUs: all devices do the same work in every turn."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..jax_internals import splash_backward
from ..sharding import BATCH_AXES, SEQUENCE_AXIS, axis_size, constrain
from .kernels import splash_of_part
from .ops import (
    CONTEXT,
    SOFT_CAP,
    SPLIT,
    STAGED,
    VALUE_DIM,
    AttentionInputs,
    AttentionPattern,
    over_shards,
    register_attention,
)
from .ring import Keys, passed_on


class _Queries(NamedTuple):
    """One device's queries [B, N, S, h] and their segments [B, S]."""

    q: Any
    segment_ids: Any


class _Sums(NamedTuple):
    """Weighted means of the values seen so far [B, N, S, v], and the logs of the weights' sums."""

    means: jax.Array
    logs: jax.Array


def in_halves(x: jax.Array) -> jax.Array:
    """Tokens [B, S, …] in the order in which device i of n has the parts i and 2n - 1 - i of 2n.

    Of any two devices' queries and keys, half of all pairs are causal.
    """
    halves = x.reshape(x.shape[0], 2, axis_size(SEQUENCE_AXIS), -1, *x.shape[2:])
    ordered = jnp.stack([halves[:, 0], halves[:, 1, ::-1]], axis=2).reshape(x.shape)
    return constrain(ordered, BATCH_AXES, SEQUENCE_AXIS)


@register_attention("ring_splash", supports=(SOFT_CAP, VALUE_DIM, SPLIT, STAGED))
def ring_splash(x: AttentionInputs) -> jax.Array:
    """MaxText's ring on TPUs (after arXiv 2310.01889); tokens are in the order of `in_halves`.

    First, a device's queries see its own keys, causally. Then, of keys from an earlier device, all
    queries see the first half; of those from a later device, the last half of the queries sees
    all. Meanwhile the next keys arrive. Backward, the gradients of keys travel along with them.
    """
    return over_shards(_attended, x, queries=SEQUENCE_AXIS, keys=SEQUENCE_AXIS)


def _attended(x: AttentionInputs) -> jax.Array:
    """One device's part: queries [B, S, N, h] → [B, S, N, v]."""
    scale = x.pattern.scale_of(x.q.shape[-1])
    q, k, v = (array.swapaxes(1, 2) for array in (x.q * scale, x.k, x.v))
    queries, keys = _Queries(q, x.segment_ids), Keys(k, v, x.segment_ids)
    return _ring(x.pattern, queries, keys).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(pattern: AttentionPattern, queries: _Queries, keys: Keys) -> jax.Array:
    return _forward(pattern, queries, keys)[0]


def _forward(pattern: AttentionPattern, queries: _Queries, keys: Keys) -> tuple[jax.Array, Any]:
    """The result, and what the backward pass reads of it."""
    half = queries.q.shape[2] // 2

    def attend(queries: _Queries, keys: Keys) -> _Sums:
        means, (logs,) = _run(_kernel(pattern, queries, keys), queries, keys)
        return _Sums(means.astype(jnp.float32), logs)

    def of_earlier(sums: _Sums, keys: Keys) -> _Sums:
        return _joined(sums, attend(queries, _part(keys, slice(half))))

    def of_later(sums: _Sums, keys: Keys) -> _Sums:
        last = slice(half, None)
        joined = _joined(_part(sums, last), attend(_part(queries, last), keys))
        return _Sums(*(all_.at[:, :, last].set(y) for all_, y in zip(sums, joined, strict=True)))

    def turn(state: tuple[_Sums, Keys], number: jax.Array) -> tuple[tuple[_Sums, Keys], None]:
        sums, keys = state
        arriving = passed_on(keys)
        return (jax.lax.cond(_is_earlier(number), of_earlier, of_later, sums, keys), arriving), None

    state = attend(queries, keys), passed_on(keys)
    (sums, _), _ = jax.lax.scan(turn, state, jnp.arange(1, axis_size(SEQUENCE_AXIS)))
    out = checkpoint_name(sums.means.astype(queries.q.dtype), CONTEXT)
    logs = checkpoint_name(sums.logs, CONTEXT)
    return out, (queries, keys, out, logs)


def _backward(pattern: AttentionPattern, saved: Any, dout: jax.Array) -> tuple[_Queries, Keys]:
    """The gradients of queries and keys.

    A device's sums for the keys that it had in the last turn are still `pending` when it passes on
    the sums of the turns before: so no transfer waits for a kernel.
    """
    queries, own, out, logs = saved
    half = queries.q.shape[2] // 2

    def gradients(rows: slice, keys: Keys) -> tuple[jax.Array, ...]:
        of = _part(queries, rows)
        kernel = _kernel(pattern, of, keys)
        found = _run_backward(kernel, of, keys, out[:, :, rows], logs[:, :, rows], dout[:, :, rows])
        return tuple(gradient.astype(jnp.float32) for gradient in found)

    def of_earlier(dq: jax.Array, keys: Keys) -> tuple[jax.Array, ...]:
        more, *of_keys = gradients(slice(None), _part(keys, slice(half)))
        return dq + more, *(jnp.pad(y, ((0, 0), (0, 0), (0, half), (0, 0))) for y in of_keys)

    def of_later(dq: jax.Array, keys: Keys) -> tuple[jax.Array, ...]:
        more, *of_keys = gradients(slice(half, None), keys)
        return dq.at[:, :, half:].add(more), *of_keys

    def turn(state: Any, number: jax.Array) -> tuple[Any, None]:
        keys, dq, sums, pending = state
        sums = passed_on(jax.tree.map(jnp.add, sums, pending))
        arriving = passed_on(keys)
        dq, *found = jax.lax.cond(_is_earlier(number), of_earlier, of_later, dq, keys)
        return (arriving, dq, sums, tuple(found)), None

    dq, *first = gradients(slice(None), own)
    state = passed_on(own), dq, jax.tree.map(jnp.zeros_like, tuple(first)), tuple(first)
    state, _ = jax.lax.scan(turn, state, jnp.arange(1, axis_size(SEQUENCE_AXIS)))
    _, dq, sums, pending = state
    dk, dv = passed_on(jax.tree.map(jnp.add, sums, pending))
    dqueries = _Queries(dq.astype(queries.q.dtype), None)
    return dqueries, Keys(dk.astype(own.k.dtype), dv.astype(own.v.dtype), None)


_ring.defvjp(_forward, _backward)


def _is_earlier(number: jax.Array) -> jax.Array:
    """Whether the keys of a turn come from an earlier device."""
    return number <= jax.lax.axis_index(SEQUENCE_AXIS)


def _part(arrays: Any, rows: slice) -> Any:
    """Some of the positions."""
    return type(arrays)(*(a[:, rows] if a.ndim == 2 else a[:, :, rows] for a in arrays))


def _joined(one: _Sums, other: _Sums) -> _Sums:
    """The sums of both."""
    logs = jnp.logaddexp(one.logs, other.logs)
    first, second = (x.means * jnp.exp(x.logs - logs)[..., None] for x in (one, other))
    return _Sums(first + second, logs)


def _kernel(pattern: AttentionPattern, queries: _Queries, keys: Keys) -> Any:
    return splash_of_part(pattern, queries.q.shape[1], queries.q.shape[2], keys.k.shape[2])


def _run(kernel: Any, queries: _Queries, keys: Keys) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    segments = SegmentIds(queries.segment_ids, keys.segment_ids)
    return jax.vmap(kernel)(queries.q, keys.k, keys.v, segments)


def _run_backward(kernel: Any, queries: _Queries, keys: Keys, *of_all: jax.Array) -> Any:
    """The gradients of queries, keys and values by some of the keys.

    Args:
        kernel: of these queries and keys.
        queries, keys: its inputs.
        of_all: results and logs of the weights' sums over all keys, and the results' gradient.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    def of_row(q: Any, k: Any, v: Any, segments: Any, out: Any, logs: Any, dout: Any) -> Any:
        masks = kernel.dq_mask_info, kernel.dkv_mask_info
        residuals = (q, k, v, segments, None, out, logs, *masks)
        return splash_backward(residuals, dout, **kernel.kwargs)

    segments = SegmentIds(queries.segment_ids, keys.segment_ids)
    return jax.vmap(of_row)(queries.q, keys.k, keys.v, segments, *of_all)
