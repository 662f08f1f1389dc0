"""Determines which host is slow, and at what, from the reports of all hosts.

A collective makes every process equally slow, so step times do not tell. What happens *before* the
collective does. The loop of a healthy process waits for its device, which waits in the collective;
the loop of the slow process comes back late, or its own work takes longer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlowHost:
    """A host that holds up the others.

    Attributes:
        process: number of its process.
        host: its name.
        cause: ``data``, ``python``, ``dispatch``, ``gc``, ``starved``, ``stopped`` or ``compute``.
        seconds: what it spends on that per step.
        others_seconds: the median over all hosts.
        step_time: time from one step of the job to the next, in seconds.
    """

    process: int
    host: str
    cause: str
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
            f"in {HostWork[self.cause.upper()].phrase}; the median host "
            f"{readable(self.others_seconds)} s"
        )


def slow_hosts(reports: Sequence[HostReport], *, compares_cpu: bool) -> list[SlowHost]:
    """The hosts that hold up the others, the slowest first; each for its largest cause.

    Args:
        reports: of all processes heard from, for about the same steps.
        compares_cpu: the CPU is the device, so CPU time is the step's own work.
    """
    reports = [report for report in reports if report.steps]
    if len(reports) < 2:
        return []
    # A wait with an idle device is not in this process's step time, but it is in the others'.
    step_time = _median([report.step_time + report.late_data for report in reports])
    found = [*_late(reports, step_time), *_stopped(reports, step_time)]
    if compares_cpu:
        found += _busy(reports, step_time)
    worst: dict[int, SlowHost] = {}
    for slow in found:
        known = worst.get(slow.process)
        if known is None or slow.lag_seconds > known.lag_seconds:
            worst[slow.process] = slow
    return sorted(worst.values(), key=lambda slow: -slow.lag_seconds)


def _late(reports: Sequence[HostReport], step_time: float) -> list[SlowHost]:
    """Hosts whose loop comes back late, with what it was doing."""

    def late(report: HostReport) -> float:
        return report.late_data + report.late_dispatch + report.late_python

    found = []
    for report in _outliers(reports, late, LAG_FRACTION * step_time):
        lags = {
            name: getattr(report, f"late_{name}")
            - _median([getattr(other, f"late_{name}") for other in reports])
            for name in ("data", "dispatch", "python")
        }
        cause = max(lags, key=lambda name: lags[name])
        seconds, others = getattr(report, f"late_{cause}"), _typical(reports, f"late_{cause}")
        for name in ("gc", "starved", "stopped"):
            own = getattr(report, name)
            extra = 0.0 if own is None else own - _typical(reports, name)
            if cause == "python" and extra > 0.5 * lags["python"]:
                cause, seconds, others = name, own, _typical(reports, name)
        found.append(_slow(report, cause, seconds, others, step_time))
    return found


def _stopped(reports: Sequence[HostReport], step_time: float) -> list[SlowHost]:
    others = _typical(reports, "stopped")
    return [
        _slow(report, "stopped", report.stopped, others, step_time)
        for report in _outliers(reports, lambda report: report.stopped, LAG_FRACTION * step_time)
    ]


def _busy(reports: Sequence[HostReport], step_time: float) -> list[SlowHost]:
    """Hosts whose own work takes longer: there is more of it, or it lacks a core."""
    known = [report for report in reports if report.cpu is not None]
    typical = _typical(known, "cpu")
    floor = max([LAG_FRACTION * step_time, *(_CPU_NOISE_SECONDS / r.steps for r in known)])
    found = [
        _slow(report, "compute", report.cpu or 0.0, typical, step_time)
        for report in _outliers(known, lambda report: report.cpu or 0.0, floor)
    ]
    more_work = {slow.process for slow in found}
    known = [report for report in known if report.starved is not None]
    floor = _STARVED_FRACTION * step_time
    for report in _outliers(known, lambda report: report.starved or 0.0, floor):
        if report.process in more_work:
            continue
        if (report.cpu or 0.0) > _MORE_WORK * typical:  # more work means more waiting for a core
            found.append(_slow(report, "compute", report.cpu or 0.0, typical, step_time))
        else:
            others = _typical(known, "starved")
            found.append(_slow(report, "starved", report.starved or 0.0, others, step_time))
    return found


def _slow(
    report: HostReport, cause: str, seconds: float, others: float, step_time: float
) -> SlowHost:
    return SlowHost(
        process=report.process,
        host=report.host,
        cause=cause,
        seconds=seconds,
        others_seconds=others,
        step_time=step_time,
    )


def _outliers(
    reports: Sequence[HostReport], value: Callable[[HostReport], float], floor: float
) -> list[HostReport]:
    """The reports whose value exceeds the median by more than `floor` and the noise."""
    values = [value(report) for report in reports]
    if not values:
        return []
    middle = _median(values)
    spread = _NORMAL * _median([abs(value - middle) for value in values])
    limit = middle + max(floor, _SPREADS * spread)
    return [report for report, own in zip(reports, values, strict=True) if own > limit]


def _typical(reports: Sequence[HostReport], name: str) -> float:
    values = [getattr(report, name) for report in reports]
    return _median([value for value in values if value is not None])


def _median(values: Sequence[float]) -> float:
    """The lower of two middle values: of two hosts, the faster shows what is possible."""
    return statistics.median_low(values) if values else 0.0
