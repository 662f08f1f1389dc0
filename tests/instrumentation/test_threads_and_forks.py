"""`instrument` where several threads call steps, and where the process forks."""

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
from jax.sharding import AxisType

import mfu_jax
from mfu_jax.instrumentation import step_observer
from mfu_jax.logger.loop import loop_lock as turns
from tests.support.instrumented import PEAK
from tests.support.sinks import ListSink

_CALLS = 100


def _scaled(factor: float) -> Any:
    return jax.jit(lambda x: {"loss": jnp.sum(x) * factor})


@pytest.mark.parametrize("steps", [(1.0, 2.0, 3.0), (1.0,)])
def test_threads_that_share_a_logger_lose_no_step(steps: tuple[float, ...]) -> None:
    memory, errors = ListSink(), []
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    made = [mfu_jax.instrument(_scaled(factor), logger=logger, **PEAK) for factor in steps]

    def loop(step: Any) -> None:
        try:
            for _ in range(_CALLS):
                step(jnp.ones(4))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(made[i % len(made)],)) for i in range(3)]
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
    assert [record.step for record in memory.records] == list(range(3 * _CALLS))


def test_a_pause_on_another_thread_leaves_the_order_of_steps_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = ListSink()
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)
    dispatched = logger._timer.dispatched

    def pause() -> None:
        with logger.pause("count", flush=False):
            pass

    def with_a_pause(step: Any) -> Any:
        finished = dispatched(step)
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join(0.2)  # as if Python's lock changed hands here
        return finished

    for number in range(4):
        monkeypatch.setattr(
            logger._timer, "dispatched", with_a_pause if number == 2 else dispatched
        )
        logger.record(number, {"loss": jnp.ones(())})
    logger.close()
    assert [record.step for record in memory.records] == [0, 1, 2, 3]


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
    assert [record.step for record in memory.records] == [0, 1, 2]
    flops = sorted(memory.scalar("perf/per_device_tflops"))
    assert flops == sorted(2 * size**3 / 1e12 for size in sizes)


_FORK = """
import os, sys, threading, time
import jax, jax.numpy as jnp
import mfu_jax

step = mfu_jax.instrument(jax.jit(lambda x: {"loss": jnp.sum(x)}), metrics_file=sys.argv[1])
for _ in range(3):
    step(jnp.ones(4))
recording, done = threading.Event(), threading.Event()

def record():  # another thread is in the middle of it
    with step.logger.spans.lock:
        recording.set()
        done.wait(60)

other = threading.Thread(target=record)
other.start()
recording.wait()
if (child := os.fork()) == 0:
    step.logger.flush()
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
    assert "were not all written" not in done.stderr
    assert len(path.read_text().splitlines()) == 4


def test_another_thread_s_call_hides_no_compilation() -> None:
    """A thread calls the step while it compiles for another thread."""
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
    step.close()
    assert memory.scalar("perf/per_device_tflops") == [2 * n**3 / 1e12 for n in (8, 8, 64)]


def test_a_callback_of_the_step_that_is_waited_for_may_use_the_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns._say_that_it_is_lost.cache_clear()
    memory, threads = ListSink(), set[int]()
    # Of one device, the loop's own thread runs the callback.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("data")))
    logger = mfu_jax.MetricLogger(sinks=[memory], warmup_steps=0)

    def told(loss: Any) -> None:
        time.sleep(0.05)  # the loop waits for this step meanwhile
        if not threads:  # which has no place among the loop's
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
    assert line.startswith("a step was recorded in a callback of the step that the loop waits for")
    losses = [record.scalars["learning/loss"] for record in memory.records]
    assert [loss for loss in losses if loss] == [8**3] * 3
