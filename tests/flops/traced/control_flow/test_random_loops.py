"""Random integer loops and branches: the traced count is what runs, or it says so.

A slice of the 2,000 of `scripts/campaigns.sh integers`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.integer_loops import ONE, random_program, traced

RANDOM = st.integers(0, 2**32).map(random.Random)
SETTINGS = settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.full
@SETTINGS
@given(RANDOM)
def test_loops_without_data_count_what_runs(rng: random.Random) -> None:
    program = random_program(rng)
    count = traced(program)
    assert (count.total, count.unaccounted) == (program.expected(0) * ONE, ())


@pytest.mark.full
@SETTINGS
@given(RANDOM, st.integers(0, 9))
def test_loops_with_data_count_what_runs_or_say_so(rng: random.Random, data: int) -> None:
    program = random_program(rng, uses_data=True, data=data)
    count = traced(program)
    assert count.total == program.expected(data) * ONE or count.unaccounted
