"""The hosts of a run at their last exchange, as logged by process 0; imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfu_jax.logger.run_log.events import HOSTS
from mfu_jax.runs.metrics.run_files import read_beside

_MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class JobProcess:
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
class JobProcesses:
    """All processes of a job at one exchange.

    Attributes:
        step: the step of the exchange.
        count: processes of the job.
        processes: slow ones first, then missing ones, then by how late they are.
        answer: the hosts' part of ``mfu-jax report --json``.
    """

    step: int
    count: int
    processes: tuple[JobProcess, ...]
    answer: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """The number of processes, in one line."""
        slow = sum(bool(process.slow) for process in self.processes)
        missing = sum(process.is_missing for process in self.processes)
        return f"{self.count} processes at step {self.step}: {slow} slow, {missing} missing"

    @property
    def findings(self) -> list[str]:
        """Slow or missing processes, one per line; only the worst."""
        slow = [process.slow for process in self.processes if process.slow]
        missing = [process for process in self.processes if process.is_missing]
        lines = [*slow, *(_missing(process) for process in missing)]
        more = len(lines) - _MOST_SHOWN
        return lines[:_MOST_SHOWN] + ([f"… and {more} more"] if more > 0 else [])

    def render(self) -> str:
        """The same for a terminal."""
        lines = [f"  hosts        {self.summary}", *(f"    {line}" for line in self.findings)]
        return "\n".join(" ".join(line.splitlines()) for line in lines)


def read_processes(metrics_file: str) -> JobProcesses | None:
    """The last exchange logged beside a metrics file; None without one, as for a single process.

    Args:
        metrics_file: its path or address.
    """
    return processes_of(read_beside(metrics_file, HOSTS))


def processes_of(found: Mapping[str, Any]) -> JobProcesses | None:
    """The processes of an exchange as it is logged; None if it is empty or damaged."""
    try:
        return _processes(found) if found else None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def _processes(found: Mapping[str, Any]) -> JobProcesses:
    missing = {int(process) for process in found["missing"]}
    slow = {int(one["process"]): str(one["text"]) for one in found["slow"]}
    processes = [_process(values, missing, slow) for values in found["hosts"]]
    heard = {one.process for one in processes}
    processes += [
        JobProcess(process=process, name="", step=-1, is_missing=True, slow="", times={})
        for process in sorted(missing - heard)
    ]
    order = list(slow)  # slowest first
    processes.sort(
        key=lambda one: (
            order.index(one.process) if one.slow else len(order),
            not one.is_missing,
            -one.late,
            one.process,
        )
    )
    return JobProcesses(
        step=int(found["step"]),
        count=int(found["processes"]),
        processes=tuple(processes),
        answer=found,
    )


def _process(values: Mapping[str, Any], missing: set[int], slow: Mapping[int, str]) -> JobProcess:
    process = int(values["process"])
    times = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return JobProcess(
        process=process,
        name=str(values.get("host", "")),
        step=int(values["step"]),
        is_missing=process in missing,
        slow=slow.get(process, ""),
        times=times,
    )


def _missing(process: JobProcess) -> str:
    if process.step < 0:
        return f"process {process.process} is missing: never heard"
    return (
        f"process {process.process} ({process.name}) is missing: last heard at step {process.step}"
    )
