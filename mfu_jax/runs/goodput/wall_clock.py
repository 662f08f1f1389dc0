"""Divides the wall clock of a run, over all restarts, from its run logs; imports no jax."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence

from mfu_jax.errors import UserError
from mfu_jax.runs.goodput.attempts import LoggedAttempt, read_attempts_of
from mfu_jax.runs.goodput.attribution import (
    DAY,
    AttemptOnRunClock,
    Times,
    WallClockAttribution,
    add_time,
    in_seconds,
    no_times,
)
from mfu_jax.runs.goodput.run_time import (
    Attempt,
    RunTime,
    TimeSlice,
    goodput_of,
    product,
)
from mfu_jax.runs.metrics.files import MetricsRun, read_metrics
from mfu_jax.runs.metrics.run_files import metrics_file_of
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.storage.addresses import path_of

# A process silent for longer is considered dead.
_SILENT_SECONDS = 10.0


def read_run(
    run: str | os.PathLike[str], *, now: float | None = None, metrics: MetricsRun | None = None
) -> RunTime:
    """Where a run's wall clock went.

    Args:
        run: the run's folder or metrics file, or the address of either.
        now: seconds since 1970; a process alive shortly before is considered running. By default,
            the current time.
        metrics: the run's metrics file, if already read.

    Returns:
        Without a run log, what the metrics file tells.

    Raises:
        UserError: there is neither a run log nor a metrics file.
    """
    found = read_logged(run, now=now)
    return found or of_metrics(metrics or read_metrics(str(metrics_file_of(path_of(run)))))


def read_logged(run: str | os.PathLike[str], *, now: float | None = None) -> RunTime | None:
    """The same from run logs alone, independent of the metrics file's size; None without them.

    Raises:
        UserError: the folder holds no run, or a log cannot be read.
    """
    metrics_file = metrics_file_of(path_of(run))
    attempts, notes = read_attempts_of(metrics_file)
    if not attempts:
        return None
    processes = _processes(attempts, now)
    number, main = next(iter(processes.items()))
    if number:
        notes.append(f"the run log of process 0 is missing; the times are those of {number}")
    return main.run_time(str(metrics_file), [*notes, *main.notes], processes)


def read_attempts(run: str | os.PathLike[str]) -> list[AttemptOnRunClock]:
    """The attempts of a run's first process on the run's clock.

    Raises:
        UserError: there is no run log.
    """
    metrics_file = metrics_file_of(path_of(run))
    attempts, _ = read_attempts_of(metrics_file)
    if not attempts:
        raise UserError(
            f"there is no run log that can be read beside {str(metrics_file)!r}",
            hint="usually the metrics file was copied without it; copy "
            f"{metrics_file.name}.events.0.jsonl, too",
        )
    return next(iter(_processes(attempts, None).values())).placed


def _processes(attempts: Iterable[LoggedAttempt], now: float | None) -> dict[int, _Process]:
    """The processes of a job by number."""
    by_number: dict[int, list[LoggedAttempt]] = {}
    for attempt in attempts:
        by_number.setdefault(attempt.process, []).append(attempt)
    now = time.time() if now is None else now
    return {number: _Process(by_number[number], now) for number in sorted(by_number)}


class _Process:
    """The attempts of one process of the job, limited to its last run.

    Attributes:
        placed: the attempts on the run's clock.
        notes: notes for the user.
    """

    def __init__(self, attempts: Sequence[LoggedAttempt], now: float) -> None:
        self.notes: list[str] = []
        self._attempts = _last_run(_without_unrelated(attempts))
        self.placed = _placed(self._attempts, now, self.notes)
        self._median_us = _median(self.placed)
        self._times = [
            WallClockAttribution(placed, self._median_us).run() for placed in self.placed
        ]
        self._down = no_times()
        for before, after in zip(self.placed, self.placed[1:], strict=False):
            add_time(self._down, "down", before.end, after.start)

    def run_time(self, path: str, notes: list[str], processes: dict[int, _Process]) -> RunTime:
        """The result, for this process."""
        spent = self.time()
        mfu, hfu = self._utilization()
        lost = sum(len(b.us) - p.counted(b) for p in self.placed for b in p.attempt.blocks)
        return RunTime(
            path=path,
            steps=sum(map(_counted, self.placed)),
            mfu=mfu,
            hfu=hfu,
            goodput=goodput_of(spent),
            effective_mfu=product(mfu, goodput_of(spent)),
            wall_seconds=sum(spent.values()),
            restarts=sum(not placed.attempt.goes_on for placed in self.placed) - 1,
            lost_steps=lost,
            median_seconds=self._median_us / 1e6 if self._median_us else None,
            time=spent,
            attempts=tuple(map(_attempt, self.placed, self._times)),
            days=tuple(self._days(mfu)),
            processes=tuple(
                TimeSlice(name=str(number), time=process.time(), mfu=mfu)
                for number, process in processes.items()
            ),
            notes=tuple(notes),
        )

    def time(self) -> dict[str, float]:
        """Seconds by category."""
        return in_seconds(self._total().values())

    def _days(self, mfu: float | None) -> Iterable[TimeSlice]:
        total = self._total()
        for day, spent in sorted(total.items()):
            name = datetime.datetime.fromtimestamp(day * DAY / 1e6, datetime.UTC).date()
            yield TimeSlice(name=name.isoformat(), time=in_seconds([spent]), mfu=mfu)

    def _total(self) -> Times:
        total = no_times()
        for times in (*self._times, self._down):
            for day, categories in times.items():
                for name, spent in categories.items():
                    total[day][name] += spent
        return total

    def _utilization(self) -> tuple[float | None, float | None]:
        """MFU and HFU of the measured steps that counted."""
        spent = {"model": 0.0, "executed": 0.0}
        best = dict(spent)
        for placed in self.placed:
            for block in placed.attempt.blocks:
                kind, *costs = block.cost
                counted = placed.counted(block) if kind == "step" else 0
                for name, at_peak in zip(best, costs, strict=True):
                    if counted and at_peak is not None:
                        best[name] += counted * at_peak
                        us = block.us if counted == len(block.us) else block.us[:counted]
                        spent[name] += sum(us) / 1e6
        mfu, hfu = (best[name] / spent[name] if spent[name] > 0 else None for name in best)
        return mfu, hfu


def _without_unrelated(attempts: Sequence[LoggedAttempt]) -> Sequence[LoggedAttempt]:
    """Drops attempts that did nothing: refused beside an active run, or started after its end."""
    kept: list[LoggedAttempt] = []
    for attempt in attempts:
        is_beside = bool(kept) and attempt.began + attempt.offset < kept[-1].alive + kept[-1].offset
        if attempt.blocks or not (attempt.how == "clean" or (attempt.how and is_beside)):
            kept.append(attempt)
    return kept or attempts


def _last_run(attempts: Sequence[LoggedAttempt]) -> Sequence[LoggedAttempt]:
    """The attempts from the last process that started over after a clean end."""
    begin = 0
    first = attempts[0].first_step
    for index, (before, attempt) in enumerate(itertools.pairwise(attempts), 1):
        step = attempt.first_step
        if step is None:
            continue
        if before.how == "clean" and first is not None and step <= first:
            begin, first = index, step
        first = step if first is None else min(first, step)
    return attempts[begin:]


def _placed(
    attempts: Sequence[LoggedAttempt], now: float, notes: list[str]
) -> list[AttemptOnRunClock]:
    """The attempts on one clock, each cut at the start of the next."""
    offsets: dict[str, float] = {}
    placed: list[AttemptOnRunClock] = []
    for index, attempt in enumerate(attempts):
        offset = offsets.setdefault(attempt.boot or str(index), attempt.offset)
        how, end = attempt.how, attempt.alive
        if not how:
            is_last = index == len(attempts) - 1
            runs = is_last and now - (attempt.alive + attempt.offset) < _SILENT_SECONDS
            how = "running" if runs else "killed"
            end += 0.0 if runs else attempt.silence_seconds
        start = round(1e6 * (attempt.began + offset))
        placed.append(
            AttemptOnRunClock(
                attempt=attempt,
                offset=offset,
                start=start,
                end=round(1e6 * (end + offset)),
                how=how,
            )
        )
    for before, after in itertools.pairwise(placed):
        overlap = before.end - after.start
        before.end = max(before.start, min(before.end, after.start))
        after.start = max(after.start, before.end)
        after.end = max(after.start, after.end)
        if overlap > 2e6 * before.attempt.silence_seconds:
            notes.append(
                f"process {after.attempt.pid} on {after.attempt.host} started {overlap / 1e6:.1f} "
                f"s before the end of the one before it; the time counts for the later one"
            )
    _mark_repeated(placed)
    return placed


def _mark_repeated(placed: Sequence[AttemptOnRunClock]) -> None:
    """Finds which steps were repeated, and which are known because later attempts built on them."""
    redone: int | None = None
    for on_clock in reversed(placed):
        on_clock.redone_from = redone
        last = on_clock.attempt.last_step
        if redone is not None and last is not None and on_clock.attempt.blocks[-1].by == 1:
            on_clock.done_after = max(0, redone - last - 1)
        first = on_clock.attempt.first_step
        if first is not None:
            redone = first if redone is None else min(first, redone)


def _counted(placed: AttemptOnRunClock) -> int:
    """The number of steps that counted."""
    return placed.done_after + sum(map(placed.counted, placed.attempt.blocks))


def _median(placed: Sequence[AttemptOnRunClock]) -> int:
    """Median µs of the steps that counted, without compile and first steps; 0 if there are none."""
    counted: list[int] = []
    for on_clock in placed:
        for index, block in enumerate(on_clock.attempt.blocks):
            if block.cost[0] != "compile":
                counted += block.us[0 if index else 1 : on_clock.counted(block)]
    return statistics.median_low(counted) if counted else 0


def _attempt(placed: AttemptOnRunClock, times: Times) -> Attempt:
    attempt = placed.attempt
    spent = in_seconds(times.values())
    del spent["down"]
    return Attempt(
        process=attempt.process,
        host=attempt.host,
        pid=attempt.pid,
        start=placed.start / 1e6,
        end=placed.end / 1e6,
        how=placed.how,
        first_step=attempt.first_step,
        last_step=attempt.last_step,
        restored_step=attempt.restored,
        steps=_counted(placed),
        lost_steps=sum(len(block.us) - placed.counted(block) for block in attempt.blocks),
        time=spent,
    )


def of_metrics(run: MetricsRun) -> RunTime:
    """What can be told from a metrics file alone."""
    summary = run.summary(warmup_steps=0)
    trained = math.fsum(step.scalars[STEP_SECONDS] for step in run.steps)
    return RunTime(
        path=run.path,
        steps=len(set(run.steps.numbers)),
        mfu=summary.mfu,
        hfu=summary.hfu,
        restarts=run.restarts,
        median_seconds=summary.median_seconds,
        time={"train": trained},
        notes=("no run log that can be read lies beside the file: no wall clock, no goodput",),
    )
