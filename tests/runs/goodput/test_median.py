"""The median without sorting is the one of the sorted numbers."""

from __future__ import annotations

import random

import pytest

from mfu_jax.runs.goodput.median import lower_median


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_lower_middle_of_the_sorted_numbers(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 7, 300, 3000]) for _ in range(chance.randrange(1, 12))]
    ranges = chance.choice([[(0, 3)], [(0, 10**6)], [(0, 10), (10**6, 10**7)]])
    parts = [[chance.randint(*chance.choice(ranges)) for _ in range(size)] for size in sizes]
    values = sorted(value for part in parts for value in part)
    assert lower_median(parts) == (values[(len(values) - 1) // 2] if values else 0)


def test_a_sample_unlike_the_rest() -> None:
    """Every second value is sampled, and the others are all larger."""
    parts = [[1, 10] * 1000]
    assert lower_median([*parts, [10]]) == 10
