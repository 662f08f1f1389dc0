"""Query-key pairs: how many a mask keeps, and how many packed documents have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfu_jax.flops.masks import Causal, Mask, SlidingWindow


class Chunks(NamedTuple):
    """Consecutive chunks: query i and key j share one if (i + a) // size = (j + b) // size.

    Attributes:
        size: of a chunk.
        of_query: a, how far the first query is from the start of a chunk.
        of_key: b, the same of the first key.
    """

    size: int
    of_query: int = 0
    of_key: int = 0

    def contain(self, other: Chunks) -> bool:
        """Whether each of the other chunks lies in one of these."""
        shifts = self.of_query - other.of_query, self.of_key - other.of_key
        is_aligned = shifts[0] == shifts[1] and shifts[0] % other.size == 0
        return is_aligned and self.size % other.size == 0

    def pieces(self, queries: int, keys: int) -> Counter[tuple[int, int, int]]:
        """How often chunks have so many queries, so many keys, and so far between their first."""
        found: Counter[tuple[int, int, int]] = Counter()
        size = self.size
        first, last = (
            max(self.of_query, self.of_key),
            min(queries + self.of_query, keys + self.of_key),
        )
        whole = range(-(-first // size) * size, last - size + 1, size)  # chunks with all tokens
        if whole:
            found[size, size, self.of_key - self.of_query] += len(whole)
        for start in {first // size * size, (last - 1) // size * size} - {*whole[:1], *whole[-1:]}:
            i, j = (max(0, start - own) for own in self[1:])
            end_i = min(queries, start + size - self.of_query)
            end_j = min(keys, start + size - self.of_key)
            if i < end_i and j < end_j:
                found[end_i - i, end_j - j, i - j] += 1
        return found


class Band(NamedTuple):
    """Keeps the pairs of query i and key j with low ≤ i − j ≤ high; None means no bound.

    Attributes:
        low: the least distance.
        high: the greatest distance.
        chunks: keeps only pairs in the same chunk.

    >>> Band(0, None).pairs(4, 4)  # causal: 1 + 2 + 3 + 4
    10
    >>> Band(0, 1).pairs(4, 4)  # a window of 2: 1 + 2 + 2 + 2
    7
    >>> Band(0, None, Chunks(2)).pairs(4, 4)  # causal in chunks of 2: 1 + 2 + 1 + 2
    6
    """

    low: int | None = None
    high: int | None = None
    chunks: Chunks | None = None

    def __and__(self, other: Band) -> Band:
        """The pairs of both, or more if `meets` is false."""
        lows = [b for b in (self.low, other.low) if b is not None]
        highs = [b for b in (self.high, other.high) if b is not None]
        chunks = [c for c in (self.chunks, other.chunks) if c is not None]
        finer = min(chunks, key=lambda c: c.size, default=None)
        return Band(max(lows, default=None), min(highs, default=None), finer)

    def meets(self, other: Band) -> bool:
        """Whether `&` has only the pairs of both."""
        a, b = self.chunks, other.chunks
        return a is None or b is None or a.contain(b) or b.contain(a)

    def __or__(self, other: Band) -> Band:
        """The smallest band with the pairs of both."""
        lows, highs = (self.low, other.low), (self.high, other.high)
        return Band(
            None if None in lows else min(b for b in lows if b is not None),
            None if None in highs else max(b for b in highs if b is not None),
            self.chunks if self.chunks == other.chunks else None,
        )

    def touches(self, other: Band) -> bool:
        """Whether no diagonal lies between the two, so that `|` has only pairs of them."""
        return self.chunks == other.chunks and all(
            a.low is None or b.high is None or a.low <= b.high + 1
            for a, b in ((self, other), (other, self))
        )

    def mirrored(self) -> Band:
        """The same pairs with queries and keys exchanged."""
        low, high, chunks = self
        return Band(
            None if high is None else -high,
            None if low is None else -low,
            chunks and Chunks(chunks.size, chunks.of_key, chunks.of_query),
        )

    def sliced(self, query: int, key: int) -> Band:
        """The pairs from this query and this key on."""
        low, high, chunks = self
        shift = query - key
        return Band(
            None if low is None else low - shift,
            None if high is None else high - shift,
            chunks and Chunks(chunks.size, chunks.of_query + query, chunks.of_key + key),
        )

    def pairs(self, queries: int, keys: int) -> int:
        """The exact number of pairs kept."""
        if self.chunks:
            return self._in_chunks(Band.pairs, queries, keys)
        low = 1 - keys if self.low is None else max(self.low, 1 - keys)
        high = queries - 1 if self.high is None else min(self.high, queries - 1)
        return max(0, _pairs_up_to(high, queries, keys) - _pairs_up_to(low - 1, queries, keys))

    def _in_chunks(self, count: Callable[[Band, int, int], int], queries: int, keys: int) -> int:
        whole = self._replace(chunks=None)
        pieces = self.chunks.pieces(queries, keys) if self.chunks else Counter()
        return sum(times * count(whole.sliced(d, 0), q, k) for (q, k, d), times in pieces.items())

    def twice_maxtext_pairs(self, queries: int, keys: int) -> int:
        """Twice the pairs as MaxText counts them: S²/2 causal, S·W − W²/2 in a window of W."""
        if self.chunks:
            return self._in_chunks(Band.twice_maxtext_pairs, queries, keys)
        bounds = sorted(abs(b) for b in (self.low, self.high) if b is not None)
        mask: Mask | None = None
        if queries == keys and 0 in bounds:
            mask = Causal() if len(bounds) == 1 else SlidingWindow(bounds[-1] + 1)
        return int(2 * mask.pairs(queries, "maxtext")) if mask else 2 * self.pairs(queries, keys)

    def label(self) -> str:
        """``causal``, ``window 128``, or the bounds; and the chunks."""
        low, high, chunks = self
        if chunks:
            within = self._replace(chunks=None)
            in_chunks = f"chunks of {chunks.size}"
            return in_chunks if within == Band() else f"{within.label()} in {in_chunks}"
        if 0 in (low, high) and None in (low, high):
            return "causal"
        if 0 in (low, high) and low is not None and high is not None:
            return f"window {max(abs(low), abs(high)) + 1}"
        if low is high is None:
            return "all pairs"
        above, below = ("" if bound is None else str(bound) for bound in (low, high))
        return f"{above}{' ≤ ' * bool(above)}query − key{' ≤ ' * bool(below)}{below}"

    def without_idle_bounds(self, queries: int, keys: int) -> Band:
        """The same pairs, without bounds that exclude none."""
        band = self
        if self.chunks is None:
            low, high = self.low, self.high
            return Band(
                low if low is not None and low > 1 - keys else None,
                high if high is not None and high < queries - 1 else None,
            )
        for name in self._fields:
            without = band._replace(**{name: None})
            if without.pairs(queries, keys) == band.pairs(queries, keys):
                band = without
        return band


def _pairs_up_to(bound: int, queries: int, keys: int) -> int:
    """Pairs with i − j ≤ bound: those with i, j ≥ 0, minus those with i ≥ queries or j ≥ keys.

    With j counted from the last key, i + j < bound + keys: a triangle.
    """

    def triangle(side: int) -> int:
        return max(side, 0) * (side + 1) // 2

    beyond = triangle(bound + keys - queries) + triangle(bound) - triangle(bound - queries)
    return triangle(bound + keys) - beyond


_UNKNOWN = "a mask that depends on data"
_PART = "at most all pairs"


class KeptPairs(NamedTuple):
    """How many query-key pairs of a matmul a mask keeps.

    Attributes:
        label: the mask, in words.
        exact: the exact number of pairs kept.
        twice_maxtext: twice the pairs by MaxText's formula; S²/2 need not be an integer.
        of: number of all pairs.
        declared: by `attention_mask` in the model, which overrides recognised masks.
    """

    label: str
    exact: int
    twice_maxtext: int
    of: int
    declared: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether the mask depends on data, and all pairs are counted."""
        return self.label == _UNKNOWN

    @property
    def saves_nothing(self) -> bool:
        """Whether all pairs are counted because it is not known which are kept."""
        return self.label in (_UNKNOWN, _PART)

    def yields_to(self, recognised: KeptPairs) -> bool:
        """Whether a recognised mask overrides this declared one."""
        return not self.declared and not recognised.is_unknown


def unknown_pairs(pairs: int, *, has_mask: bool = True) -> KeptPairs:
    """Pairs under a mask that depends on data, or of which some are left out without a mask."""
    return KeptPairs(_UNKNOWN if has_mask else _PART, pairs, 2 * pairs, pairs)


def kept_pairs(band: Band, queries: int, keys: int, *, is_bound: bool = False) -> KeptPairs:
    """What a mask keeps of queries × keys; bounds that exclude no pair are dropped.

    Args:
        band: the pairs that it keeps.
        queries: number of queries.
        keys: number of keys.
        is_bound: whether it may keep fewer pairs, which its label says.
    """
    band = band.without_idle_bounds(queries, keys)
    twice_maxtext = band.twice_maxtext_pairs(queries, keys)
    label = f"at most {band.label()}" if is_bound else band.label()
    return KeptPairs(label, band.pairs(queries, keys), twice_maxtext, queries * keys)


_LIMB = 4096


def document_pairs(
    segment_ids: Any, *, padding_id: int | None = 0, causal: bool = False
) -> jax.Array:
    """The number of attention pairs of the documents packed into a batch, computed on the device.

    ΣL² over document lengths L; ΣL(L + 1)/2 if attention within each is causal. Read the result
    with `read_pairs` one step later, so that nothing waits for it.

    Args:
        segment_ids: [..., S] ints, equal at all positions of one document, which are contiguous.
        padding_id: the id of positions without a token; None if there is no padding.
        causal: whether a query sees only the keys of its document up to its own position.

    Returns:
        A small int32 array for `read_pairs`; the sum itself may not fit 32 bits.

    >>> read_pairs(document_pairs(np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])))
    49
    >>> read_pairs(document_pairs(np.array([[1, 1, 1, 2, 2, 0]]), causal=True))
    9
    """
    ids = jnp.asarray(segment_ids).reshape(-1, np.shape(segment_ids)[-1])

    def of_row(row: jax.Array) -> jax.Array:
        starts = jnp.concatenate([jnp.zeros(1, bool), row[1:] != row[:-1]])
        if causal:
            positions = jnp.arange(row.size)
            keys = positions - jax.lax.cummax(jnp.where(starts, positions, 0)) + 1
        else:
            document = jnp.cumsum(starts)
            keys = jnp.bincount(document, length=row.size)[document]
        if padding_id is not None:
            keys = jnp.where(row == padding_id, 0, keys)
        # Sum over queries of the number of keys each sees, in two parts that cannot overflow.
        return jnp.stack([jnp.sum(keys // _LIMB), jnp.sum(keys % _LIMB)])

    return jax.vmap(of_row)(ids)


def read_pairs(pairs: jax.Array) -> int:
    """The sum computed by `document_pairs`, as an int; waits for it."""
    high, low = np.asarray(pairs, dtype=object).sum(axis=0)
    return int(high) * _LIMB + int(low)
