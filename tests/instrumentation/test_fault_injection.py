"""Whatever function of ours fails beside a user's step, the loop ends as if we were not there.

The functions are not listed: they are those that a healthy run reaches, on all threads.
"""

from __future__ import annotations

import functools
import gc
import io
import json
import logging
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mfu_jax
from mfu_jax.logger.sinks.console import ConsoleSink
from mfu_jax.logger.sinks.jsonl import JsonlSink
from mfu_jax.logger.sinks.tensorboard import TensorBoardSink
from tests.support.faults import InjectedError, Injector, name_of, reached

STEPS = 4
PEAK = {"peak_tflops_per_device": 0.001}


@jax.jit
def train_step(w: jax.Array, ids: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    def loss(w: jax.Array) -> jax.Array:
        with mfu_jax.attention_mask("documents"):
            return jnp.mean((w @ w.T) * ids)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, {"loss": value, "grads": gradient}


class Lowered:
    """Lowered and compiled once for all runs."""

    def __init__(self) -> None:
        lowered = train_step.lower(jnp.eye(4), jnp.ones((4, 4), int))
        self.args_info = lowered.args_info
        self._compiled = lowered.compile()

    def compile(self) -> jax.stages.Compiled:
        return self._compiled


lowered = functools.cache(Lowered)


class CountedStep:
    """The step as her loop calls it, and how often that happened."""

    def __init__(self) -> None:
        self.__name__ = "train_step"
        self.times = 0

    def lower(self, *_: Any) -> Lowered:
        return lowered()

    def __call__(self, w: jax.Array, ids: jax.Array) -> Any:
        self.times += not isinstance(w, jax.core.Tracer)  # a count may trace it again
        return train_step(w, ids)


Loop = Callable[[], Any]


def bare(step: Any, logger: Any = None) -> Any:
    w, losses = jnp.eye(4), []
    for _ in range(STEPS):
        w, metrics = step(w, jnp.ones((4, 4), int))
        losses.append(metrics["loss"])
    return jax.tree.map(np.asarray, (w, losses))


def sinks(folder: Path) -> list[Any]:
    return [
        ConsoleSink(stream=io.StringIO(), progress=False),
        JsonlSink(folder / "metrics.jsonl"),
        TensorBoardSink(folder / "tensorboard"),
    ]


def instrumented(step: CountedStep, folder: Path) -> Loop:
    observed = mfu_jax.instrument(
        step, segment_ids=lambda w, ids: ids, sinks=sinks(folder), warmup_steps=0, **PEAK
    )

    def loop() -> Any:
        outputs = bare(observed)
        observed.summary()
        observed.close()
        return outputs

    return loop


def with_eval_and_data(step: CountedStep, folder: Path) -> Loop:
    observed = mfu_jax.instrument(step, sinks=sinks(folder), log_period=2, **PEAK)

    def loop() -> Any:
        w, losses = jnp.eye(4), []
        with observed:
            for number in range(STEPS):
                with observed.logger.waiting("data"):
                    ids = jnp.ones((4, 4), int)
                w, metrics = observed(w, ids)
                losses.append(metrics["loss"])
                with observed.logger.pause("checkpoint"):
                    observed.logger.record_eval(number, {"loss": 1.0})
        return jax.tree.map(np.asarray, (w, losses))

    return loop


def in_phases(step: CountedStep, folder: Path) -> Loop:
    logger = mfu_jax.MetricLogger(sinks=sinks(folder), warmup_steps=0)
    observed = mfu_jax.instrument(step, logger=logger, **PEAK)

    def loop() -> Any:
        w, losses = jnp.eye(4), []
        for _ in range(STEPS):
            with logger.step() as scope:
                with logger.phase("rollout") as phase:
                    phase.wait_for(w)
                with logger.phase("update"):
                    w, metrics = observed(w, jnp.ones((4, 4), int))
                scope.log(mean=metrics["loss"])
            losses.append(metrics["loss"])
        observed.close()
        logger.close()
        return jax.tree.map(np.asarray, (w, losses))

    return loop


def recorded(step: CountedStep, folder: Path) -> Loop:
    logger = mfu_jax.MetricLogger(
        sinks=sinks(folder), model_flops_per_device=100, peak_flops_per_sec=1e9, log_period=2
    )

    def loop() -> Any:
        w, losses = jnp.eye(4), []
        for number in range(STEPS):
            w, metrics = step(w, jnp.ones((4, 4), int))
            logger.record(number, metrics)
            losses.append(metrics["loss"])
        logger.flush()
        logger.write_text("note", "text")
        logger.summary()
        logger.close()
        return jax.tree.map(np.asarray, (w, losses))

    return loop


KINDS = [instrumented, with_eval_and_data, in_phases, recorded]


class Lines(logging.Handler):
    """The warnings of the package, but for threads that an earlier run left behind."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._before = {*threading.enumerate()} - {threading.current_thread()}

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() not in self._before:
            self.texts.append(record.getMessage())


# The functions that a loop calls: they consist of the boundary.
OF_THE_LOOP = (
    "util.failsafe:",
    "instrumentation.instrumented_step:InstrumentedStep.__call__",
    "instrumentation.instrumented_step:WrappedStep.__enter__",
)
# The threads behind the loop tell of a failure each, and a sink of each method that fails.
OF_THREADS = re.compile(
    r"(\w+Sink|run log)(\.\w+ failed|: \d+ records?| failed| gets | lacks | works again)|"
    r"\w+Sink cannot write|"
    r"the metrics of step \d+ were lost|some metrics were lost|metrics were not all written|"
    r"no more metrics are written|there is no summary"
)
# What a record itself tells of a failure.
OF_RECORDS = re.compile(r"metric .* is left out: |the cost of the step is not known: ")
# Python's collector runs on any thread, one of an earlier run as well, whose lines nobody takes.
TOLD_ELSEWHERE = ("logger.timing.timer:GcPauses.",)


def fault_of(kind: Any, folder: Path, injector: Injector, code: types.CodeType) -> str:
    """What is wrong with the run in which `code` fails; empty if nothing is."""
    step, lines, callbacks = CountedStep(), Lines(), [*gc.callbacks]
    loop = kind(step, folder)
    logging.getLogger("mfu_jax").addHandler(lines)
    try:
        with injector.failing(code):
            outputs = loop()
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    finally:
        logging.getLogger("mfu_jax").removeHandler(lines)
        jax.monitoring.clear_event_listeners()  # of a log that could not be closed
        gc.callbacks[:] = callbacks
    if not InjectedError.times:
        return ""
    if step.times != STEPS:
        return f"the step ran {step.times} times"
    if not jax.tree.all(jax.tree.map(np.array_equal, outputs, bare(train_step))):
        return "other outputs"
    return fault_of_lines(lines.texts, notes_in(folder / "metrics.jsonl"), name_of(code))


def notes_in(path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    notes = [note for line in lines for note in json.loads(line).get("notes", ())]
    return [note for note in notes if OF_RECORDS.match(note)]


def fault_of_lines(lines: list[str], notes: list[str], name: str) -> str:
    """What is wrong with what the run has said."""
    of_threads = [line for line in lines if OF_THREADS.match(line)]
    if len(set(of_threads)) != len(of_threads):
        return f"said twice: {of_threads}"
    if len(lines) - len(of_threads) > 1:
        return f"{len(lines)} lines: {lines}"
    if not (lines or notes or name.startswith(TOLD_ELSEWHERE)):
        return "nothing said"
    return ""


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Injector:
    """Of all modules that the loops import."""
    for kind in KINDS:
        kind(CountedStep(), tmp_path_factory.mktemp("imports"))()
    return Injector()


@pytest.fixture(scope="module")
def tested() -> set[types.CodeType]:
    return set()


def may_fail(kind: Any, folder: Path, injector: Injector) -> dict[types.CodeType, bool]:
    """The functions that healthy runs reach, but the user's own.

    Returns:
        Code → whether only a run reaches it that reads our tables.
    """
    injector.forget(tables=True)
    first, second = (
        set(reached(kind(CountedStep(), made(folder / name)))) for name in ("first", "second")
    )
    found = sorted(first | second, key=name_of)  # whichever thread came first
    return {code: code not in second for code in found if not name_of(code).startswith(OF_THE_LOOP)}


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thread behind the loop is dead, close() waits for it as long as it may."""
    for name, seconds in {"DRAIN": 0.4, "CLOSE": 0.1, "HUNG_DRAIN": 0.1}.items():
        monkeypatch.setattr(f"mfu_jax.logger.run_log.recorder.{name}_SECONDS", seconds)
    monkeypatch.setattr("mfu_jax.logger.run_log.follower.LAST_RETRY_SECONDS", ())
    monkeypatch.setattr("threading.excepthook", lambda details: None)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of sinks whose close() fails
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_function_may_fail(
    kind: Any, tmp_path: Path, injector: Injector, tested: set[types.CodeType]
) -> None:
    faults = {}
    functions = may_fail(kind, tmp_path / "healthy", injector)
    assert len(functions) > 50
    chosen = [code for code in functions if code not in tested]
    tested.update(chosen)
    for number, code in enumerate(chosen):
        injector.forget(tables=functions[code])
        if fault := fault_of(kind, made(tmp_path / str(number)), injector, code):
            faults[name_of(code)] = fault
        injector.forget(tables=functions[code])  # what a part read badly
    gc.collect()
    assert faults == {}
