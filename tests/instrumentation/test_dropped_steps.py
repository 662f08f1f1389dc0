"""A step that is dropped without `close`, as in a sweep over settings, leaves nothing behind."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import mfu_jax
from mfu_jax.runs.goodput.wall_clock import read_run
from tests.support.instrumented import PEAK, batch, make_state, run, train_step
from tests.support.sinks import ListSink


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mfu_jax")}


def test_a_sweep_that_closes_nothing_keeps_no_thread_and_no_file(tmp_path: Path) -> None:
    jitted = jax.jit(train_step)
    run(mfu_jax.instrument(jitted, sinks=[], **PEAK))  # JAX opens files of its own
    before = threads()
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        step = mfu_jax.instrument(jitted, metrics_file=str(folder / "metrics.jsonl"), **PEAK)
        run(step)
    del step
    assert eventually(lambda: threads() <= before), [thread.name for thread in threads()]
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files + 3
    for folder in tmp_path.iterdir():
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert sum("perf/step_time_seconds" in json.loads(line) for line in lines) == 4
        assert read_run(folder / "metrics.jsonl").attempts[0].how == "clean"


def test_a_dropped_step_writes_its_summary_once(capfd: pytest.CaptureFixture[str]) -> None:
    for closes in (False, True):
        before = threads()
        step = mfu_jax.instrument(jax.jit(train_step), **PEAK)
        run(step)
        if closes:
            step.close()
        del step
        assert eventually(lambda before=before: threads() <= before)
        out, err = capfd.readouterr()
        assert (out + err).count("summary: ") == 1


def test_the_logger_of_others_stays_open_when_a_step_is_dropped() -> None:
    memory = ListSink()
    with mfu_jax.MetricLogger(sinks=[memory], peak_flops_per_sec=1e9) as logger:
        step = mfu_jax.instrument(jax.jit(train_step), logger=logger)
        run(step)
        del step
        time.sleep(0.2)
        again = mfu_jax.instrument(jax.jit(train_step), logger=logger)
        again(make_state(), batch(0))
    assert [record.step for record in memory.records] == [0, 1, 2, 3, 4]
