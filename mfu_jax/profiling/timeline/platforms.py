"""The timelines of a trace's devices, on any platform.

Adding one: a file beside this one that builds `Timeline`s, listed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mfu_jax.errors import UserError
from mfu_jax.profiling.timeline import cpu, gpu, tpu
from mfu_jax.profiling.timeline.devices import DeviceTimeline
from mfu_jax.profiling.timeline.host import PLANE, HostThreads
from mfu_jax.profiling.trace.xspace import Trace

# An accelerator's host has a plane like a CPU device's, so CPUs come last.
_PLATFORMS = (tpu, gpu, cpu)


def read_devices(traces: Sequence[Trace]) -> list[tuple[DeviceTimeline, HostThreads]]:
    """Every device of a job, with its host's side of the trace.

    Args:
        traces: one per host.

    Raises:
        UserError: no device ran anything, or a file is damaged.
    """
    found = []
    for trace in traces:
        threads = HostThreads(next((plane for plane in trace.planes if plane.name == PLANE), None))
        for timeline in _timelines(trace):
            if len(traces) > 1:
                name = f"{trace.path.name.partition('.')[0]} {timeline.device}"
                timeline = dataclasses.replace(timeline, device=name)
            found.append((timeline, threads))
    if not found:
        planes = ", ".join(plane.name for trace in traces for plane in trace.planes)
        raise UserError(
            f"{str(traces[0].path)!r}: no device ran a program in it (planes: {planes})",
            hint="usually the trace ended before the first step did (keep the last output: "
            "what nobody holds is not waited for), or only Python was traced; trace steps "
            "after the first one",
        )
    return found


def _timelines(trace: Trace) -> list[DeviceTimeline]:
    for platform in _PLATFORMS:
        found = [
            timeline
            for plane in trace.planes
            if plane.name.startswith(platform.PLANE)
            for timeline in platform.timelines(trace, plane)
        ]
        if found:
            return found
    return []
