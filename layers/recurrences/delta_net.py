"""The gated delta net (arXiv 2412.06464): linear attention that erases before it writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..attention.ops import WHOLE
from ..building import Builder, Inputs
from .convolutions import short_convolution


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    """A state [key_dim, value_dim] for each value head; a key head serves several value heads.

    Attributes:
        kernel: tokens of the convolution before queries, keys and values.
        chunk: tokens computed at once.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    chunk: int = 64
    scope: str = "delta_net"
    needs: frozenset[str] = frozenset({WHOLE})

    def make(self, build: Builder) -> DeltaNet:
        """The layer's weights."""
        return DeltaNet(self, build)


class DeltaNet(nnx.Module):
    """Projections, convolution, the gated delta rule, a gated norm, the output projection."""

    def __init__(self, spec: DeltaNetSpec, build: Builder) -> None:
        D, H = build.emb_dim, spec.value_heads
        keys, values = spec.key_heads * spec.key_dim, H * spec.value_dim
        self.in_qkvz = build.dense((D,), (2 * keys + 2 * values,), ("embed", "mlp"))
        self.in_ba = build.dense((D,), (2 * H,), ("embed", "norm"))
        channels = 2 * keys + values
        self.kernel = build.matrix((spec.kernel, channels), spec.kernel, ("conv", "mlp"))
        self.log_decay = build.vector((H,), 0.0, ("norm",))
        self.time_bias = build.vector((H,), 1.0, ("norm",))
        self.norm = build.norm(spec.value_dim, "rmsnorm")
        self.out = build.dense((values,), (D,), ("mlp", "embed"))
        self.spec, self.splits = spec, (keys, values)

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        spec, (keys, values) = self.spec, self.splits
        B, S, _ = x.shape
        with jax.named_scope("in_qkvz"):
            qkvz = checkpoint_name(self.in_qkvz(x), "qkv_proj")
        with jax.named_scope("in_ba"):
            beta, time = jnp.split(self.in_ba(x).astype(jnp.float32), 2, axis=-1)
        qkv, z = jnp.split(qkvz, [2 * keys + values], axis=-1)
        qkv = jax.nn.silu(short_convolution(qkv, self.kernel[...], inputs.segment_ids))
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
        group = spec.value_heads // spec.key_heads
        q, k = (
            jnp.repeat(_unit(y.reshape(B, S, spec.key_heads, spec.key_dim)), group, axis=2)
            for y in (q, k)
        )
        log_decay = -jnp.exp(self.log_decay[...].astype(jnp.float32)) * jax.nn.softplus(
            time + self.time_bias[...].astype(jnp.float32)
        )
        with jax.named_scope("core"):
            y = chunked_delta_rule(
                q / math.sqrt(spec.key_dim),
                k,
                v.reshape(B, S, spec.value_heads, spec.value_dim),
                jax.nn.sigmoid(beta),
                log_decay,
                inputs.segment_ids,
                chunk=spec.chunk,
            )
        y = self.norm(y.astype(x.dtype)) * jax.nn.silu(z.reshape(y.shape))
        y = checkpoint_name(y.reshape(B, S, -1), "context")
        with jax.named_scope("out"):
            return checkpoint_name(self.out(y), "out_proj")


def _unit(x: jax.Array) -> jax.Array:
    """Normalises vectors to length 1 over the last dimension."""
    x32 = x.astype(jnp.float32)
    squares = jnp.square(x32).sum(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)


def chunked_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array,
    segment_ids: jax.Array,
    *,
    chunk: int,
) -> jax.Array:
    """The gated delta rule, a chunk at a time (arXiv 2412.06464, section 3.3).

    For each head, ``S ← exp(g)·S``, then ``S ← S + k·(β(v − kᵀS))``, and the result is ``qᵀS``; a
    document starts from S = 0. Within a chunk, the writes form one triangular system.

    Args:
        q: [B, S, H, K]; k the same; v [B, S, H, V].
        beta: how much of the old value a write replaces, [B, S, H]; log_decay (g) the same.
        segment_ids: [B, S].
        chunk: tokens at once; an incomplete chunk is padded.

    Returns:
        [B, S, H, V] in float32.
    """
    length = q.shape[1]
    between, from_start, to_end, across = chunk_decays(log_decay, segment_ids, chunk)
    q, k, v, beta = (in_chunks(x, chunk) for x in (q, k, v, beta))
    places = jnp.arange(chunk)
    written_k = k * beta[..., None]
    with jax.named_scope("keys"):
        overlaps = jnp.einsum("nbhck,nbhdk->nbhcd", written_k, k)
    system = jnp.where(places[:, None] > places, overlaps * between, 0) + jnp.eye(chunk)
    with jax.named_scope("inverse"):
        unit = jnp.broadcast_to(jnp.eye(chunk), system.shape)
        inverse = jax.scipy.linalg.solve_triangular(system, unit, lower=True, unit_diagonal=True)
    with jax.named_scope("writes"):
        new_values = jnp.einsum("nbhcd,nbhdv->nbhcv", inverse, v * beta[..., None])
        reads = jnp.einsum("nbhcd,nbhdk->nbhck", inverse, written_k * from_start[..., None])
    with jax.named_scope("queries"):
        weights = jnp.einsum("nbhck,nbhdk->nbhcd", q, k) * between
    steps = (
        q * from_start[..., None],
        k * to_end[..., None],
        new_values,
        reads,
        weights,
        across[..., None, None],
    )
    state = jnp.zeros((*q.shape[1:3], q.shape[-1], v.shape[-1]), jnp.float32)
    return from_chunks(jax.lax.scan(_one_chunk, state, steps)[1], length)


def _one_chunk(state: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    q, k, new_values, reads, weights, across = step
    new_values = new_values - jnp.einsum("bhck,bhkv->bhcv", reads, state)
    y = jnp.einsum("bhck,bhkv->bhcv", q, state)
    y = y + jnp.einsum("bhcd,bhdv->bhcv", weights, new_values)
    state = state * across + jnp.einsum("bhck,bhcv->bhkv", k, new_values)
    return state, y


def in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[B, S, H, ...] → [chunks, B, H, chunk, ...] in float32, padded with zeros.

    A scan goes over the first dimension, matmuls are batched over the next two.
    """
    pad = -x.shape[1] % chunk
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)


def from_chunks(y: jax.Array, length: int) -> jax.Array:
    """[chunks, B, H, chunk, ...] → [B, length, H, ...]."""
    y = jnp.moveaxis(y, 0, 1).swapaxes(2, 3)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length]


class ChunkDecays(NamedTuple):
    """Remaining shares; 0 across document borders.

    Attributes:
        between: of each token at each later one of its chunk, [chunks, B, H, chunk, chunk].
        from_start: of the state at each token, [chunks, B, H, chunk].
        to_end: of each token at the chunk's end, the same shape.
        across: of the state at the chunk's end, [chunks, B, H].
    """

    between: jax.Array
    from_start: jax.Array
    to_end: jax.Array
    across: jax.Array


def chunk_decays(log_decay: jax.Array, segment_ids: jax.Array, chunk: int) -> ChunkDecays:
    """The decays of log decays [B, S, H] in documents [B, S]."""
    reach = jnp.cumsum(in_chunks(log_decay, chunk), axis=-1)
    segments = jnp.pad(segment_ids, ((0, 0), (0, -segment_ids.shape[1] % chunk)), mode="edge")
    segments = segments.reshape(len(segments), -1, chunk).swapaxes(0, 1)[:, :, None]
    places = jnp.arange(chunk)
    seen = (segments[..., :, None] == segments[..., None, :]) & (places[:, None] >= places)
    last = segments[..., -1:]
    before = jnp.concatenate([jnp.full_like(last[:1], -1), last[:-1]])
    return ChunkDecays(
        jnp.exp(jnp.where(seen, reach[..., :, None] - reach[..., None, :], -jnp.inf)),
        jnp.where(segments == before, jnp.exp(reach), 0),
        jnp.where(segments == last, jnp.exp(reach[..., -1:] - reach), 0),
        jnp.where(before == last, jnp.exp(reach[..., -1:]), 0)[..., 0],
    )
