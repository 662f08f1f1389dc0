"""Which host waits for which: each host's time in collectives, from one trace of all hosts.

A collective ends for all hosts at once, so the host that arrives last spends the least time in it.
What the others spend beyond that is their wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mfu_jax.profiling.attribution.step_times import MeasuredStep, measure
from mfu_jax.profiling.join.ops import DeviceWork, Join
from mfu_jax.profiling.join.programs import ProgramLibrary
from mfu_jax.profiling.timeline.platforms import read_devices
from mfu_jax.profiling.trace.xspace import Trace
from mfu_jax.storage.trace_folders import dump_files, trace_files


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """One host, in seconds per step, as the mean over its devices and steps.

    Attributes:
        host: name from its file; ``process3`` if several processes trace a job.
        steps: number of measured steps.
        step_seconds: step time.
        collective_seconds: time in collectives not overlapped with compute.
        wait_seconds: the part of it beyond that of the host that spends the least.
    """

    host: str
    steps: int
    step_seconds: float
    collective_seconds: float
    wait_seconds: float


def read_host_waits(path: Path) -> tuple[HostWait, ...]:
    """The hosts of the newest trace in a folder, first the one that the others wait for.

    Returns:
        The hosts; empty for a trace of one host, or of a job without collectives.

    Raises:
        UserError: there is no trace, or one is damaged or holds no program.
    """
    files = trace_files(path)
    if len(files) < 2:
        return ()
    names = _names(files)
    spent = []
    for file in files:  # one at a time: a trace may take gigabytes
        measured = _measure(file)
        spent.append((names[file], measured, _in_collectives(measured)))
    least = min(seconds for _, _, seconds in spent)
    if not any(seconds for _, _, seconds in spent):
        return ()
    hosts = [
        HostWait(
            host=name,
            steps=measured.steps,
            step_seconds=measured.step_seconds,
            collective_seconds=seconds,
            wait_seconds=seconds - least,
        )
        for name, measured, seconds in spent
    ]
    return tuple(sorted(hosts, key=lambda host: host.wait_seconds))


def _names(files: Sequence[Path]) -> dict[Path, str]:
    """Each host's short name, or its whole name if short names are not unique."""
    short = [file.name.partition(".")[0] for file in files]
    is_unique = len(set(short)) == len(short)
    return {f: name if is_unique else f.name for f, name in zip(files, short, strict=True)}


def _measure(file: Path) -> MeasuredStep:
    """The times of one host's devices."""
    traces = [Trace(file)]
    devices = read_devices(traces)
    ops = [name for timeline, _ in devices for name in timeline.names]
    return measure(devices, Join(ProgramLibrary(traces, dump_files(file), ops)))


def _in_collectives(measured: MeasuredStep) -> float:
    return sum(op.seconds for op in measured.ops if op.op.work is DeviceWork.COMMUNICATION)
