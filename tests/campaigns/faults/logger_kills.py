"""SIGKILL of a loop that logs to JSONL, CSV and TensorBoard, at a random moment; then a resume."""

from __future__ import annotations

import csv
import json
import mmap
import random
import struct
import time
from pathlib import Path
from typing import Any

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import make_sink
from tests.campaigns.children import fork
from tests.campaigns.promises import Promise

_FINAL_STEPS = 40  # of the resumed run


class Progress:
    """The last step that `record` accepted, in memory that survives its process."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 16)
        self.note(-1)

    def note(self, step: int) -> None:
        self._map[:16] = struct.pack("qd", step, time.monotonic())

    def read(self) -> int:
        return int(struct.unpack("qd", self._map[:16])[0])


def kills(count: int, seed: int, folder: Path) -> Promise:
    """Kills `count` loops with steps of 0.2 to 20 ms."""
    row = Promise("SIGKILL of a loop with JSONL, CSV and TensorBoard, then a resume")
    chance = random.Random(seed)
    most_steps, most_seconds = 0, 0.0
    for number in range(count):
        where = folder / str(number)
        step_seconds = chance.choice([0.0002, 0.001, 0.005, 0.02])
        progress = Progress()
        child = fork(lambda: _loop(where, 0, 10**9, step_seconds, progress), folder / "out")  # noqa: B023
        if not child.wait_until(lambda: progress.read() >= 0, 60.0):  # noqa: B023
            row.expect(False, f"run {number} did not start: {child.text()[-300:]}")
            continue
        time.sleep(chance.uniform(0.0, 0.5))
        child.kill()
        row.count += 1
        done = progress.read()
        steps = _check(row, where, f"run {number}")
        # Step N is complete when step N + 1 is recorded.
        lost = max(0, done - 1 - (steps[-1] if steps else -1))
        most_steps = max(most_steps, lost)
        most_seconds = max(most_seconds, lost * step_seconds)
        row.expect(steps == list(range(len(steps))), f"run {number} has a gap or a double step")

        start = chance.randint(0, len(steps))
        resumed = fork(
            lambda: _loop(where, start, start + _FINAL_STEPS, 0.0, Progress()),  # noqa: B023
            folder / "out",
        )
        row.expect(resumed.wait(60.0) == 0, f"resume {number}: {resumed.text()[-300:]}")
        steps = _check(row, where, f"resume {number}")
        wanted = list(range(start + _FINAL_STEPS))
        row.expect(steps == wanted, f"resume {number} has {len(steps)} of {len(wanted)} steps")
    row.worst = f"{most_steps} completed steps, {most_seconds * 1e3:.0f} ms of training"
    return row


def _loop(where: Path, start: int, stop: int, step_seconds: float, progress: Progress) -> int:
    where.mkdir(parents=True, exist_ok=True)
    resume: dict[str, Any] = {"resume_from_step": start}
    sinks = [
        make_sink("jsonl", where / "metrics.jsonl", **resume),
        make_sink("csv", where / "metrics.csv", **resume),
        make_sink("tensorboard", where / "events", **resume),
    ]
    with MetricLogger(
        sinks=sinks, start_step=start, peak_flops_per_sec=1e12, model_flops_per_device=10**9
    ) as logger:
        for step in range(start, stop):
            time.sleep(step_seconds)
            logger.record(step, {"loss": 1.0 / (step + 1), "grad_norm": 2.0})
            progress.note(step)
    return 0


def _check(row: Promise, where: Path, run: str) -> list[int]:
    """The steps of the JSONL file; a torn line is allowed only at the end."""
    data = (where / "metrics.jsonl").read_bytes() if (where / "metrics.jsonl").exists() else b""
    lines = data.split(b"\n")
    steps = []
    for line in lines[:-1]:
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            row.expect(False, f"{run}: a torn line in metrics.jsonl")
    if (where / "metrics.csv").exists():
        with open(where / "metrics.csv", newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["step"]]
        table = [int(r["step"]) for r in rows if r[list(r)[-1]] is not None]
        row.expect(len(set(table)) == len(table), f"{run}: a double row in metrics.csv")
    return steps
