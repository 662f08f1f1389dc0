"""Times queries on the files of a long run: its goodput, and its whole report.

    python -m scripts.benchmarks.report [--steps 1000000] [--restarts 1000] [--write]

The files are written here, with the lines of a run log and JSON records as in `JsonlSink`: after
each restart, some steps are repeated.
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
from collections.abc import Sequence
from pathlib import Path

from mfu_jax.logger.run_log.events import START, STEPS, VERSION
from scripts import results

_UNIX = 1_700_000_000.0
_STEP_SECONDS = 0.1
_STEPS_A_LINE = 5  # the log is written twice a second
_GAP_US = 500
_AGAIN = 5  # steps repeated after a restart
_QUERY = """
import time
begin = time.perf_counter()
from mfu_jax.runs.goodput.wall_clock import read_run
imported = time.perf_counter()
run = read_run({folder!r})
print(time.perf_counter() - imported, time.perf_counter() - begin)
"""


def write_run(folder: Path, steps: int, restarts: int) -> None:
    """Writes the run log and the records of a run.

    Args:
        folder: an existing folder.
        steps: number of steps, each done at least once.
        restarts: number of kills.
    """
    chance = random.Random(0)
    each = -(-steps // (restarts + 1))
    now = 100.0
    with (
        (folder / "metrics.jsonl.events.0.jsonl").open("w") as log,
        (folder / "metrics.jsonl").open("w") as records,
    ):
        for attempt, first in enumerate(range(0, steps, each)):
            now += 30.0
            begin = max(0, first - (_AGAIN if attempt else 0))
            known = {"process": 0, "processes": 1, "host": "host", "pid": attempt + 1}
            log.write(_line(START, now, version=VERSION, **known, boot="boot", began_m=now - 1.0))
            now += 20.0
            last = min(first + each, steps)
            for number in range(begin, last, _STEPS_A_LINE):
                count = min(_STEPS_A_LINE, last - number)
                us = [round(1e6 * chance.gauss(_STEP_SECONDS, 0.002)) for _ in range(count)]
                for step, spent in enumerate(us, number):
                    now += (spent + _GAP_US) / 1e6
                    if step >= first:
                        records.write(_record(step, spent / 1e6, now))
                waits = {"gap_us": [_GAP_US] * count, "data_us": [100] * count}
                cost = {"optimal_s": 0.04, "executed_s": 0.05}
                log.write(_line(STEPS, now, first=number, us=us, **waits, **cost))


def _line(event: str, now: float, **values: object) -> str:
    """A line of the run log; without its sequence number, which no report reads."""
    head = {"e": event, "t": round(_UNIX + now, 6), "m": round(now, 6)}
    return json.dumps({**head, **values}, separators=(",", ":")) + "\n"


def _record(number: int, seconds: float, now: float) -> str:
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
    head = {"step": number, "kind": "step", "unix_seconds": _UNIX + now}
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
