"""Runs a file of examples/ as its reader would, and returns what it printed and wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import ROOT


class ExampleRun(NamedTuple):
    """What an example left behind."""

    lines: list[str]
    """The step lines that it printed, without the steps' notes."""
    records: list[dict[str, Any]]
    """Of its metrics file, one per step."""

    def flops(self) -> set[int]:
        """Model FLOPs per step, as the records have them; one number if all agree."""
        return {round(record["perf/per_device_tflops"] * 1e12) for record in self.records}


def run_example(name: str, folder: Path, *arguments: str) -> ExampleRun:
    """One device, another folder, nothing but the example's own settings.

    Args:
        name: of the file, without its suffix.
        folder: where it runs and writes.
        *arguments: those before the metrics file.
    """
    metrics = folder / "runs" / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments, str(metrics)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("completed step: ")]
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "perf/per_device_tflops" in record]
    assert [line.split(",")[0] for line in lines] == [
        f"completed step: {record['step']}" for record in steps
    ]
    assert all("MFU: " in line for line in lines)
    return ExampleRun(lines, steps)
