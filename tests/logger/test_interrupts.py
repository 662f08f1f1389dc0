"""Ctrl-C in each wait of the logger: no step is lost, and what is open closes."""

import threading
from typing import Any

import pytest

from tests.support.logger_run import Run


def interrupt_once(array: Any) -> None:
    """Ctrl-C while the loop waits for an array: Python raises it when the wait is over."""
    block = array.block_until_ready

    def interrupted() -> None:
        array.block_until_ready = block
        block()
        raise KeyboardInterrupt

    array.block_until_ready = interrupted


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_of_the_wait_loses_no_step(at: int) -> None:
    run = Run()

    def loop() -> None:
        with run.logger:
            for step in range(3):
                metrics = run.device.run(1.0 + step)
                if step == at:
                    interrupt_once(metrics["loss"])
                run.logger.record(step, metrics)
            with run.logger.pause("checkpoint"):  # waits for step 2
                pass

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 2.0, 3.0]
    assert run.sink.closed


def test_an_interrupt_of_close_closes_all_the_same() -> None:
    before = set(threading.enumerate())
    run = Run()
    run.steps(1.0, 1.0)
    metrics = run.device.run(1.0)
    interrupt_once(metrics["loss"])
    run.logger.record(2, metrics)
    with pytest.raises(KeyboardInterrupt):
        run.logger.close()
    assert run.sink.closed
    assert run.logger.summary().steps == 2
    ours = set(threading.enumerate()) - before
    assert not [thread for thread in ours if thread.name == "mfu_jax builder"]


def test_an_interrupt_of_an_eval_loses_none_of_the_steps_after_it() -> None:
    run = Run()
    run.steps(1.0, 1.0)

    def interrupted() -> None:
        raise KeyboardInterrupt

    metrics = run.device.run(1.0)
    metrics["loss"].block_until_ready = interrupted  # type: ignore[assignment]
    pause = run.logger.pause("eval")
    pause.__enter__()
    run.logger.spans.add_call(1, metrics)
    run.clock.advance(30.0)
    with pytest.raises(KeyboardInterrupt):
        pause.__exit__(None, None, None)
    run.steps(1.0, 1.0, start=2)
    run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0, 1.0, 1.0]
    assert run.sink.scalar("goodput/eval_seconds") == [None, 30.0, None, None]
