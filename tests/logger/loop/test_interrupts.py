"""Ctrl-C in each wait of the logger: no step is lost, and what is open closes."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mfu_jax.logger.records.step_cost import StepCost
from tests.support.logger_run import RUN_COST, Run


class PreemptedError(Exception):
    """What a handler of the user's raises to end her loop."""


def preempt(number: int, frame: Any) -> None:
    raise PreemptedError


@pytest.fixture(params=[KeyboardInterrupt, PreemptedError])
def kind(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """What a SIGUSR2 raises."""
    handlers = {KeyboardInterrupt: signal.default_int_handler, PreemptedError: preempt}
    before = signal.signal(signal.SIGUSR2, handlers[request.param])
    yield request.param
    signal.signal(signal.SIGUSR2, before)


def interrupt_once(array: Any) -> None:
    """A signal while the loop waits for an array: Python handles it when the wait is over."""
    block = array.block_until_ready

    def interrupted() -> None:
        array.block_until_ready = block
        block()
        signal.raise_signal(signal.SIGUSR2)

    array.block_until_ready = interrupted


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_of_the_wait_loses_no_step(at: int, kind: type[BaseException]) -> None:
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

    with pytest.raises(kind):
        loop()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 2.0, 3.0]
    assert run.sink.closed


def test_an_interrupt_of_close_closes_all_the_same(kind: type[BaseException]) -> None:
    before = set(threading.enumerate())
    run = Run()
    run.steps(1.0, 1.0)
    metrics = run.device.run(1.0)
    interrupt_once(metrics["loss"])
    run.logger.record(2, metrics)
    with pytest.raises(kind):
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
    assert not run.logger.observe_call("evaluate", metrics, StepCost(**RUN_COST), None)
    run.clock.advance(30.0)
    with pytest.raises(KeyboardInterrupt):
        pause.__exit__(None, None, None)
    run.steps(1.0, 1.0, start=2)
    run.logger.close()
    assert run.sink.scalar("perf/step_time_seconds") == [1.0, 1.0, 1.0, 1.0]
    assert run.sink.scalar("goodput/eval_seconds") == [None, 30.0, None, None]
