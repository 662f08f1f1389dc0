"""CLU's periodic action; runs where clu is installed (scripts/test_libraries.sh)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mfu_jax

pytest.importorskip("clu.periodic_actions")

from clu import metric_writers

from mfu_jax.integrations import clu
from mfu_jax.logger.records.step_record import StepRecord
from tests.support.examples import run_example

ROWS, WIDTH = 8, 64
EVERY, STEPS = 5, 20

pytestmark = pytest.mark.full


class Writer(metric_writers.MultiWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__([])
        self.written: list[tuple[int, dict[str, float]]] = []

    def write_scalars(self, step: int, scalars: Any) -> None:
        self.written.append((step, dict(scalars)))


def test_the_action_reports_means_of_the_steps_since_its_last() -> None:
    writer = Writer()
    report_mfu = clu.ReportMfu(writer, every_steps=EVERY)
    train_step = mfu_jax.instrument(
        jax.jit(lambda w, x: (w - 1e-6 * (x.T @ (x @ w)), jnp.sum(w))),
        sinks=[report_mfu.sink],
        peak_tflops_per_device=1,
    )
    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    for step in range(1, STEPS + 1):
        w, _ = train_step(w, x)
        assert train_step.flops is not None
        train_step.logger.flush()
        report_mfu(step)
    train_step.close()
    assert [step for step, _ in writer.written] == list(range(EVERY, STEPS + 1, EVERY))
    flops = 2 * (2 * ROWS * WIDTH * WIDTH)
    for _, scalars in writer.written:
        assert scalars["perf/per_device_tflops"] * 1e12 == pytest.approx(flops, rel=1e-12)
        rate = scalars["perf/per_device_tflops_per_sec"]
        assert scalars["perf/mfu"] == pytest.approx(rate, rel=1e-12)  # of a peak of 1 TFLOP/s


def test_a_rate_is_the_work_of_unequal_steps_by_their_time() -> None:
    """1 TFLOP at a peak of 1 TFLOP/s in 2 s and in 8 s: 2 / 10, not the mean of 1/2 and 1/8."""
    writer = Writer()
    report_mfu = clu.ReportMfu(writer, every_steps=2)
    for step, seconds in enumerate([2.0, 8.0], 1):
        scalars = {"perf/step_time_seconds": seconds, "perf/mfu": 1 / seconds}
        report_mfu.sink.write(StepRecord(step=step, unix_seconds=0.0, scalars=scalars))
        report_mfu(step)
    assert writer.written == [(2, {"perf/step_time_seconds": 5.0, "perf/mfu": 0.2})]


def test_the_example(tmp_path: Path) -> None:
    width = 512
    assert run_example("clu_loop", tmp_path).flops() == {2 * (2 * width**3)}
