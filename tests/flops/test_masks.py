"""Attention pairs in closed form against masks that are written out, pair by pair."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from mfu_jax.flops.masks import (
    BlockDiffusion,
    Causal,
    Chunked,
    Full,
    Packed,
    Prefix,
    SlidingWindow,
    Strided,
    TopK,
)

lengths = st.integers(1, 40)
parts = st.integers(1, 45)


def written_out(length, sees, keys=None):
    return sum(bool(sees(q, k)) for q in range(length) for k in range(keys or length))


@given(lengths, parts, parts)
def test_exact_pairs_equal_the_mask_written_out(length, size, other):
    masks = {
        Causal(): lambda q, k: k <= q,
        Full(): lambda q, k: True,
        SlidingWindow(size): lambda q, k: q - size < k <= q,
        TopK(size): lambda q, k: q - size < k <= q,
        Chunked(size): lambda q, k: k <= q and k // size == q // size,
        Prefix(size): lambda q, k: k <= q or (k < size and q < size),
        BlockDiffusion(size): lambda q, k: k // size <= q // size,
        Packed(Causal(), each=size): lambda q, k: k <= q and k // size == q // size,
        Packed(SlidingWindow(other), each=size): lambda q, k: (
            q - other < k <= q and k // size == q // size
        ),
    }
    for mask, sees in masks.items():
        assert mask.pairs(length, "exact") == written_out(length, sees), mask
        assert mask.pairs(length, "dense") == length * length


@given(lengths, st.integers(1, 9), st.integers(0, 12))
def test_compressed_keys_are_seen_once_their_last_token_is(length, ratio, limit):
    keys = length // ratio
    seen = [sum((k + 1) * ratio <= q + 1 for k in range(keys)) for q in range(length)]
    expected = sum(min(count, limit) if limit else count for count in seen)
    assert Strided(ratio, limit).pairs(length, "exact") == expected
    assert Strided(ratio, limit).pairs(length, "dense") == length * keys


@given(st.lists(parts, min_size=1, max_size=6))
def test_packed_documents_of_given_lengths(documents):
    starts = [sum(documents[:i]) for i in range(len(documents))]
    owner = [i for i, n in enumerate(documents) for _ in range(n)]
    assert starts[0] == 0
    total = sum(documents)
    pairs = written_out(total, lambda q, k: k <= q and owner[q] == owner[k])
    assert Packed(Causal(), lengths=tuple(documents)).pairs(total, "exact") == pairs


@given(lengths, parts)
def test_maxtext_counts_the_area_half_a_diagonal_less(length, size):
    window = min(length, size)
    assert Causal().pairs(length, "maxtext") == Fraction(length * length, 2)
    # MaxText: S·W − W²/2; exact is S·W − W(W−1)/2
    difference = SlidingWindow(size).pairs(length, "exact") - SlidingWindow(size).pairs(
        length, "maxtext"
    )
    assert difference == Fraction(window, 2)


def test_deepseek4_pairs_equal_maxtext_formulas():
    # S·K − 2·K² picked pairs at ratio 4, and S²/(2·128) of the ratio-128 keys.
    length, kept = 8192, 512
    assert Strided(4, kept).pairs(length, "maxtext") == length * kept - 2 * kept**2
    assert Strided(128).pairs(length, "maxtext") == Fraction(length * length, 2 * 128)


def test_a_noised_copy_doubles_the_sequence():
    # A noised block sees itself and clean blocks before it, a clean block clean ones up to itself.
    length, block = 12, 4

    def sees(q, k):
        noised_q, noised_k = q < length, k < length
        q_block, k_block = (q % length) // block, (k % length) // block
        if noised_q:
            return (q_block == k_block) if noised_k else k_block < q_block
        return not noised_k and k_block <= q_block

    pairs = written_out(2 * length, sees)
    assert BlockDiffusion(block, noised=True).pairs(length, "exact") == pairs
