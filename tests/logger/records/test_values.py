"""What a loop may give as a metric: each value becomes a plain number, is left out, or says why."""

import decimal
import fractions
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.values import plain_number, plain_seconds
from tests.support.logger_run import Run
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS


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
    with pytest.raises(ValueError, match=r"(?s)deleted before it could be read.*donated state"):
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


def test_what_is_too_big_for_a_metric_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for step in range(3):
        metrics = {"loss": 1.0, "grads": {"w": np.ones((64, 64)), "norm": 2.0}}
        run.logger.record(step, metrics, step_time_seconds=1.0)
        run.logger.record_eval(step, {"images": [np.ones(64)] * 3, "loss": 3.0})
    run.logger.close()
    assert run.sink.scalar("learning/grads/norm") == [2.0] * 3
    assert run.sink.scalar("eval/loss") == [3.0] * 3
    assert caplog.messages == [
        "metrics left out: grads/w [64,64]: a metric is a scalar or a vector of at most 16 numbers",
        "metrics left out: images (3 arrays): a metric is a scalar or a vector of at most 16 "
        "numbers",
    ]
    assert not any(record.notes for record in run.sink.records)


def test_a_metric_that_grows_later_is_left_out_from_then_on() -> None:
    run = Run()
    for step, shape in enumerate([(), (2,), (), (64,), (), (16,), (17,)]):
        metrics = {"loss": 1.0, "size": jnp.ones(shape), "number": np.ones(shape)}
        run.logger.record(step, metrics, step_time_seconds=1.0)
    run.logger.close()
    kept = [[n for n in r.scalars if n.startswith("learning/size")] for r in run.sink.records]
    assert [len(names) for names in kept] == [1, 2, 1, 0, 1, 16, 0]
    assert run.sink.scalar("learning/number") == [1.0, None, 1.0, None, 1.0, None, None]


def test_a_short_vector_is_a_metric_for_each_number() -> None:
    run = Run()
    vector = {"loss": jnp.asarray([1.0, 3.5]), "accuracy": np.asarray([0.25, 0.5, 1.0])}
    run.logger.record(0, vector, step_time_seconds=1.0)
    run.logger.close()
    (record,) = run.sink.records
    learned = {name: n for name, n in record.scalars.items() if name.startswith("learning/")}
    assert learned == {
        "learning/loss": 2.25,
        "learning/loss/0": 1.0,
        "learning/loss/1": 3.5,
        "learning/accuracy/0": 0.25,
        "learning/accuracy/1": 0.5,
        "learning/accuracy/2": 1.0,
    }
    assert not record.notes


def test_a_buffer_that_the_loop_fills_again_keeps_the_numbers_of_its_step() -> None:
    run = Run(write_period_seconds=60.0)  # all steps are recorded before the first is written
    loss, norms = np.zeros(()), np.zeros(2)
    for step in range(5):
        loss[...], norms[:] = step, 10 + step
        metrics = {"loss": loss, "by": {"norms": norms}}
        run.logger.record(step, metrics, step_time_seconds=1.0)
        run.logger.record_eval(step, {"norms": norms})
    run.logger.close()
    assert run.sink.scalar("learning/loss") == [0.0, 1.0, 2.0, 3.0, 4.0]
    for name in ("learning/by/norms/1", "eval/norms/1"):
        assert run.sink.scalar(name) == [10.0, 11.0, 12.0, 13.0, 14.0]


def test_a_function_is_called_before_the_steps_of_a_period_have_come() -> None:
    """What it refers to, often the gradients of its step, is alive until then."""
    run = Run(write_period_seconds=60.0)
    called = [threading.Event() for _ in range(5)]
    for step, event in enumerate(called):
        run.logger.record(step, {"by": {"norm": event.set}}, step_time_seconds=1.0)
        assert step == 0 or called[step - 1].wait(HANG_SECONDS)
    run.logger.close()
