"""Metrics files whose records are damaged: each costs itself, and no statistic."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.runs.metrics_files import read_metrics
from mfu_jax.runs.step_table import LoggedStep, StepTable


def line(**values: Any) -> str:
    return json.dumps({"step": 3, "kind": "step", "perf/step_time_seconds": 1.0, **values}) + "\n"


@pytest.mark.parametrize(
    "damaged",
    [
        line(step=float("inf")),
        line(step=-1),
        line(step=1.5),
        line(step=True),
        line(step=2**63),
        line(step=[1]),
        line().replace("3", "9" * 5000, 1),
        line(kind=[1]),
        line(kind={}),
        line(**{"perf/step_time_seconds": 1e308}),
        line(**{"perf/step_time_seconds": 1e-320}),
        line(**{"perf/step_time_seconds": -1}),
        line(**{"perf/step_time_seconds": float("nan")}),
        line(**{"perf/step_time_seconds": "soon"}),
        line(**{"perf/per_device_tflops": float("inf")}),
        line(**{"perf/per_device_tokens": -1}),
        line(**{"perf/mfu": 10**400}),
        line(**{"learning/loss": 10**400}),
        line(a="[") + "{" + '"step":' + "[" * 5000 + "\n",
        f"completed step: {'9' * 5000}, seconds: 1\n",
        "completed step: 3, seconds: 1e308, loss: 1.0\n",
    ],
)
def test_a_damaged_record_is_one_unreadable_line(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sound = [line(step=n, **{"perf/per_device_tflops": 2.0}) for n in (1, 2)]
    path.write_text(sound[0] + damaged + sound[1])
    run = read_metrics(path)
    assert run.unreadable == 1
    assert [step.number for step in run.steps if step.number != 3] == [1, 2]
    summary = run.summary(warmup_steps=0)
    assert (summary.mean_seconds, summary.p99_seconds) == (1.0, 1.0)


def test_a_loss_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(**{"learning/loss": "NaN"}))
    (step,) = read_metrics(path).steps
    assert step.scalars["learning/loss"] != step.scalars["learning/loss"]


def test_a_table_gives_the_steps_that_it_was_given() -> None:
    steps = [
        LoggedStep(number=7, kind="compile", scalars={"a": 1.5}),
        LoggedStep(number=8, kind=None, scalars={}),
        LoggedStep(number=2**63 - 1, kind="step", scalars={"a": 2.5, "b": float("inf")}),
    ]
    table = StepTable()
    for step in steps:
        table.append(step)
    assert list(table) == steps
    assert list(table) == steps  # once more: it is no iterator
    assert (len(table), list(table.numbers)) == (3, [7, 8, 2**63 - 1])


def test_changes_are_applied_in_order_and_to_the_copy_only() -> None:
    table = StepTable()
    table.append(LoggedStep(number=0, kind="step", scalars={"a": 3.0}))
    changed = table.changed(lambda s: {"a": s["a"] + 1}).changed(lambda s: {"a": s["a"] * 2})
    assert [step.scalars for step in changed] == [{"a": 8.0}]
    assert [step.scalars for step in table] == [{"a": 3.0}]


def test_a_long_run_takes_no_more_than_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    scalars = {"perf/per_device_tflops": 2.0, "perf/per_device_tokens": 8.0, "perf/mfu": 0.4}
    others = {f"user/{n}": 1.0 for n in range(20)}
    with path.open("w") as file:
        file.writelines(line(step=n, **scalars, **others) for n in range(20_000))
    tracemalloc.start()
    try:
        run = read_metrics(path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(run.steps) == 20_000
    assert held < 20_000 * 100  # 4 scalars, a number, an end and a shape of 8 bytes; a dict has 352
