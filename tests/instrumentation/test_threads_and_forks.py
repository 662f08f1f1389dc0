"""One thread uses a logger: what others get that call steps, and a child of a fork."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType

import mfu_jax
from mfu_jax.instrumentation import step_observer
from tests.support.instrumented import PEAK
from tests.support.logger_run import Run
from tests.support.sinks import ListSink
from tests.support.work import HANG_SECONDS

_CALLS = 100


def _scaled(factor: float) -> Any:
    return jax.jit(lambda x: {"loss": jnp.sum(x) * factor})


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("steps", [(1.0, 2.0, 3.0), (1.0,)])
def test_of_threads_that_share_a_logger_one_runs_the_loop_and_loses_no_step(
    steps: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    memory, errors = ListSink(), []
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    made = [mfu_jax.instrument(_scaled(factor), logger=logger, **PEAK) for factor in steps]
    together = threading.Barrier(3)

    def loop(step: Any, size: int) -> None:
        try:
            for number in range(_CALLS):
                if number == 1:
                    together.wait(HANG_SECONDS)  # all have called it, one was first
                step(jnp.ones(size))
            together.wait(HANG_SECONDS)  # none ends before the others have begun
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(made[i % len(made)], 4 + i)) for i in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    logger.close()
    assert not errors
    assert [record.step for record in memory.records] == list(range(_CALLS))
    (line,) = caplog.messages
    assert "runs the loop; expected one thread for each logger" in line


def test_a_loop_goes_on_in_another_thread_when_its_own_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = ListSink()
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    with logger.pause("restore"):  # in the thread that starts the loop
        pass

    def epoch() -> None:
        for _ in range(2):
            with logger.waiting("data"):
                pass
            logger.record(logger.next_step, {"loss": jnp.ones(())})

    in_thread(epoch)
    in_thread(epoch)
    epoch()
    logger.close()
    assert [record.step for record in memory.records] == list(range(6))
    assert not caplog.messages


def test_pauses_and_waits_of_another_thread_touch_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()

    def elsewhere() -> None:
        with run.logger.pause("checkpoint"), run.logger.waiting("data"):
            run.clock.advance(0.5)
        with run.logger.own_pause("count"):  # not the user's, so nothing is said
            pass
        run.logger.record_eval(1, {"loss": 5.0})

    run.steps(1.0, 1.0)
    in_thread(elsewhere)
    run.steps(1.0, 1.0, start=2)
    run.logger.close()
    assert [record.step for record in run.sink.records] == [0, 1, 2, 3]
    assert run.sink.scalar("perf/step_time_seconds") == [1.0] * 4
    assert run.sink.scalar("goodput/checkpoint_seconds") == [None] * 4
    assert run.sink.scalar("eval/loss") == [None, None, 5.0, None]
    assert ["the pause checkpoint of thread" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(("sizes", "programs"), [((8, 8, 8), 1), ((8, 16, 8), 2)])
def test_concurrent_first_calls_share_a_logger_and_analyse_each_program_once(
    sizes: tuple[int, ...], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    together = threading.Barrier(len(sizes))

    def slowly(name: str) -> Any:
        make = getattr(step_observer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            time.sleep(0.05)  # the others arrive meanwhile
            return make(*args, **kwargs)

        monkeypatch.setattr(step_observer, name, call)

    slowly("logger_of")
    slowly("ProgramAnalysis")
    memory = ListSink()
    train = jax.jit(lambda x: {"loss": jnp.sum(x @ x)})
    step = mfu_jax.instrument(train, sinks=[memory], **PEAK)

    def call(x: jax.Array) -> None:
        together.wait(30)
        step(x)

    xs = [jnp.ones((size, size)) for size in sizes]
    threads = [threading.Thread(target=call, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step.close()
    assert made.count("logger_of") == 1
    assert made.count("ProgramAnalysis") == programs
    # A thread that has ended leaves the logger to the next.
    assert memory.steps == list(range(len(memory.steps)))
    assert memory.steps
    losses = memory.scalar("learning/loss")
    assert memory.scalar("perf/per_device_tflops") == [2 * loss / 1e12 for loss in losses]


_FORK = """
import os, sys, threading, time
import jax, jax.numpy as jnp
import mfu_jax

step = mfu_jax.instrument(jax.jit(lambda x: {"loss": jnp.sum(x)}), metrics_file=sys.argv[1])
for _ in range(3):
    step(jnp.ones(4))
recording, done = threading.Event(), threading.Event()

def record():  # another thread is in the middle of it
    with step.logger._thread._lock:
        recording.set()
        done.wait(60)

other = threading.Thread(target=record)
other.start()
recording.wait()
if (child := os.fork()) == 0:
    logger = step.logger
    for number in range(3, 9):
        with logger.waiting("data"), logger.pause("checkpoint"), logger.step() as scope:
            scope.log(loss=1.0)
        logger.record(number, {"loss": 1.0})
    logger.flush()
    sys.exit(0)  # runs what atexit holds
begin = time.monotonic()
os.waitpid(child, 0)
print("waited", time.monotonic() - begin)
done.set()
other.join()
step(jnp.ones(4))
step.close()
"""


@pytest.mark.full
def test_a_fork_neither_waits_for_the_logger_nor_closes_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _FORK, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("waited")]
    assert float(line.split()[1]) < 6  # a logger without its threads takes about 8 s to close
    assert "is not logged" not in done.stderr
    assert "were not all written" not in done.stderr
    assert len(path.read_text().splitlines()) == 4


def test_another_thread_s_call_hides_no_compilation() -> None:
    """The loop calls the step while it compiles for a thread whose calls are not logged."""
    memory, compiling, called = ListSink(), threading.Event(), threading.Event()

    @jax.jit
    def train(x: jax.Array) -> dict[str, jax.Array]:
        if x.shape[0] == 64:
            compiling.set()
            called.wait(30)
        return {"loss": jnp.sum(x @ x)}

    step = mfu_jax.instrument(train, sinks=[memory], **PEAK)
    step(jnp.ones((8, 8)))
    other = threading.Thread(target=step, args=(jnp.ones((64, 64)),))
    other.start()
    assert compiling.wait(30)
    step(jnp.ones((8, 8)))
    called.set()
    other.join()
    step(jnp.ones((64, 64)))
    step.close()
    assert memory.scalar("perf/per_device_tflops") == [2 * n**3 / 1e12 for n in (8, 8, 64)]


def test_a_callback_of_the_step_that_is_waited_for_may_use_the_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory, threads = ListSink(), set[int]()
    # Of one device, the loop's own thread runs the callback.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("data")))
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)

    def told(loss: Any) -> None:
        time.sleep(0.05)  # the loop waits for this step meanwhile
        if not threads:
            logger.record(logger.next_step, {"loss": 0.0})
        threads.add(threading.get_ident())
        logger.record_eval(-1, {"seen": float(loss)})
        with logger.pause("checkpoint"):
            pass
        with logger.waiting("data"):
            pass

    @jax.jit
    def train_step(x: jax.Array) -> dict[str, jax.Array]:
        loss = jnp.sum(x @ x)
        jax.debug.callback(told, loss)
        return {"loss": loss}

    def loop() -> None:
        for _ in range(3):
            logger.record(logger.next_step, train_step(x))
        logger.close()

    runs = threading.Thread(target=loop, daemon=True)
    runs.start()
    runs.join(60)
    assert not runs.is_alive()
    assert runs.ident not in threads
    (line,) = caplog.messages
    assert "usually an actor and a learner share a logger, or an instrumented function" in line
    losses = [record.scalars["learning/loss"] for record in memory.records]
    assert [loss for loss in losses if loss] == [8**3] * 3


@pytest.mark.parametrize("devices", [1, 8])
def test_a_loop_inside_of_a_jitted_function_records_in_its_callback(
    devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = ListSink()
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("data")))

    def told(step: Any, loss: Any) -> None:
        with logger.waiting("data"):
            pass
        logger.record(step, {"loss": loss})

    @jax.jit
    def train(x: jax.Array) -> jax.Array:
        def body(step: Any, x: jax.Array) -> jax.Array:
            x = x / 2
            io_callback(told, None, step, x.sum(), ordered=devices == 1)
            return x

        return jax.lax.fori_loop(0, 6, body, x)

    jax.block_until_ready(train(x))
    jax.effects_barrier()
    logger.close()
    assert sorted(memory.steps) == list(range(6))
    assert not [line for line in caplog.messages if "is not logged" in line]
