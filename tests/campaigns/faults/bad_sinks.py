"""Sinks that hang, crawl, raise or exit, beside a JSONL file that must get every step in time.

What such a sink lacks is still in the run's log. A sink that works again gets it in the next run
that resumes; so does one that `mfu-jax replay` makes.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.run_log.reading import steps_behind
from mfu_jax.sinks import JsonlSink, Sink, StepRecord
from tests.campaigns.promises import Promise

STEPS = 200
STEPS_AFTER = 10  # of the run that resumes
_STEP_SECONDS = 0.002
_SPEED_BLOCKS = 5
# Maximum total time of `close`: its documented time-out and a margin for a busy machine.
CLOSE_SECONDS = 20.0
_released = threading.Event()  # releases the hanging threads at the end


def _hang() -> None:
    _released.wait(600.0)


class BadSink(Sink):
    """Performs `fault` at each write or at another call.

    Args:
        fault: called with the number of earlier writes.
        where: the method that misbehaves.
    """

    keeps_every_step = True

    def __init__(self, fault: Callable[[int], None], where: str = "write") -> None:
        self._fault = fault
        self._where = where
        self.steps: list[int] = []  # that were written
        self._calls = 0

    def write(self, record: StepRecord) -> None:
        self._do("write")
        self.steps.append(record.step)

    def flush(self) -> None:
        self._do("flush")

    def close(self) -> None:
        self._do("close")

    def _do(self, method: str) -> None:
        if method == self._where:
            self._calls += 1
            self._fault(self._calls - 1)


def _raiser(
    error: BaseException, when: Callable[[int], bool] = lambda n: True
) -> Callable[[int], None]:
    def fault(number: int) -> None:
        if when(number):
            raise error

    return fault


def _recurse(number: int) -> None:
    _recurse(number)


def _close_streams(number: int) -> None:
    sys.stdout.flush()
    raise BrokenPipeError(32, "Broken pipe")


KINDS: dict[str, Callable[[], BadSink]] = {
    "hangs at each write": lambda: BadSink(lambda n: _hang()),
    "hangs once, for ten seconds": lambda: BadSink(lambda n: time.sleep(10.0) if n == 50 else None),
    "takes 10 ms for a record": lambda: BadSink(lambda n: time.sleep(0.01)),
    "raises OSError always": lambda: BadSink(_raiser(OSError(5, "Input/output error"))),
    "raises RuntimeError always": lambda: BadSink(_raiser(RuntimeError("no"))),
    "raises ValueError for one record": lambda: BadSink(
        _raiser(ValueError("this one never"), lambda n: n == 50)
    ),
    "raises OSError five times": lambda: BadSink(_raiser(OSError(28, "full"), lambda n: n < 5)),
    "exits (SystemExit)": lambda: BadSink(_raiser(SystemExit(1))),
    "raises KeyboardInterrupt": lambda: BadSink(_raiser(KeyboardInterrupt())),
    "raises MemoryError": lambda: BadSink(_raiser(MemoryError())),
    "recurses without end": lambda: BadSink(_recurse),
    "has lost its pipe": lambda: BadSink(_close_streams),
    "hangs in flush": lambda: BadSink(lambda n: _hang(), "flush"),
    "hangs in close": lambda: BadSink(lambda n: _hang(), "close"),
    "raises in close": lambda: BadSink(_raiser(RuntimeError("no")), "close"),
}


def rows(folder: Path) -> list[Promise]:
    """One row per kind of sink."""
    logging.getLogger("mfu_jax").setLevel(logging.CRITICAL)
    made = [_row(kind, make(), folder / f"{i}") for i, (kind, make) in enumerate(KINDS.items())]
    made.append(_without_file(KINDS["raises OSError always"]()))
    made.append(_speed(folder / "speed"))
    _released.set()
    return made


def _speed(folder: Path) -> Promise:
    """A hanging, a slow and a raising sink at once: loop speed compared with only healthy sinks."""
    row = Promise("a sink that hangs, one that takes 10 ms and one that raises, at once")
    bad: tuple[Callable[[], BadSink], ...] = (
        KINDS["hangs at each write"],
        KINDS["takes 10 ms for a record"],
        KINDS["raises RuntimeError always"],
    )
    ratios = []
    for number in range(_SPEED_BLOCKS):
        before = _loop_seconds(row, [], folder / f"{number}a")
        between = _loop_seconds(row, [make() for make in bad], folder / f"{number}b")
        after = _loop_seconds(row, [], folder / f"{number}c")
        ratios.append((before + after) / 2 / between)
        row.count += 1
    row.worst = (
        f"nothing of the others; the loop ran at {statistics.median(ratios):.1%} of its speed"
    )
    return row


def _loop_seconds(row: Promise, bad: list[BadSink], folder: Path) -> float:
    """Time of the loop alone, with a healthy JSONL sink beside the bad sinks."""
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"
    logger = MetricLogger(sinks=[*bad, JsonlSink(path)], warmup_steps=0)
    begin = time.monotonic()
    for step in range(STEPS):
        time.sleep(_STEP_SECONDS)
        logger.record(step, {"loss": 1.0})
    spent = time.monotonic() - begin
    closing = time.monotonic()
    logger.close()
    row.expect(time.monotonic() - closing < CLOSE_SECONDS, "close took too long")
    row.expect(len(path.read_text().splitlines()) == STEPS, "JSONL is not complete")
    return spent


def _row(kind: str, bad: BadSink, folder: Path) -> Promise:
    row = Promise(f"a sink that {kind}", count=1)
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"
    told = _run(row, [bad, JsonlSink(path)])
    written = [*bad.steps]  # one that hung may go on
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    row.expect(steps == list(range(STEPS)), f"JSONL has {len(steps)} of {STEPS} steps")
    behind = steps_behind(path, 0)
    waiting = [*range(behind[bad.__class__.__name__] + 1, STEPS)] if behind else []
    lost = STEPS - len(written) - len(waiting)
    row.expect(told == lost, f"{lost} records were lost, the summary says {told}")
    row.expect(written == [s for s in steps[: STEPS - len(waiting)] if s in written], "disorder")
    _resume(row, path, waiting)
    row.worst = "nothing"
    if waiting:
        row.worst = f"nothing; {len(waiting)} of {STEPS} records come with the next run"
    if lost:
        row.worst = f"{lost} of {STEPS} records, of that sink alone"
    return row


def _resume(row: Promise, path: Path, waiting: list[int]) -> None:
    """A run that resumes gives a healthy sink what the bad one lacks, then its own steps."""
    healthy, end = BadSink(lambda number: None), STEPS + STEPS_AFTER
    sinks = [healthy, JsonlSink(path, resume_from_step=STEPS)]
    with MetricLogger(sinks=sinks, start_step=STEPS, warmup_steps=0) as logger:
        for step in range(STEPS, end):
            logger.record(step, {"loss": 1.0})
    missing = {*waiting, *range(STEPS, end)}.difference(healthy.steps)
    row.expect(not missing, f"{len(missing)} records are missing after a resume")
    row.expect(healthy.steps == sorted({*healthy.steps}), "a record came twice after a resume")
    row.expect(not steps_behind(path, 0), "the log says that the healthy sink is behind")


def _without_file(bad: BadSink) -> Promise:
    """Nothing can be read back, so that what was not written is lost, and said to be."""
    row = Promise("a sink that raises OSError always, without a metrics file", count=1)
    told = _run(row, [bad])
    row.expect(told == STEPS, f"{STEPS} records were lost, the summary says {told}")
    row.worst = f"{told} of {STEPS} records"
    return row


def _run(row: Promise, sinks: list[Sink]) -> int:
    """A loop with these sinks; how many records its summary says were lost."""
    logger = MetricLogger(sinks=sinks, peak_flops_per_sec=1e12, warmup_steps=0)
    longest = 0.0
    for step in range(STEPS):
        time.sleep(_STEP_SECONDS)
        before = time.monotonic()
        logger.record(step, {"loss": 1.0})
        longest = max(longest, time.monotonic() - before)
    before = time.monotonic()
    summary = logger.close()
    spent = time.monotonic() - before
    row.expect(longest < 1.0, f"a call of record took {longest:.1f} s")
    row.expect(spent < CLOSE_SECONDS, f"close took {spent:.1f} s")
    return summary.dropped_records
