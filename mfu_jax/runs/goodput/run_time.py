"""Where a run's wall clock went over all restarts: the result of `read_run`.

Adding a category: a row of ``categories.yml``, `attribution` beside it unless it is a pause, the
table in docs/goodput.md; ``python -m tests.campaigns.kills --kind loop --kills 5`` checks it
against the truth of tests/campaigns/kills/truth.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mfu_jax.util.formatting import columns, percent, span
from mfu_jax.util.yaml_files import read_mapping

_MOST_ATTEMPTS = 10


class Category(NamedTuple):
    """One use of the wall clock; ``categories.yml`` says what its fields are."""

    meaning: str
    ml_goodput: str
    name: str
    remedy: str = ""
    key: str = ""
    beside: str = ""
    bar: str = "idle"
    is_pause: bool = False


CATEGORIES: Mapping[str, Category] = {
    name: Category(**{"name": name, **row})
    for name, row in read_mapping(Path(__file__).with_name("categories.yml")).items()
}
"""Every moment from the first process start to the last event is in exactly one of these."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process from its start to its end.

    Attributes:
        process: process number in the job.
        host: the machine's name.
        pid: process id on that machine.
        start: when the process started, seconds since 1970 on the run's clock.
        end: its last sign of life, on the same clock.
        how: ``clean``, the name of a signal, ``exception: …``, ``killed`` or ``running``.
        first_step: its first completed step; None: there is none.
        last_step: its last completed step.
        restored_step: the step it continued from after reading a checkpoint, if recorded.
        steps: steps that counted.
        lost_steps: steps that a later attempt repeated.
        time: seconds by category, without ``down``.
    """

    process: int
    host: str
    pid: int
    start: float
    end: float
    how: str
    first_step: int | None
    last_step: int | None
    restored_step: int | None
    steps: int
    lost_steps: int
    time: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TimeSlice:
    """A day of a run, or one of its processes.

    Attributes:
        name: the day as ``2026-11-22`` (UTC), or the process number.
        time: seconds by category; they add up to `wall_seconds`.
    """

    name: str
    time: Mapping[str, float]
    mfu: float | None = None

    @property
    def wall_seconds(self) -> float:
        """From the first process start to the last event, or the part of it on that day."""
        return sum(self.time.values())

    @property
    def goodput(self) -> float | None:
        """Fraction of the wall clock spent in steps that counted."""
        return goodput_of(self.time)

    @property
    def effective_mfu(self) -> float | None:
        """The run's MFU × goodput."""
        return product(self.mfu, self.goodput)


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """The division of a run's wall clock; of process 0 unless stated otherwise.

    Without a run log, values that need one are None, and `time` has only what is known.

    Attributes:
        path: the metrics file, which may no longer exist.
        steps: steps that counted, each once.
        mfu: of the measured steps that counted; None if unknown, like the next ones.
        hfu: the same for the executed FLOPs.
        goodput: fraction of the wall clock spent in steps that counted.
        effective_mfu: ``mfu × goodput``: model FLOPs that counted / (wall clock × peak).
        wall_seconds: from the first process start to the last event.
        restarts: process starts after the first.
        lost_steps: steps that were repeated after a restart.
        median_seconds: median time of the steps that counted.
        time: seconds by category (`CATEGORIES`); they add up to `wall_seconds`.
        attempts: of process 0, in order.
        days: the same time by UTC day.
        processes: the same time for each process of the job.
        notes: notes for the user, one per line.
    """

    path: str
    steps: int
    mfu: float | None
    hfu: float | None
    goodput: float | None = None
    effective_mfu: float | None = None
    wall_seconds: float | None = None
    restarts: int | None
    lost_steps: int | None = None
    median_seconds: float | None
    time: Mapping[str, float]
    attempts: Sequence[Attempt] = ()
    days: Sequence[TimeSlice] = ()
    processes: Sequence[TimeSlice] = ()
    notes: Sequence[str] = ()

    def with_utilization(self, mfu: float | None, hfu: float | None) -> RunTime:
        """The same time with another MFU and HFU, for example relative to another peak."""
        return replace(
            self,
            mfu=mfu,
            hfu=hfu,
            effective_mfu=product(mfu, self.goodput),
            days=tuple(replace(day, mfu=mfu) for day in self.days),
            processes=tuple(replace(process, mfu=mfu) for process in self.processes),
        )

    @property
    def has_run_log(self) -> bool:
        """Whether the wall clock is known."""
        return bool(self.attempts)

    def render(self) -> str:
        """Goodput, the time by category, and how the last processes ended."""
        if not self.has_run_log or self.wall_seconds is None:
            return "\n".join(f"  note         {note}" for note in self.notes)
        processes = "1 process" if not self.restarts else f"{self.restarts + 1} processes"
        if len(self.processes) > 1:
            processes += f" (number {self.processes[0].name} of the job's {len(self.processes)})"
        lines = [
            f"  wall clock   {span(self.wall_seconds)} in {processes}: "
            f"goodput {percent(self.goodput)}, effective MFU {percent(self.effective_mfu)}",
            f"  steps        {self.steps} counted, {self.lost_steps} lost (done again)",
            *(f"  {line}" for line in _table(self)),
            *(f"  {line}" for line in _attempts(self)),
            *(f"  note         {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def goodput_of(time: Mapping[str, float]) -> float | None:
    """Fraction of the time, given by category, that was spent in steps that counted."""
    wall = sum(time.values())
    return (time["train"] + time["slow_steps"]) / wall if wall > 0 else None


def product(a: float | None, b: float | None) -> float | None:
    """``a × b``, if both are known."""
    return None if a is None or b is None else a * b


def _table(run: RunTime) -> list[str]:
    wall = run.wall_seconds or 1.0
    rows = [
        [name, span(seconds), percent(seconds / wall), CATEGORIES[name].ml_goodput]
        for name, seconds in run.time.items()
        if seconds > 0
    ]
    return columns([["", "time", "share", "ml-goodput-measurement"], *rows], "<>><")


def _attempts(run: RunTime) -> list[str]:
    """The last processes, a line each."""
    hidden = len(run.attempts) - _MOST_ATTEMPTS
    more = [f"… and {hidden} processes before:"] if hidden > 0 else []
    return [*more, *map(_attempt, run.attempts[-_MOST_ATTEMPTS:])]


def _attempt(attempt: Attempt) -> str:
    steps = "no step"
    if attempt.first_step is not None:
        steps = f"steps {attempt.first_step} to {attempt.last_step}"
    lost = f", {attempt.lost_steps} lost" if attempt.lost_steps else ""
    return (
        f"process {attempt.pid} on {attempt.host}: {span(attempt.end - attempt.start)}, "
        f"{steps}{lost}, {attempt.how}"
    )
