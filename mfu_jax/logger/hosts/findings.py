"""Determines which host is slow, and at what, from the reports of all hosts.

A collective makes every process equally slow, so step times do not tell. What happens *before* the
collective does. The loop of a healthy process waits for its device, which waits in the collective;
the loop of the slow process comes back late, or its own work takes longer.
"""

from __future__ import annotations

import dataclasses
import operator
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mfu_jax.host_work import HostWork
from mfu_jax.logger.hosts.report import HostReport
from mfu_jax.util.formatting import readable

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
        missing=tuple(sorted(set(range(count)) - {report.process for report in current})),
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
        notes.append(f"{len(named) - _MOST_NAMED} more processes are slow")
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
