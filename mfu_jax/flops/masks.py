"""Attention masks: the (query, key) pairs of one sequence, under each way of counting.

A mask has three counts. `dense` is every pair, as computed by a program that ignores the mask.
`exact` counts the pairs that the mask keeps, one by one. `maxtext` is the continuous area that
MaxText uses (S²/2 under a causal diagonal, S·W − W²/2 in a window): half a diagonal less than
`exact`.

Adding one: a subclass of `Mask`, chosen in `analytic.architectures`; the traced count recognises it
in `traced.masks.patterns`, or takes it as declared in `traced.masks.declared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mfu_jax.flops.exact import Number, integral

PairCounting = Literal["maxtext", "exact", "dense"]


class Mask(ABC):
    """Which keys each query of a sequence sees; a new mask is one subclass."""

    def pairs(self, length: int, counting: PairCounting) -> Number:
        """(query, key) pairs of one sequence of `length` tokens: an int or a half-integer."""
        if counting == "dense":
            return self.all_pairs(length)
        return integral(self.kept(length, counting == "exact"))

    @abstractmethod
    def kept(self, length: int, exact: bool) -> Number:
        """The pairs that it keeps, one by one or as an area without half of each diagonal."""

    def all_pairs(self, length: int) -> int:
        """The pairs of a program that ignores it."""
        return length * length

    def keys_kept(self, length: int) -> int:
        """Keys that a cache holds after `length` tokens."""
        return length

    @property
    def keys_per_token(self) -> Number:
        """Keys that each token adds to a cache."""
        return 1


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key (encoders).

    Attributes:
        keys: length of the other sequence in cross attention; None for self-attention.
        queries: number of queries if it is not the sequence's length (a vision tower).
    """

    keys: int | None = None
    queries: int | None = None

    def kept(self, length: int, exact: bool) -> Number:
        return self.all_pairs(length)

    def all_pairs(self, length: int) -> int:
        queries = length if self.queries is None else self.queries
        return queries * (queries if self.keys is None else self.keys)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and everything before it: S(S + 1)/2 pairs.

    >>> [Causal().pairs(8, counting) for counting in ("maxtext", "exact", "dense")]
    [32, 36, 64]
    """

    def kept(self, length: int, exact: bool) -> Number:
        return Fraction(length * (length + exact), 2)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A causal query sees the last `size` tokens, itself included.

    Exact pairs: Σᵢ min(i, W) = S·W − W(W−1)/2 for W ≤ S.

    >>> [SlidingWindow(3).pairs(8, counting) for counting in ("exact", "dense")]
    [21, 64]
    """

    size: int

    def kept(self, length: int, exact: bool) -> Number:
        window = min(self.size, length)
        return length * window - Fraction(window * (window - exact), 2)

    def keys_kept(self, length: int) -> int:
        return min(self.size, length)  # a window drops the older ones


@dataclass(frozen=True)
class BidirectionalWindow(Mask):
    """A query sees itself and the tokens fewer than `size` before and after it.

    Exact pairs: S + 2·Σ (S − d) over the distances d from 1 to W − 1: of two windows, with the
    diagonal once.

    >>> [BidirectionalWindow(3).pairs(8, counting) for counting in ("exact", "dense")]
    [34, 64]
    """

    size: int

    def kept(self, length: int, exact: bool) -> Number:
        return 2 * SlidingWindow(self.size).kept(length, exact) - exact * length


@dataclass(frozen=True)
class Chunked(Mask):
    """Causal attention inside consecutive chunks of `size` tokens; the last may be shorter."""

    size: int

    def kept(self, length: int, exact: bool) -> Number:
        return Packed(Causal(), each=self.size).kept(length, exact)


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `prefix` tokens see each other; all others are causal over everything."""

    prefix: int

    def kept(self, length: int, exact: bool) -> Number:
        prefix = min(self.prefix, length)
        return Fraction(length * (length + exact) + prefix * (prefix - exact), 2)


@dataclass(frozen=True)
class BlockDiffusion(Mask):
    """Blocks of `block` tokens: a token sees its whole block and every block before it.

    With `noised` the sequence is in the batch twice, noised and clean (BD3-LM, arXiv
    2503.09573): a noised block sees itself and the clean blocks before it, a clean block itself
    and the clean blocks before it.
    """

    block: int
    noised: bool = False

    def kept(self, length: int, exact: bool) -> Number:
        blocks, rest = divmod(length, self.block)
        # Σ of block · b·block over whole blocks b = 1…n; the shorter last one sees everything.
        seen = self.block**2 * blocks * (blocks + 1) // 2 + rest * length
        return (1 + self.noised) * seen

    def all_pairs(self, length: int) -> int:
        return ((1 + self.noised) * length) ** 2


@dataclass(frozen=True)
class TopK(Mask):
    """A causal query sees the `size` keys that an indexer chose: min(i, K) of them.

    As many as in a window: which keys are chosen does not change their number.
    """

    size: int

    def kept(self, length: int, exact: bool) -> Number:
        return SlidingWindow(self.size).kept(length, exact)


@dataclass(frozen=True)
class Packed(Mask):
    """Documents packed into one sequence; no token sees another document.

    Attributes:
        inner: the mask inside a document.
        lengths: tokens of each document of one sequence; their sum must not exceed its length. The
            rest is padding and sees nothing.
        each: the length of every document if all are equal (or only the mean is known, which
            undercounts the pairs of mixed lengths); the last document is truncated.
    """

    inner: Mask
    lengths: Sequence[int] = ()
    each: int = 0

    def kept(self, length: int, exact: bool) -> Number:
        if not self.each:
            return sum((self.inner.kept(n, exact) for n in self.lengths), start=0)
        documents, rest = divmod(length, self.each)
        return documents * self.inner.kept(self.each, exact) + self.inner.kept(rest, exact)


@dataclass(frozen=True)
class Strided(Mask):
    """Causal attention over keys that each summarise `ratio` tokens (compressed attention).

    A query sees the ⌊i/ratio⌋ compressed keys whose last token is not after it, at most `limit` of
    them (0: no limit).
    """

    ratio: int
    limit: int = 0

    def kept(self, length: int, exact: bool) -> Number:
        keys = length // self.ratio
        limit = min(self.limit or keys, keys)
        # Σ over k = 1 … limit of the queries with k keys or more, from k·ratio on
        return limit * (length + exact) - Fraction(self.ratio * limit * (limit + exact), 2)

    def all_pairs(self, length: int) -> int:
        return length * (length // self.ratio)

    def keys_kept(self, length: int) -> int:
        return length // self.ratio

    @property
    def keys_per_token(self) -> Number:
        return Fraction(1, self.ratio)


@dataclass(frozen=True)
class LocalBlocks(Mask):
    """Attention inside overlapping blocks (audio encoders).

    Attributes:
        queries: queries of the sequence, independent of the text's length.
        chunk: queries per block; the last block is padded.
        keys: keys that each query of a block is multiplied with.
        past: how many keys before itself a query sees.
        future: how many keys after itself a query sees.

    >>> mask = LocalBlocks(5, 4, 6, past=1, future=0)
    >>> [mask.pairs(99, counting) for counting in ("exact", "dense")]
    [9, 48]
    """

    queries: int
    chunk: int
    keys: int
    past: int
    future: int

    def kept(self, length: int, exact: bool) -> Number:
        before, after = (min(reach, max(self.queries - 1, 0)) for reach in (self.past, self.future))
        cut_off = before * (before + 1) // 2 + after * (after + 1) // 2
        return self.queries * (1 + before + after) - cut_off

    def all_pairs(self, length: int) -> int:
        return -(-self.queries // self.chunk) * self.chunk * self.keys
