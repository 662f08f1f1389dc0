"""The numbers that a loop gives its steps: any library's integers, and a loop that goes back."""

import logging
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.errors import UserError
from mfu_jax.logger.loop import step_numbers
from tests.support.logger_run import Run
from tests.support.sinks import ListSink


def test_a_loop_that_goes_back_is_told_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.WARNING, "mfu_jax"):
        run.steps(*[1.0] * 4)
        run.steps(*[1.0] * 3, start=2)
        for _ in range(9):
            run.steps(1.0, start=4)
        run.logger.close()
    assert [record.step for record in run.sink.records] == [0, 1, 2, 3, 2, 3, 4, *[4] * 9]
    assert "step 2 was recorded after step 3: the loop went back" in caplog.messages[0]
    assert len(caplog.messages) == 3  # and not twelve


def test_a_loop_that_records_some_of_its_steps_is_told_once_how_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    for step in (5, 15, 25):  # the first may be any
        run.logger.record(step, {})
    run.logger.close()
    (message,) = caplog.messages
    assert message.startswith("step 15 was recorded after step 5: the time between counts as that")
    assert message.endswith("hint: pass steps=10 if that many ran, or record each step")


def test_steps_with_times_of_their_own_may_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for step in (0, 10, 20):
        run.logger.record(step, {}, step_time_seconds=1.0)
    run.logger.close()
    assert not caplog.messages


def test_a_call_of_several_steps_goes_back_from_its_first_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(sinks=[sink := ListSink()])
    backs: list[int] = []
    run.logger._pipeline.tell = lambda kind, step: backs.append(step)  # type: ignore[method-assign]
    for step in (3, 7, 11, 7, 9, 13):
        run.logger.record(step, {}, steps=4, step_time_seconds=4.0)
    run.logger.close()
    assert backs == [4, 6]
    firsts = (0, 4, 8, 4, 6, 10)
    assert [r.step for r in sink.records] == [s for f in firsts for s in range(f, f + 4)]
    assert [text[:37] for text in caplog.messages] == [
        "step 4 was recorded after step 11: th",
        "step 6 was recorded after step 7: the",
    ]


@pytest.mark.parametrize(("earlier", "step"), [([], 10), ([], 12), ([13], 9)])
def test_a_call_of_several_steps_that_begins_before_the_first_is_refused(
    earlier: list[int], step: int
) -> None:
    run = Run(start_step=10, sinks=[sink := ListSink()])
    for last in earlier:
        run.logger.record(last, {}, steps=4)
    with pytest.raises(UserError, match=rf"(?s)steps {step - 3} to {step} were .* before 10"):
        run.logger.record(step, {}, steps=4)
    run.logger.record(17, {}, steps=4)
    run.logger.close()
    assert [r.step for r in sink.records] == [*range(10, 10 + 4 * len(earlier)), *range(14, 18)]


@pytest.mark.parametrize("step", ["2", 2.5, None, True, math.nan, [2]])
def test_a_step_that_is_no_whole_number_is_refused(step: Any) -> None:
    run = Run()
    with pytest.raises(UserError, match=r"is no whole number; expected 0, 1, 2"):
        run.logger.record(step, {"loss": 1.0})
    run.logger.close()


def test_a_steps_number_may_be_an_integer_of_any_library(caplog: pytest.LogCaptureFixture) -> None:
    step_numbers._say_that_it_waits.cache_clear()
    run = Run()
    for step in (0, np.int64(1), jnp.int32(2), 3.0, jnp.int32(4)):
        run.logger.record(step, {}, step_time_seconds=1.0)  # type: ignore[arg-type]
    run.logger.close()
    assert [(type(r.step), r.step) for r in run.sink.records] == [(int, i) for i in range(5)]
    (warning,) = caplog.messages
    assert "the device idles between the steps\nhint: pass the loop's own counter" in warning


def test_a_loop_that_goes_back_before_its_first_step_is_not_warming_up_again() -> None:
    run = Run(warmup_steps=2, start_step=100)
    run.steps(*[1.0] * 5, start=100)
    run.steps(*[1.0] * 4, start=50)
    assert run.logger.close().steps == 7
    kinds = [record.kind for record in run.sink.records]
    assert kinds == ["warmup"] * 2 + ["step"] * 7
