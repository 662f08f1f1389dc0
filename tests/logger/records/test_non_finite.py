"""A loss that is NaN or infinite: it ends the run, or is one loud line."""

import contextlib
import math
import weakref

import jax
import pytest

from mfu_jax.logger.records.non_finite import NonFiniteLossError
from tests.support.logger_run import Run


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_written(loss: float) -> None:
    run = Run(abort_on_nan_loss=True, abort_on_inf_loss=True)
    run.steps(1.0, 1.0)
    run.steps(1.0, start=2, loss=loss)
    run.steps(1.0, start=3)  # only now has step 2 ended
    run.logger.flush()
    with pytest.raises(NonFiniteLossError) as caught:
        run.steps(1.0, start=4)
    assert caught.value.step == 2
    assert caught.value.value == loss or math.isnan(loss)
    assert [record.step for record in run.sink.records] == [0, 1, 2]
    assert run.logger.close().steps == 3  # raised once is enough
    assert run.sink.closed


def test_the_loss_of_the_last_step_is_checked_when_the_logger_closes() -> None:
    run = Run(abort_on_nan_loss=True)
    run.steps(1.0)
    run.steps(1.0, start=1, loss=math.nan)
    with pytest.raises(NonFiniteLossError, match="step 1 is nan"):
        run.logger.close()
    assert [record.step for record in run.sink.records] == [0, 1]


def test_by_default_a_loss_that_is_not_finite_is_one_loud_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.steps(1.0, 1.0, loss=math.nan)
    run.steps(1.0, start=2, loss=math.inf)
    run.logger.close()
    assert len(run.sink.records) == 3
    (line,) = caplog.messages
    assert line.startswith("THE LOSS OF STEP 0 IS nan")
    assert "abort_on_nan_loss=True" in line


def test_each_kind_of_loss_has_its_own_switch() -> None:
    run = Run(abort_on_inf_loss=True)
    run.steps(1.0, loss=math.nan)
    run.steps(1.0, start=1, loss=math.inf)
    with pytest.raises(NonFiniteLossError, match="step 1 is inf"):
        run.logger.close()


def test_a_raised_error_keeps_nothing_of_the_loop_alive() -> None:
    run = Run(abort_on_nan_loss=True)
    run.steps(1.0, loss=math.nan)

    class State: ...

    def loop() -> weakref.ref[State]:
        state = State()
        with contextlib.suppress(NonFiniteLossError):
            run.logger.close()
        return weakref.ref(state)

    assert loop()() is None


def test_other_processes_write_nothing_but_see_a_broken_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run = Run(abort_on_nan_loss=True)
    run.steps(1.0, loss=math.nan)
    with pytest.raises(NonFiniteLossError):
        run.logger.close()
    assert run.sink.records == []
