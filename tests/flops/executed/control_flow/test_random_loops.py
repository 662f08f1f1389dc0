"""Random integer loops and branches: the count is what ran on this machine, or it is flagged.

A slice of the 500 of `scripts/campaigns.sh integers`.
"""

from __future__ import annotations

import random

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfu_jax.flops.executed.counting import executed_flops
from tests.support.integer_loops import ONE, SIZE, compiled, random_program

RANDOM = st.integers(0, 2**32).map(random.Random)
SETTINGS = settings(
    max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.full
@SETTINGS
@given(RANDOM)
def test_loops_without_data_count_what_ran(rng: random.Random) -> None:
    program = compiled(random_program(rng))
    ran = int(program(jnp.eye(SIZE), jnp.int32(0))[1])
    count = executed_flops(program)
    assert (count.total, count.unaccounted, count.flags) == (ran * ONE, (), ())


@pytest.mark.full
@SETTINGS
@given(RANDOM, st.integers(0, 9))
def test_loops_with_data_count_what_ran_or_say_so(rng: random.Random, data: int) -> None:
    program = compiled(random_program(rng, uses_data=True, data=data))
    ran = int(program(jnp.eye(SIZE), jnp.int32(data))[1])
    count = executed_flops(program)
    assert count.total == ran * ONE or count.unaccounted or count.flags
