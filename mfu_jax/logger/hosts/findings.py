"""Determines which host is slow, and at what, from the reports of all hosts.

A collective makes every process equally slow, so step times do not tell. What happens *before* the
collective does. The loop of a healthy process waits for its device, which waits in the collective;
the loop of the slow process comes back late, or its own work takes longer.

Adding a cause: a field of `HostReport`, a rule in `HostComparison`, and a planted fault in
tests/campaigns/stragglers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import operator
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mfu_jax.host_work import HostWork
from mfu_jax.logger.timing.timed_step import LoopTimes, TimedStep
from mfu_jax.util.formatting import readable

# If the loop waited for the device for less than this fraction of the step, it came back late.
_LATE_FRACTION = 0.02
# A thread may wake up this late without it meaning anything.
_LATE_SECONDS = 0.02
# A host is slow if it holds up each step by more than this fraction of it, and by more than this
# many times the usual spread between hosts.
LAG_FRACTION = 0.10
_SPREADS = 5.0
# Threads wait for cores on any machine with other work; it counts above this fraction of a step.
_STARVED_FRACTION = 0.5
# CPU time between two reports; healthy hosts differ by a few milliseconds.
_CPU_NOISE_SECONDS = 0.05
# This many times the median host's work explains that threads wait for cores.
_MORE_WORK = 2.0
# Ratio of the standard deviation of normal values to their median absolute deviation.
_NORMAL = 1.4826
# Most processes named in one line.
_MOST_NAMED = 5
# Where a `HostReport` has the time of each cause.
_FIELDS = {
    HostWork.DATA: "late_data",
    HostWork.DISPATCH: "late_dispatch",
    HostWork.PYTHON: "late_python",
    HostWork.GC: "gc",
    HostWork.STARVED: "starved",
    HostWork.STOPPED: "stopped",
    HostWork.COMPUTE: "cpu",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """Means over the steps of one window, in seconds per step, as one process saw them.

    Attributes:
        process: process number.
        host: name of its host.
        step: the last step of the window.
        unix_seconds: wall clock when it was written.
        steps: steps in the window; 0: only a sign of life.
        step_time: time of a step.
        slack: how long the loop waited for the device: the host's lead over it.
        data: loop time in declared waits (``logger.waiting("data")``).
        dispatch: loop time in the call of an instrumented step.
        python: the rest of the loop time between two steps.
        late_data: `data` of the steps whose device was idle when the loop came back; 0 if the
            host runs ahead. Likewise `late_dispatch` and `late_python`.
        late_dispatch: see `late_data`.
        late_python: see `late_data`.
        gc: garbage collection, included in the others.
        cpu: CPU time of threads that Python did not start, mostly XLA's, which is the step's own
            work if the CPU is the device; None: not known here.
        starved: time in which these and the main thread could run but had no core; None: not known.
        stopped: time in which the process did not run at all, though it had a core.
    """

    process: int
    host: str = ""
    step: int = -1
    unix_seconds: float = 0.0
    steps: int = 0
    step_time: float = 0.0
    slack: float = 0.0
    data: float = 0.0
    dispatch: float = 0.0
    python: float = 0.0
    late_data: float = 0.0
    late_dispatch: float = 0.0
    late_python: float = 0.0
    gc: float = 0.0
    cpu: float | None = None
    starved: float | None = None
    stopped: float = 0.0

    @property
    def late(self) -> float:
        """How long the device idled because the loop came back late."""
        return self.late_data + self.late_dispatch + self.late_python


class LoopStatistics:
    """Where the loop spends its time per step, by `HostReport`'s names."""

    def __init__(self) -> None:
        self.last_step = -1
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, step: TimedStep, kind: str) -> None:
        """Adds a measured step; others, and those after a pause, only advance `last_step`."""
        self.last_step = step.step
        if kind != "step" or step.loop is None or not 0 < step.seconds < math.inf:
            return
        loop = LoopTimes._make(step.loop)
        python = max(0.0, loop.seconds - loop.wait_seconds - loop.call_seconds)
        parts = {"data": loop.wait_seconds, "dispatch": loop.call_seconds, "python": python}
        if loop.slack_seconds < _LATE_FRACTION * step.seconds:
            parts |= {f"late_{name}": seconds for name, seconds in parts.items()}
        parts |= {"step_time": step.seconds, "slack": loop.slack_seconds, "gc": loop.gc_seconds}
        for name, seconds in parts.items():
            self._sums[name] += seconds
        self._sums["steps"] += 1

    def take(self) -> dict[str, Any]:
        """The means of the window; starts the next one."""
        sums, self._sums = self._sums, defaultdict(float)
        steps = int(sums.pop("steps", 0))
        means = {name: total / steps for name, total in sums.items()}
        return {"steps": steps, "step": self.last_step, **means}


class ThreadStatistics:
    """How the threads of this process got their cores since the last `take`."""

    def __init__(self) -> None:
        self._before = _thread_nanoseconds()
        self._stopped = 0.0

    def woke_late(self, seconds: float) -> None:
        """Notes that a thread woke up so long after its time-out: the process was stopped."""
        if seconds > _LATE_SECONDS:
            self._stopped += seconds

    def take(self, steps: int) -> dict[str, float | None]:
        """`HostReport`'s cpu, starved and stopped, of so many steps; starts the next window."""
        before, self._before = self._before, _thread_nanoseconds()
        cpu, starved = (
            (now - then).total() / 1e9 / steps if now else None
            for now, then in zip(self._before, before, strict=True)
        )
        stopped, self._stopped = self._stopped / steps, 0.0
        return {"cpu": cpu, "starved": starved, "stopped": stopped}


def _thread_nanoseconds() -> tuple[Counter[str], Counter[str]]:
    """For how long each thread ran, and could have run but had no core; empty: not known.

    Threads that Python started do not count, but for the main one's wait for a core: writing
    metrics and loading data are not the step's work. All others are XLA's, mostly unnamed.

    From ``/proc/<pid>/task/<tid>/schedstat`` (Documentation/scheduler/sched-stats.rst).
    """
    ran, waited = Counter[str](), Counter[str]()
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    main = str(threading.main_thread().native_id)
    for path in map(Path, glob.glob("/proc/self/task/*/schedstat")):
        task = path.parent.name
        if task in of_python and task != main:
            continue
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            own, wait, _ = map(int, path.read_text().split())
            ran[task], waited[task] = 0 if task == main else own, wait
    return ran, waited


class SlowHost(NamedTuple):
    """A host that holds up the others.

    Attributes:
        process: number of its process.
        host: its name.
        cause: what it is slow at.
        seconds: what it spends on that per step.
        others_seconds: the median over all hosts.
        step_time: time from one step of the job to the next, in seconds.
    """

    process: int
    host: str
    cause: HostWork
    seconds: float
    others_seconds: float
    step_time: float

    @property
    def lag_seconds(self) -> float:
        """Seconds per step that it spends on its cause beyond the median host."""
        return self.seconds - self.others_seconds

    def __str__(self) -> str:
        name = f"process {self.process}" + (f" ({self.host})" if self.host else "")
        return (
            f"{name} is slow: {readable(self.seconds)} s of a step of {readable(self.step_time)} s "
            f"in {self.cause.phrase}; the median host {readable(self.others_seconds)} s"
        )


_who = operator.attrgetter("process", "cause")
_lag = operator.attrgetter("lag_seconds")


def slow_hosts(reports: Sequence[HostReport], *, compares_cpu: bool) -> list[SlowHost]:
    """The hosts that hold up the others, the slowest first; each for its largest cause.

    Args:
        reports: of all processes heard from, for about the same steps.
        compares_cpu: the CPU is the device, so CPU time is the step's own work.
    """
    reports = [report for report in reports if report.steps]
    if len(reports) < 2:
        return []
    found = HostComparison(reports).slow(compares_cpu=compares_cpu)
    worst: dict[int, SlowHost] = {}
    for slow in sorted(found, key=_lag, reverse=True):
        worst.setdefault(slow.process, slow)
    return list(worst.values())


class HostComparison:
    """Each process beside the median of all."""

    def __init__(self, reports: Sequence[HostReport]) -> None:
        self._values = {
            name: {r: own for r in reports if (own := getattr(r, name)) is not None}
            for name in ("late", *_FIELDS.values())
        }
        self._medians = {name: _median([*own.values()]) for name, own in self._values.items()}
        self._noise = max(_CPU_NOISE_SECONDS / report.steps for report in reports)
        # A wait with an idle device is not in this process's step time, but in the others'.
        self._step_time = _median([report.step_time + report.late_data for report in reports])

    def slow(self, *, compares_cpu: bool) -> Iterator[SlowHost]:
        """Hosts that are slow for a cause; some for several."""
        floor = LAG_FRACTION * self._step_time
        for report in self._outliers("late", floor):
            yield self._late(report)
        for report in self._outliers("stopped", floor):
            yield self._slow(report, HostWork.STOPPED)
        if not compares_cpu:
            return
        busy = self._outliers("cpu", max(floor, self._noise))
        for report in busy:
            yield self._slow(report, HostWork.COMPUTE)
        for report in self._outliers("starved", _STARVED_FRACTION * self._step_time):
            work = self._slow(report, HostWork.COMPUTE)
            if work.seconds > _MORE_WORK * work.others_seconds:  # so more waiting for a core, too
                yield work
            elif report not in busy:
                yield self._slow(report, HostWork.STARVED)

    def _outliers(self, name: str, floor: float) -> list[HostReport]:
        """The reports whose value exceeds the median by more than `floor` and the noise."""
        lags = {report: own - self._medians[name] for report, own in self._values[name].items()}
        spread = _NORMAL * _median([abs(lag) for lag in lags.values()])
        return [report for report, lag in lags.items() if lag > max(floor, _SPREADS * spread)]

    def _late(self, report: HostReport) -> SlowHost:
        """What a loop was doing that came back late; of its Python time, what explains most."""
        causes = (HostWork.DATA, HostWork.DISPATCH, HostWork.PYTHON)
        worst = max((self._slow(report, cause) for cause in causes), key=_lag)
        if worst.cause is HostWork.PYTHON:
            for cause in (HostWork.GC, HostWork.STARVED, HostWork.STOPPED):
                found = self._slow(report, cause)
                if found.lag_seconds > 0.5 * worst.lag_seconds:
                    return found
        return worst

    def _slow(self, report: HostReport, cause: HostWork) -> SlowHost:
        name = _FIELDS[cause]
        own, others = self._values[name].get(report, 0.0), self._medians[name]
        return SlowHost(report.process, report.host, cause, own, others, self._step_time)


def _median(values: Sequence[float]) -> float:
    """The lower of two middle values: of two hosts, the faster shows what is possible."""
    return statistics.median_low(values) if values else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostsView:
    """All hosts at one exchange.

    Attributes:
        step: the newest step reported.
        count: number of processes in the job.
        reports: of the processes heard from, by process number.
        missing: numbers of the processes never heard from, or not for two exchanges.
        suspects: hosts that are slow in this exchange.
        slow: suspects that were slow for the same cause in the previous one, slowest first.
        notes: what has changed, in words.
    """

    step: int = -1
    count: int = 0
    reports: tuple[HostReport, ...] = ()
    missing: tuple[int, ...] = ()
    suspects: tuple[SlowHost, ...] = ()
    slow: tuple[SlowHost, ...] = ()
    notes: tuple[str, ...] = ()

    def scalars(self) -> dict[str, float]:
        """Metrics of the exchange; times are in seconds per step."""
        scalars: dict[str, float] = {
            "hosts/heard": len(self.reports),
            "hosts/missing": len(self.missing),
            "hosts/slow": len(self.slow),
        }
        if heard := [report for report in self.reports if report.steps]:
            scalars["hosts/data_seconds_max"] = max(report.data for report in heard)
            scalars["hosts/python_seconds_max"] = max(report.python for report in heard)
            scalars["hosts/lead_seconds_min"] = min(report.slack for report in heard)
        if self.slow:
            worst = self.slow[0]
            scalars["hosts/slowest"] = worst.process
            scalars["hosts/slowest_lag_seconds"] = worst.lag_seconds
            scalars[f"hosts/slowest_{worst.cause}_seconds"] = worst.seconds
        return scalars

    def to_json(self) -> dict[str, Any]:
        """The whole view, for the run's log."""
        return {
            "step": self.step,
            "processes": self.count,
            "missing": list(self.missing),
            "slow": [slow._asdict() | {"text": str(slow)} for slow in self.slow],
            "hosts": [dataclasses.asdict(report) for report in self.reports],
        }


NONE_YET = HostsView()
"""Before the first exchange."""


def view_of(
    reports: Sequence[HostReport],
    *,
    count: int,
    period: int,
    compares_cpu: bool,
    before: HostsView = NONE_YET,
) -> HostsView:
    """Draws the conclusions of one exchange.

    A host is named if it was slow for the same cause in two consecutive exchanges: one alone may
    be a page fault, or a neighbour's cron job.

    Args:
        reports: the last report of each process ever heard from.
        count: number of processes in the job.
        period: steps between two exchanges.
        compares_cpu: see `slow_hosts`.
        before: the previous exchange.
    """
    newest = max((report.step for report in reports), default=-1)
    current = [report for report in reports if report.step > newest - 2 * period]
    suspects = slow_hosts(current, compares_cpu=compares_cpu)
    known = set(map(_who, before.suspects))
    view = HostsView(
        step=newest,
        count=count,
        reports=tuple(sorted(reports, key=lambda report: report.process)),
        # Process 0 compares: its own report may be late, but it is there.
        missing=tuple(sorted(set(range(1, count)) - {report.process for report in current})),
        suspects=tuple(suspects),
        slow=tuple(slow for slow in suspects if _who(slow) in known),
    )
    return dataclasses.replace(view, notes=tuple(_changes(view, before)))


def _changes(view: HostsView, before: HostsView) -> list[str]:
    """What is new since the previous exchange."""
    told = set(map(_who, before.slow))
    named = [str(slow) for slow in view.slow if _who(slow) not in told]
    notes = named[:_MOST_NAMED]
    if len(named) > _MOST_NAMED:
        notes.append(f"slow, too: {len(named) - _MOST_NAMED} more")
    recovered = {process for process, _ in told} - {slow.process for slow in view.suspects}
    notes += [f"process {process} is no longer slow" for process in sorted(recovered)[:_MOST_NAMED]]
    if lost := [process for process in view.missing if process not in before.missing]:
        notes.append(_missing(lost, {report.process: report for report in view.reports}))
    return notes


def _missing(lost: Sequence[int], last: dict[int, HostReport]) -> str:
    shown = []
    for process in lost[:_MOST_NAMED]:
        heard = last.get(process)
        since = f"{heard.host}, last heard at step {heard.step}" if heard else "never heard"
        shown.append(f"{process} ({since})")
    more = f" and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    word = "processes" if len(lost) > 1 else "process"
    return (
        f"{word} {', '.join(shown)}{more} not heard; usually an older version of mfu_jax there, a "
        f"logger that is off, or a host that is cut off"
    )
