"""What a loop may give as a metric: each value becomes a plain number, or says why it cannot."""

import decimal
import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.scalars import plain_number, plain_seconds
from tests.support.sinks import ListSink


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.5, 2.5),
        (7, 7),
        (True, 1),
        (np.bool_(True), 1),
        (np.float64(2.5), 2.5),
        (np.float32(2.5), 2.5),
        (np.longdouble(2.5), 2.5),
        (np.int32(-7), -7),
        (np.ones((1, 1)), 1.0),
        (jnp.float32(2.5), 2.5),
        (jnp.bfloat16(2.5), 2.5),
        (jnp.int8(-7), -7),
        (jnp.ones((1,), bool), 1),
        (10**300, 10**300),
        (fractions.Fraction(1, 4), 0.25),
        (decimal.Decimal("0.25"), 0.25),
        (math.inf, math.inf),
    ],
)
def test_a_number_of_any_library_becomes_a_python_number(value: Any, expected: float) -> None:
    number = plain_number(value)
    assert number == expected
    assert type(number) is type(expected)


def test_a_nan_stays_a_nan() -> None:
    assert math.isnan(plain_number(jnp.float32(math.nan)))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0.5", "it is text"),
        (b"0.5", "it is text"),
        (1 + 2j, "dtype complex128"),
        (jnp.complex64(1j), "dtype complex64"),
        (np.datetime64("2026-01-01"), "dtype datetime64"),
        (10**400, "no 64-bit float"),
        (jnp.ones((2, 3)), r"shape \(2, 3\)"),
        (np.ones((0,)), r"shape \(0,\)"),
        (jax.random.key(0), "PRNGKey"),
        (object(), "object"),
    ],
)
def test_anything_else_says_why_it_is_no_number(value: Any, reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        plain_number(value)


def test_a_big_array_is_refused_by_its_shape_and_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    big = jnp.ones((64, 64))
    monkeypatch.setattr("numpy.asarray", lambda *_: pytest.fail("it was copied"))
    with pytest.raises(ValueError, match="64, 64"):
        plain_number(big)


def test_a_donated_array_says_what_to_do() -> None:
    array = jnp.float32(1.0)
    array.delete()
    with pytest.raises(ValueError, match=r"deleted before it could be read.*donated state"):
        plain_number(array)


def test_seconds_are_those_of_a_clock() -> None:
    assert plain_seconds(0.25) == plain_seconds(np.float32(0.25)) == 0.25
    assert plain_seconds(jnp.float32(0.25)) == 0.25
    refused = (math.nan, math.inf, -1.0, 0.0, 1e308, 1e-300, "0.25", True, [1.0], 1j, object())
    assert [plain_seconds(value) for value in refused] == [None] * len(refused)


def test_a_metric_that_is_no_number_costs_the_others_nothing() -> None:
    """In no step, also once its class has been seen."""
    sink = ListSink()
    with MetricLogger(sinks=[sink]) as logger:
        for step in range(4):
            logger.record(step, {"loss": jax.numpy.float32(step), "key": jax.random.key(step)})
    losses = [record.scalars.get("learning/loss") for record in sink.records]
    assert losses == [0.0, 1.0, 2.0, 3.0]
