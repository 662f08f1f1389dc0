"""Disks that fill up at a random byte, and folders that vanish, while a loop logs."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import make_sink
from tests.campaigns.children import fork
from tests.campaigns.promises import Promise

STEPS = 300
_NAMES = ("metrics.jsonl", "metrics.csv", "events")


def rows(count: int, seed: int, folder: Path) -> list[Promise]:
    """One row per kind of fault; `count` disks of each kind."""
    chance = random.Random(seed)
    made: list[Promise] = []
    for kind, loop in _KINDS.items():
        row = Promise(kind)
        lost = [
            _one(row, loop, chance.randint(8_000, 60_000), folder / f"{len(made)}-{number}")
            for number in range(count if "disk" in kind else max(1, count // 4))
        ]
        row.worst = f"{max(lost, default=0)} of {STEPS} records"
        made.append(row)
    return made


def _one(row: Promise, loop: Callable[[Path, int], int], size: int, folder: Path) -> int:
    folder.mkdir(parents=True)
    child = fork(lambda: loop(folder, size), folder.with_suffix(".out"))
    code = child.wait(120.0)
    row.count += 1
    text = child.text()
    row.expect(code == 0, f"at byte {size}: exit code {code}: {text[-200:]}")
    row.expect("Traceback" not in text, f"at byte {size}: a traceback")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    steps = []
    for line in lines[:-1]:
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            row.expect(False, f"at byte {size}: a torn line")
    row.expect(steps == sorted(set(steps)), f"at byte {size}: a double line")
    lost = STEPS - len(steps)
    row.expect(lost == 0 or "WARNING:mfu_jax" in text, f"at byte {size}: lost in silence")
    if "removed" in row.kind:
        # What was written before is lost with the folder, and perhaps one tick's records.
        row.expect(lost <= size % STEPS + 150, f"at step {size % STEPS}: {lost} are missing")
    if "freed" in row.kind:
        row.expect(lost == 0, f"at byte {size}: {lost} records are missing")
    return lost


def _log(folder: Path, at_step: Callable[[int], None], before_close: Callable[[], None]) -> int:
    import logging

    logging.basicConfig(level=logging.WARNING)
    sinks = [
        make_sink("jsonl", folder / _NAMES[0]),
        make_sink("csv", folder / _NAMES[1]),
        make_sink("tensorboard", folder / _NAMES[2]),
    ]
    with MetricLogger(sinks=sinks, peak_flops_per_sec=1e12, warmup_steps=0) as logger:
        for step in range(STEPS):
            at_step(step)
            logger.record(step, {"loss": 1.0 / (step + 1)}, step_time_seconds=0.01)
            time.sleep(0.001)
        before_close()
    print(logger.summary())
    return 0


def _limit(size: int) -> None:
    """Limits this process's files to `size` bytes, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _full_then_freed(folder: Path, size: int) -> int:
    _limit(size)
    return _log(folder, lambda step: None, lambda: _limit(resource.RLIM_INFINITY))


def _full_for_good(folder: Path, size: int) -> int:
    _limit(size)
    return _log(folder, lambda step: None, lambda: None)


def _vanishes(folder: Path, size: int) -> int:
    def at_step(step: int) -> None:
        if step == size % STEPS:
            shutil.rmtree(folder)

    return _log(folder, at_step, lambda: None)


_KINDS = {
    "a disk that is full from a random byte on, freed before the end": _full_then_freed,
    "a disk that stays full": _full_for_good,
    "the run's folder is removed while it writes": _vanishes,
}
