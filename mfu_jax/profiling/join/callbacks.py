"""Callbacks of a GPU's programs, which run on the host.

A GPU's trace has only the copies of their arguments and results, which may name no instruction. But
the thread that launches a program's kernels runs its callbacks, too, and names each of them after
the instruction.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mfu_jax.profiling.join.ops import Join
from mfu_jax.profiling.timeline.devices import DeviceTimeline, OpName, OpTable, copy_kind
from mfu_jax.profiling.timeline.host import HostThreads


def with_callbacks(timeline: DeviceTimeline, host: HostThreads, join: Join) -> DeviceTimeline:
    """The timeline with an event for each callback, on lanes of their own."""
    found: list[tuple[OpName, int, int, int]] = []
    for program in dict.fromkeys(
        timeline.executions.programs if timeline.platform == "gpu" else ()
    ):
        records = [r for known in join.sources(program) for r in known.costs.records.values()]
        callbacks = {r.name for r in records if "callback" in r.shape.target}
        runs = timeline.executions.of({program})
        for name, lane, start, end in host.called(callbacks):
            if ((runs.starts < end) & (start < runs.ends)).any():  # programs may share the name
                found.append((OpName(program, name), lane, start, end))
    if not found:
        return timeline
    table = OpTable(timeline.names)
    ops = [table.number(name) for name, *_ in found]
    lanes, starts, ends = np.array([event[1:] for event in found]).T
    is_copy = np.array([bool(copy_kind(name.name)) for name in timeline.names])[timeline.ops]
    of_event = timeline.ops.copy()
    for op, start, end in zip(ops, starts, ends, strict=True):
        of_event[is_copy & (timeline.starts >= start) & (timeline.starts < end)] = op
    lanes = lanes + np.max(timeline.lanes, initial=0) + 1
    return dataclasses.replace(
        timeline,
        names=table.names,
        ops=np.append(of_event, ops),
        lanes=np.append(timeline.lanes, lanes),
        starts=np.append(timeline.starts, starts),
        ends=np.append(timeline.ends, ends),
    )
