"""Engram: a memory of n-grams beside the residual stream, looked up by token hashes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from ..building import Builder, Inputs
from ..normalizations import scaled_to_one
from ..recurrences.convolutions import short_convolution


@dataclass(frozen=True, kw_only=True)
class EngramSpec:
    """The n-gram memory of one layer.

    Attributes:
        tables: rows of each table: one table per order (2-grams, 3-grams, …) and head.
        orders: number of n-gram orders.
        head_dim: values of a row.
        kernel: tokens of the convolution over the rows found.
        streams: residual streams; 1: a plain residual.
    """

    tables: tuple[int, ...]
    orders: int
    head_dim: int
    kernel: int
    streams: int
    scope: str = "engram"

    def make(self, build: Builder) -> Engram:
        """The tables and projections."""
        return Engram(self, build)


class Engram(nnx.Module):
    """Rows of the n-grams that end at a token, gated by each stream and convolved."""

    def __init__(self, spec: EngramSpec, build: Builder) -> None:
        D, G = build.emb_dim, spec.streams
        memory = len(spec.tables) * spec.head_dim
        rows = (sum(spec.tables), spec.head_dim)
        self.table = build.matrix(rows, spec.head_dim, ("position", "head_dim"))
        self.key = build.dense((memory,), (G, D), ("memory", "streams", "embed"), bias=True)
        self.value = build.dense((memory,), (D,), ("memory", "embed"), bias=True)
        self.key_scale, self.stream_scale, self.value_scale = (
            build.vector((G, D), 1.0, ("streams", "norm")) for _ in range(3)
        )
        channels = G * D
        self.kernel = build.matrix((spec.kernel, channels), spec.kernel, ("conv", "norm"))
        self.spec, self.epsilon = spec, build.epsilon

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, (streams,) emb_dim] → the same, with the memory's rows added."""
        streams = x if x.ndim == 4 else x[:, :, None]
        rows = ngram_rows(inputs.tokens, inputs.segment_ids, self.spec.tables, self.spec.orders)
        found = self.table[...].astype(x.dtype)[rows]
        found = found.reshape(*found.shape[:2], -1)
        with jax.named_scope("key"):
            k = self._scaled(self.key(found), self.key_scale)
        with jax.named_scope("value"):
            v = self.value(found)
        with jax.named_scope("gate"):
            match = jnp.einsum("bsgd,bsgd->bsg", k, self._scaled(streams, self.stream_scale))
        opened = jax.nn.sigmoid(match / math.sqrt(x.shape[-1]))
        v = v[:, :, None] * opened[..., None]
        normed = self._scaled(v, self.value_scale)
        flat = normed.reshape(*normed.shape[:2], -1)
        mixed = short_convolution(flat, self.kernel[...], inputs.segment_ids)
        return x + (jax.nn.silu(mixed).reshape(v.shape) + v).reshape(x.shape)

    def _scaled(self, x: jax.Array, scale: nnx.Param) -> jax.Array:
        return scaled_to_one(x, self.epsilon) * scale[...].astype(x.dtype)


def ngram_rows(
    tokens: jax.Array, segment_ids: jax.Array, tables: Sequence[int], orders: int
) -> jax.Array:
    """The row of each token's n-gram in each table, [batch, sequence, tables].

    The tables are concatenated in one array; n-grams do not cross document borders.
    """
    heads = len(tables) // orders
    length = tokens.shape[1]
    rows, first = [], 0
    for number, size in enumerate(tables):
        order, head = divmod(number, heads)
        mixed = jnp.zeros(tokens.shape, jnp.uint32)
        for back in range(order + 2):
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :length]
            segments = jnp.pad(segment_ids, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
            gram = jnp.where(segments == segment_ids, shifted + 1, 0).astype(jnp.uint32)
            odd = 2 * (head * 1_000_003 + back * 7919 + 12_345) + 1
            mixed = mixed ^ (gram * jnp.uint32(odd * 2654435761 % 2**32))
        mixed = mixed ^ (mixed >> 15)
        rows.append((mixed % jnp.uint32(size)).astype(jnp.int32) + first)
        first += size
    return jnp.stack(rows, axis=-1)


def table_sizes(bases: Sequence[int], heads: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """Rows of each layer's tables: primes from each base upwards, all different.

    >>> table_sizes([10], 2, 2)
    ((11, 13), (17, 19))
    """
    seen: set[int] = set()

    def next_prime(base: int) -> int:
        free = (n for n in itertools.count(base) if n not in seen and _is_prime(n))
        seen.add(found := next(free))
        return found

    return tuple(
        tuple(next_prime(base) for base in bases for _ in range(heads)) for _ in range(layers)
    )


def _is_prime(number: int) -> bool:
    divisors = range(2, math.isqrt(number) + 1)
    return number > 1 and all(number % divisor for divisor in divisors)
