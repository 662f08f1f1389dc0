"""The hosts of a run at their last exchange, as written by process 0; imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfu_jax.runs.report.sidecars import read_beside

_MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Host:
    """One process of the job; times are seconds per step, None if unknown.

    Attributes:
        process: process number.
        name: of its machine.
        step: the last step it reported.
        is_missing: no report in the last exchanges, or never.
        slow: what it is slow at, in words; empty: nothing.
        times: `HostReport`'s fields: ``step_time``, ``slack``, ``data``, ….
    """

    process: int
    name: str
    step: int
    is_missing: bool
    slow: str
    times: Mapping[str, float]

    @property
    def late(self) -> float:
        """How long its device idled because its loop came back late."""
        return sum(self.times.get(f"late_{part}", 0.0) for part in ("data", "python", "dispatch"))


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """All processes of a job at one exchange.

    Attributes:
        step: the step of the exchange.
        count: processes of the job.
        hosts: slow ones first, then missing ones, then by how late they are.
        answer: the hosts' part of ``mfu-jax report --json``.
    """

    step: int
    count: int
    hosts: tuple[Host, ...]
    answer: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """The number of hosts, in one line."""
        slow = sum(bool(host.slow) for host in self.hosts)
        missing = sum(host.is_missing for host in self.hosts)
        return f"{self.count} processes at step {self.step}: {slow} slow, {missing} missing"

    @property
    def findings(self) -> list[str]:
        """Slow or missing hosts, one per line; only the worst."""
        slow = [host.slow for host in self.hosts if host.slow]
        missing = [host for host in self.hosts if host.is_missing]
        lines = [*slow, *(_missing(host) for host in missing)]
        more = len(lines) - _MOST_SHOWN
        return lines[:_MOST_SHOWN] + ([f"… and {more} more"] if more > 0 else [])

    def render(self) -> str:
        """The same for a terminal."""
        lines = [f"  hosts        {self.summary}", *(f"    {line}" for line in self.findings)]
        return "\n".join(" ".join(line.splitlines()) for line in lines)


def read_hosts(metrics_file: str) -> Hosts | None:
    """The hosts file beside a metrics file; None: no readable file, as for a single process.

    Args:
        metrics_file: its path or address.
    """
    found = read_beside(metrics_file, "hosts")
    try:
        return _hosts(found) if found else None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def _hosts(found: Mapping[str, Any]) -> Hosts:
    missing = {int(process) for process in found["missing"]}
    slow = {int(one["process"]): str(one["text"]) for one in found["slow"]}
    hosts = [_host(values, missing, slow) for values in found["hosts"]]
    heard = {host.process for host in hosts}
    hosts += [
        Host(process=process, name="", step=-1, is_missing=True, slow="", times={})
        for process in sorted(missing - heard)
    ]
    order = list(slow)  # slowest first
    hosts.sort(
        key=lambda host: (
            order.index(host.process) if host.slow else len(order),
            not host.is_missing,
            -host.late,
            host.process,
        )
    )
    return Hosts(
        step=int(found["step"]), count=int(found["processes"]), hosts=tuple(hosts), answer=found
    )


def _host(values: Mapping[str, Any], missing: set[int], slow: Mapping[int, str]) -> Host:
    process = int(values["process"])
    times = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Host(
        process=process,
        name=str(values.get("host", "")),
        step=int(values["step"]),
        is_missing=process in missing,
        slow=slow.get(process, ""),
        times=times,
    )


def _missing(host: Host) -> str:
    if host.step < 0:
        return f"process {host.process} is missing: never heard"
    return f"process {host.process} ({host.name}) is missing: last heard at step {host.step}"
