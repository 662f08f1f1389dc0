"""Engram's hashed tables: every head's has a prime number of rows that no other has."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_jax.flops.analytic.architectures.deepseek import _engram_rows
from mfu_jax.flops.exact import is_prime


def by_trial_division(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


def primes_from(base: int, taken: set[int]) -> Iterator[int]:
    number = base
    while True:
        if number not in taken and by_trial_division(number):
            taken.add(number)
            yield number
        number += 1


@pytest.mark.parametrize("first", [0, 2**20, 2**30])
def test_primes_are_those_of_trial_division(first: int) -> None:
    numbers = range(first, first + (5000 if first == 0 else 100))
    assert [n for n in numbers if is_prime(n)] == [n for n in numbers if by_trial_division(n)]


def test_strong_pseudoprimes_are_no_primes() -> None:
    """The least numbers that pass for the first 1, 2, … 6 witnesses (OEIS A014233)."""
    least = (2047, 1373653, 25326001, 3215031751, 2152302898747, 3474749660383)
    assert not any(map(is_prime, least))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_each_table_takes_the_next_free_prime(bases: list[int], heads: int, layers: int) -> None:
    taken: set[int] = set()
    expected = []
    for _ in range(layers):
        found = [next(primes_from(base, taken)) for base in bases for _ in range(heads)]
        expected.append(sum(found))
    assert _engram_rows(tuple(bases), heads, layers) == tuple(expected)
