"""The files that ``scripts/benchmarks/report.py`` asks about are those of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.runs.goodput.wall_clock import read_run
from mfu_jax.runs.metrics.files import read_metrics
from scripts.benchmarks.report import write_run


def test_the_run_of_the_benchmark_is_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, steps=400, restarts=3)
    run = read_run(tmp_path)
    assert (run.steps, run.restarts, run.lost_steps, run.notes) == (400, 3, 15, ())
    # From a process' start to its first step 21 s, from its last line to the next one's start 29 s;
    # it lived on after that line: 2% of 31 s pass between two signs of life.
    assert run.time["down"] == pytest.approx(3 * (29 - 0.31), abs=0.1)
    assert run.time["startup"] == pytest.approx(4 * 21, abs=0.1)
    assert run.time["lost_steps"] == pytest.approx(1.5 + 4 * 0.31, abs=0.2)
    assert sum(run.time.values()) == pytest.approx(run.wall_seconds)
    assert len(read_metrics(str(tmp_path / "metrics.jsonl")).steps) == 400
