"""Training time by three equal formulas, each inverse, and input that cannot be solved."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_jax.errors import UserError
from mfu_jax.runs.projection import project

# MaxText's page on performance metrics writes the time of T tokens on C chips in three ways. With
# round numbers: 1e12 tokens, 100 chips, 6e12 FLOPs a token, a peak of 1e15 and an MFU of 0.6 make
# 100 tokens/s a chip, so 1e12 / (100 × 100) = 1e8 seconds.
FACTS = {"flops_per_token": 6e12, "peak_flops_per_sec_per_chip": 1e15}


@pytest.mark.parametrize(
    "throughput",
    [
        {"mfu": 0.6},
        {"tokens_per_sec_per_chip": 100},
        {"step_time_seconds": 5, "tokens_per_step": 50_000},
    ],
)
def test_the_three_formulas_give_the_same_time(throughput: dict[str, float]):
    run = project(tokens=1e12, chips=100, **FACTS, **throughput)
    assert run.seconds == pytest.approx(1e8, rel=1e-12)
    assert run.mfu == pytest.approx(0.6, rel=1e-12)
    assert run.total_flops == 6e24
    assert run.chip_hours == pytest.approx(1e10 / 3600)


@pytest.mark.parametrize(
    ("given_values", "solved", "value"),
    [
        ({"chips": 100, "seconds": 1e8, "mfu": 0.6}, "tokens", 1e12),
        ({"tokens": 1e12, "seconds": 1e8, "mfu": 0.6}, "chips", 100),
        ({"tokens": 1e12, "chips": 100, "seconds": 1e8}, "mfu", 0.6),
        ({"tokens": 1e12, "chips": 100, "seconds": 1e8}, "tokens_per_sec_per_chip", 100),
        ({"tokens": 1e12, "chips": 100, "mfu": 0.6, "price_per_chip_hour": 3.6}, "cost", 1e7),
    ],
)
def test_every_inverse(given_values: dict[str, float], solved: str, value: float):
    assert getattr(project(**FACTS, **given_values), solved) == pytest.approx(value, rel=1e-12)


_positive = st.floats(min_value=1e-6, max_value=1e18)


@settings(deadline=None)
@given(_positive, _positive, st.floats(min_value=1e-6, max_value=1), _positive, _positive)
def test_solving_back_gives_what_was_given(tokens, chips, mfu, flops_per_token, peak):
    facts = {"flops_per_token": flops_per_token, "peak_flops_per_sec_per_chip": peak}
    run = project(tokens=tokens, chips=chips, mfu=mfu, **facts)
    assert math.isclose(run.seconds, flops_per_token * tokens / (mfu * chips * peak))
    back = project(tokens=tokens, chips=chips, seconds=run.seconds, **facts)
    assert back.mfu is not None
    assert math.isclose(back.mfu, mfu)


@pytest.mark.parametrize(
    ("given_values", "says"),
    [
        ({"tokens": 1e12, "chips": 100}, "too little is given"),
        ({"tokens": 1e12, "chips": 0, "mfu": 0.6}, "chips=0"),
        ({"tokens": -1e12, "chips": 1, "mfu": 0.6}, "tokens=-1e"),
        ({"tokens": float("nan"), "chips": 1, "mfu": 0.6}, "tokens=nan"),
        ({"tokens": 1e12, "chips": 100, "mfu": 40}, "pass mfu=0.4"),
        ({"tokens": 1e12, "chips": 100, "mfu": 0.6, "seconds": 1.0}, "contradicts itself"),
        ({"tokens": 1e12, "chips": 1, "step_time_seconds": 1}, "tokens_per_step"),
    ],
)
def test_what_cannot_be_solved_is_said(given_values: dict[str, float], says: str):
    with pytest.raises(UserError) as error:
        project(**FACTS, **given_values)
    assert says in str(error.value)


def test_an_mfu_without_model_or_chip_names_both_ways_out():
    with pytest.raises(UserError, match="model="):
        project(tokens=1, chips=1, mfu=0.4)
    with pytest.raises(UserError, match="hardware="):
        project(tokens=1, chips=1, mfu=0.4, flops_per_token=1)


@pytest.mark.parametrize(
    "given_values",
    [
        {"tokens": 1e-300, "chips": 1e300, "tokens_per_sec_per_chip": 1e300},
        {"tokens": 1e300, "chips": 1e-300, "tokens_per_sec_per_chip": 1e-300},
        {"tokens": 1e300, "chips": 1, "mfu": 1e-300, **FACTS},
        {"tokens": 1e-300, "chips": 1, "seconds": 1, "tokens_per_step": 1e300},
        {"tokens": 1e300, "chips": 1, "seconds": 1, "flops_per_token": 1e300},
        {
            "tokens": 1e300,
            "chips": 1e300,
            "tokens_per_sec_per_chip": 1,
            "price_per_chip_hour": 1e300,
        },
    ],
)
def test_numbers_that_no_float_holds_are_refused(given_values: dict[str, float]):
    with pytest.raises(UserError, match=r"is impossible; expected a number above 0"):
        project(**given_values)
