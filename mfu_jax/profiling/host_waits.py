"""Each host's time in collectives, from one trace of all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mfu_jax.profiling.attribution.step_times import measure
from mfu_jax.profiling.join.ops import DeviceWork, Join
from mfu_jax.profiling.join.programs import open_traces
from mfu_jax.profiling.timeline.time_attribution import summed
from mfu_jax.storage.trace_folders import trace_files


def read_collective_times(path: Path) -> dict[str, tuple[float, float]]:
    """Each host's step time, and its time in collectives not overlapped with compute.

    Args:
        path: a folder, whose newest trace is read.

    Returns:
        Host → seconds per step, as means over its devices and steps; a host is ``process3`` if
        several processes trace a job. Empty for a trace of one host, or without collectives.

    Raises:
        UserError: there is no trace, or one is damaged or holds no program.
    """
    files = trace_files(path)
    if len(files) < 2:
        return {}
    times = {}
    for file, name in _names(files).items():  # one at a time: a trace may take gigabytes
        devices, library = open_traces([file])
        measured = measure(devices, Join(library))
        kinds = summed((op.op.work, op.seconds) for op in measured.ops)
        times[name] = measured.step_seconds, kinds.get(DeviceWork.COMMUNICATION, 0.0)
    return times if any(seconds for _, seconds in times.values()) else {}


def _names(files: Sequence[Path]) -> dict[Path, str]:
    """Each host's short name, or its whole name if short names are not unique."""
    short = [file.name.partition(".")[0] for file in files]
    is_unique = len(set(short)) == len(short)
    return {f: name if is_unique else f.name for f, name in zip(files, short, strict=True)}
