"""What is too big for a metric is left out; a short vector is a metric for each number."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.logger_run import Run
from tests.support.work import HANG_SECONDS


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
