"""Times queries on the files of a long run: its goodput, and its whole report.

    python -m scripts.benchmarks.report [--steps 1000000] [--restarts 1000] [--write]

The files are written here, with the run log's own lines, and JSON records as in `JsonlSink`:
after each restart, some steps are repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mfu_jax.logger.run_log.events import ALIVE, START, STEPS, VERSION, Event, line
from scripts import results

_UNIX = 1_700_000_000.0
_STEP_SECONDS = 0.1
_AGAIN = 5  # steps repeated after a restart
_BATCH = 5  # steps written together
_QUERY = """
import time
begin = time.perf_counter()
from mfu_jax.runs.goodput.wall_clock import read_run
imported = time.perf_counter()
run = read_run({folder!r})
print(time.perf_counter() - imported, time.perf_counter() - begin)
"""


def write_run(folder: Path, steps: int, restarts: int) -> None:
    """Writes the events and the records of a run.

    Args:
        folder: an existing folder.
        steps: number of steps, each done at least once.
        restarts: number of kills.
    """
    chance = random.Random(0)
    each = -(-steps // (restarts + 1))
    now = 100.0
    with (
        (folder / "metrics.jsonl.events.0.jsonl").open("wb") as events,
        (folder / "metrics.jsonl").open("w") as records,
    ):
        for attempt, first in enumerate(range(0, steps, each)):
            now += 30.0
            begin = max(0, first - (_AGAIN if attempt else 0))
            events.write(line(Event(START, (_UNIX + now, now), _start(attempt, now)), 0))
            now += 20.0
            marks = list(_marks(chance, range(begin, min(first + each, steps)), now))
            events.write(b"".join(_lines(marks)))
            for mark in marks[first - begin :]:
                records.write(_record(mark))
            now = marks[-1].end[1]
            events.write(line(Event(ALIVE, (_UNIX + now, now), {}), 2 * len(marks)))


def _start(attempt: int, now: float) -> dict[str, object]:
    known = {"version": VERSION, "process": 0, "processes": 1, "host": "host", "pid": attempt + 1}
    return {**known, "boot": "boot", "began_m": now - 1.0}


class _Step(NamedTuple):
    number: int
    end: tuple[float, float]
    us: int


def _marks(chance: random.Random, numbers: range, now: float) -> Iterator[_Step]:
    for number in numbers:
        us = round(1e6 * chance.gauss(_STEP_SECONDS, 0.002))
        now += us / 1e6 + 0.0005
        yield _Step(number, (_UNIX + now, now), us)


def _lines(steps: Sequence[_Step]) -> Iterator[bytes]:
    for first in range(0, len(steps), _BATCH):
        batch = steps[first : first + _BATCH]
        values = {
            "first": batch[0].number,
            "us": [step.us for step in batch],
            "gap_us": [500] * len(batch),
            "data_us": [100] * len(batch),
            "optimal_s": 0.04,
            "executed_s": 0.05,
        }
        yield line(Event(STEPS, batch[-1].end, values), first + len(batch))


def _record(mark: _Step) -> str:
    seconds = mark.us / 1e6
    scalars = {
        "perf/step_time_seconds": seconds,
        "perf/per_device_tflops": 36.8,
        "perf/per_device_tflops_per_sec": 36.8 / seconds,
        "perf/per_device_tokens": 8192,
        "perf/per_device_tokens_per_sec": 8192 / seconds,
        "perf/mfu": 0.04 / seconds,
        "perf/hfu": 0.05 / seconds,
        "learning/loss": 3.0 + seconds,
        "learning/grad_norm": 1.0 + seconds,
        "goodput/data_wait_seconds": 0.0001,
        "perf/logger_overhead_us": 30.5,
    }
    head = {"step": mark.number, "kind": "step", "unix_seconds": mark.end[0]}
    return json.dumps({**head, **scalars}) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--restarts", type=int, default=1000)
    results.add_write(parser)
    asked = parser.parse_args(argv)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, asked.steps, asked.restarts)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{asked.steps} steps, {asked.restarts} restarts, {size / 1e6:.0f} MB", flush=True)
        report = [sys.executable, "-m", "mfu_jax.cli", "report", name]
        questions = {
            "goodput": [sys.executable, "-c", _QUERY.format(folder=name)],
            "report --json": [*report, "--json"],
            "report --html": [*report, f"--html={folder / 'report.html'}"],
        }
        for question, command in questions.items():
            rows.append((question, *_costs(command)))
    named = results.named(("question", "wall", "CPU", "most memory so far"), rows)
    what = f"reports of {asked.steps:,} steps and {asked.restarts:,} restarts, {size / 1e6:.0f} MB"
    results.publish("long_files", {what: named}, is_written=asked.write)
    return 0


def _costs(command: Sequence[str]) -> tuple[str, str, str]:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    inside = done.stdout.split()[0] if command[1] == "-c" else ""
    own = f" ({float(inside):.2f} s of it the query)" if inside else ""
    return f"{wall:.2f} s{own}", f"{cpu:.2f} s", f"{after.ru_maxrss / 2**20:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
