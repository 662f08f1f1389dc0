"""Metrics files whose records are damaged: each costs itself, and no statistic."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.hardware.peak import Peak
from mfu_jax.runs.metrics.files import read_metrics
from mfu_jax.runs.metrics.recounted import with_peak
from mfu_jax.runs.metrics.step_table import LoggedStep, StepTable


def line(**values: Any) -> str:
    record = {"step": 3, "kind": "step", "perf/step_time_seconds": 1.0, **values}
    return json.dumps({n: v for n, v in record.items() if (n, v) != ("kind", None)}) + "\n"


DAMAGED = [
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
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_record_is_one_unreadable_line(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sound = [line(step=n, **{"perf/per_device_tflops": 2.0}) for n in (1, 2)]
    path.write_text(sound[0] + damaged + sound[1])
    run = read_metrics(path)
    assert run.unreadable == 1
    assert [step.number for step in run.steps if step.number != 3] == [1, 2]
    summary = run.summary(warmup_steps=0)
    assert (summary.mean_seconds, summary.p99_seconds) == (1.0, 1.0)


AMOUNTS = {"perf/per_device_tflops": 2.0, "perf/per_device_tokens": 8}


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_record_with_other_fields_among_sound_ones(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    if damaged.startswith('{"step"') and '"kind": "step"' in damaged:
        more = json.dumps({name: n for name, n in AMOUNTS.items() if name not in damaged})
        damaged = damaged.replace('"perf/step', more[1:-1] + ', "perf/step', 1)
    sound = [line(step=n, **AMOUNTS) for n in range(10, 18)]
    path.write_text("".join([*sound[:4], damaged, *sound[4:]]))
    run = read_metrics(path)
    assert [step.number for step in run.steps if step.number != 3] == list(range(10, 18))
    assert run.unreadable == 1
    assert run.summary(warmup_steps=0).tokens_per_sec_per_device == 8.0


def test_a_step_repeated_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(step=1, **AMOUNTS) + 3 * line(step=2, **AMOUNTS))
    run = read_metrics(path)
    assert list(run.steps.numbers) == [1, 2]
    assert run.repeated == 2


def test_kinds_of_steps_that_their_file_does_not_mark(tmp_path: Path) -> None:
    """MaxText's records: the first two steps after each start are warm-up."""
    path = tmp_path / "metrics.jsonl"
    numbers = [0, 1, 2, 3, 2, 3, 4, 5]
    path.write_text("".join(line(step=float(n), kind=None, **AMOUNTS) for n in numbers))
    run = read_metrics(path)
    found = [(kind, list(segment.numbers)) for kind, segment in run.segments(warmup_steps=2)]
    assert found == [
        ("warmup", [0, 1]),
        ("step", [2, 3]),
        ("warmup", [2, 3]),
        ("step", [4, 5]),
    ]


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


@pytest.mark.full
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


@pytest.mark.parametrize("is_log", [False, True])
def test_steps_without_amounts_are_not_in_the_rates(is_log: bool, tmp_path: Path) -> None:
    """MaxText, while its batch grows: five steps of 0.5 s without TFLOPs, then five with 100."""
    lines = []
    for n in range(10):
        grown = n >= 5
        rates = {"perf/per_device_tflops": 100.0, "perf/per_device_tokens": 4096.0} if grown else {}
        if is_log:
            text = ", TFLOP/s/device: 200.000, Tokens/s/device: 8192.000" if grown else ""
            lines.append(f"completed step: {n}, seconds: 0.500{text}, total_weights: 2048\n")
        else:
            lines.append(line(step=n, kind=None, **{"perf/step_time_seconds": 0.5}, **rates))
    (tmp_path / "run").write_text("".join(lines))
    run = read_metrics(tmp_path / "run")
    found = run.summary(warmup_steps=0)
    assert (found.steps, found.tflops_per_sec_per_device) == (10, 200.0)
    assert found.tokens_per_sec_per_device == 8192.0
    peak = Peak(flops_per_sec=400e12, dtype="bf16", kind="flag", source="the test")
    assert with_peak(run, peak).summary(warmup_steps=0).mfu == pytest.approx(0.5)
    (tmp_path / "times").write_text("".join(lines[:5]))
    unknown = read_metrics(tmp_path / "times").summary(warmup_steps=0)
    assert (unknown.tflops_per_sec_per_device, unknown.tokens_per_sec_per_device) == (None, None)
