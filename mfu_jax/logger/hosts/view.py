"""What one exchange shows about all hosts: numbers, and a line if something is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mfu_jax.logger.hosts.findings import SlowHost, slow_hosts
from mfu_jax.logger.hosts.report import HostReport

# Most processes named in one line.
_MOST_NAMED = 5


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

    step: int
    count: int
    reports: tuple[HostReport, ...]
    missing: tuple[int, ...]
    suspects: tuple[SlowHost, ...]
    slow: tuple[SlowHost, ...]
    notes: tuple[str, ...] = ()

    def scalars(self) -> dict[str, float]:
        """Metrics of the exchange; times are in seconds per step."""
        heard = [report for report in self.reports if report.steps]
        scalars: dict[str, float] = {
            "hosts/heard": len(self.reports),
            "hosts/missing": len(self.missing),
            "hosts/slow": len(self.slow),
        }
        if heard:
            scalars |= {
                "hosts/data_seconds_max": max(report.data for report in heard),
                "hosts/python_seconds_max": max(report.python for report in heard),
                "hosts/lead_seconds_min": min(report.slack for report in heard),
            }
        if self.slow:
            worst = self.slow[0]
            scalars |= {
                "hosts/slowest": worst.process,
                "hosts/slowest_lag_seconds": worst.lag_seconds,
                f"hosts/slowest_{worst.cause}_seconds": worst.seconds,
            }
        return scalars

    def to_json(self) -> dict[str, Any]:
        """The whole view, for a file."""
        return {
            "step": self.step,
            "processes": self.count,
            "missing": list(self.missing),
            "slow": [dataclasses.asdict(slow) | {"text": str(slow)} for slow in self.slow],
            "hosts": [dataclasses.asdict(report) for report in self.reports],
        }


def view_of(
    reports: Sequence[HostReport],
    *,
    count: int,
    period: int,
    compares_cpu: bool,
    before: HostsView | None = None,
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
    reports = sorted(reports, key=lambda report: report.process)
    newest = max((report.step for report in reports), default=-1)
    current = {report.process for report in reports if report.step > newest - 2 * period}
    missing = tuple(process for process in range(count) if process not in current)
    present = [report for report in reports if report.process in current]
    suspects = tuple(slow_hosts(present, compares_cpu=compares_cpu))
    known = {(slow.process, slow.cause) for slow in (before.suspects if before else ())}
    slow = tuple(one for one in suspects if (one.process, one.cause) in known)
    view = HostsView(
        step=newest,
        count=count,
        reports=tuple(reports),
        missing=missing,
        suspects=suspects,
        slow=slow,
    )
    return dataclasses.replace(view, notes=tuple(_changes(view, before)))


def _changes(view: HostsView, before: HostsView | None) -> list[str]:
    """What is new since the previous exchange."""
    told = {(slow.process, slow.cause) for slow in (before.slow if before else ())}
    notes = [str(slow) for slow in view.slow if (slow.process, slow.cause) not in told]
    if len(notes) > _MOST_NAMED:
        notes = [*notes[:_MOST_NAMED], f"{len(notes) - _MOST_NAMED} more processes are slow"]
    slow_now = {slow.process for slow in view.suspects}
    notes += [
        f"process {process} is no longer slow"
        for process in sorted({process for process, _ in told} - slow_now)
    ][:_MOST_NAMED]
    missing_before = set(before.missing if before else ())
    if lost := [process for process in view.missing if process not in missing_before]:
        last = {report.process: (report.step, report.host) for report in view.reports}
        notes.append(_missing(lost, last))
    return notes


def _missing(lost: Sequence[int], last: dict[int, tuple[int, str]]) -> str:
    shown = []
    for process in lost[:_MOST_NAMED]:
        step, host = last.get(process, (-1, ""))
        since = "never heard" if process not in last else f"{host}, last heard at step {step}"
        shown.append(f"{process} ({since})")
    more = f" and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    word = "processes" if len(lost) > 1 else "process"
    return (
        f"{word} {', '.join(shown)}{more} not heard; usually an older version of mfu_jax there, a "
        f"logger that is off, or a host that is cut off"
    )
