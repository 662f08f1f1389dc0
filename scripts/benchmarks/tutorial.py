"""The stages of docs/tutorial.md, measured in turn, so that a busy minute hits all of them.

    python -m scripts.benchmarks.tutorial [--runs 3] [--write]

Run it from the repository root on a machine that does nothing else; each row has its load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.util.formatting import percent
from scripts import results

STAGES = (
    "0: as found",
    "1: the update in the jitted step",
    "2: no jax.checkpoint",
    "3: four times the batch",
)


def measure(stage: int, run: int, folder: Path) -> tuple[results.Row, Profile]:
    """One run of a stage: what its summary says, and the profile of three of its steps."""
    file = folder / f"{run}.{stage}.jsonl"
    load = os.getloadavg()[0]
    command = [sys.executable, "examples/tutorial.py", str(stage), str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads(Path(f"{file}.summary.json").read_text(encoding="utf-8"))
    row = {
        "run": run,
        "stage": STAGES[stage],
        "mean ms": round(1e3 * summary["mean_seconds"], 1),
        "median ms": round(1e3 * summary["median_seconds"], 1),
        "MFU": percent(summary["mfu"]),
        "HFU": percent(summary["hfu"]),
        "load": round(load, 1),
    }
    return row, read_profile(f"{file}.profile")


def bars(stage: int, run: int, profile: Profile) -> results.Row:
    """The waterfall in points."""
    points = {bar.name: round(bar.mfu_points, 2) for bar in profile.waterfall}
    step = round(1e3 * profile.measured.step_seconds, 1)
    return {"run": run, "stage": STAGES[stage], "step ms": step, **points}


def main() -> None:
    """Measures, and prints or writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    results.add_write(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measured = [
            (stage, run, *measure(stage, run, Path(name)))
            for run in range(1, args.runs + 1)
            for stage in range(len(STAGES))
        ]
        peaks = {profile.verdict.peak for *_, profile in measured}
    assert len(peaks) == 1, peaks
    rows = {
        "the tutorial's step in four stages, whole runs in turn": [row for *_, row, _ in measured],
        "profiles of three steps of each of these runs, points of the peak": [
            bars(stage, run, profile) for stage, run, _, profile in measured
        ],
    }
    note = f"Peak: {peaks.pop()}. Load: of the machine's last minute, before the run."
    results.publish("tutorial", rows, is_written=args.write, notes=[note])


if __name__ == "__main__":
    main()
