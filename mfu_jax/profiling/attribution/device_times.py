"""Where the time of a step went on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.profiling.attribution.dispatch_gaps import DispatchGaps
from mfu_jax.profiling.attribution.host_time import HostSums, host_sums
from mfu_jax.profiling.attribution.host_work import ClassifiedEvents, in_words, waits_of
from mfu_jax.profiling.attribution.step_windows import (
    Window,
    step_by_step,
)
from mfu_jax.profiling.join.ops import DeviceWork, Join, JoinedOp
from mfu_jax.profiling.timeline.devices import (
    TO_DEVICE,
    DeviceTimeline,
    Executions,
    OpName,
    Program,
)
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import (
    FloatArray,
    Intervals,
    TimeAttribution,
    attribute_time,
    parents_of,
    without_inner,
)
from mfu_jax.profiling.trace.wire import IntArray

_PICOSECONDS = 1e12
_LAST = len(DeviceWork)  # this class gets the time in which nothing else is active
_CALL, _BETWEEN = "in the step's call", "between calls"


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Where one device's time went, in seconds per step.

    Attributes:
        device: its name.
        step: the whole step.
        idle: time in which nothing ran.
        compute: time of ops that compute, step by step.
    """

    device: str
    step: float
    idle: float
    compute: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """One op, per step and device, as the mean over devices.

    Attributes:
        op: the op with its instruction.
        seconds: wall time attributed to it: its own, or its share where ops overlap.
        self_seconds: sum of its durations, without the ops within it.
        runs: how often it ran.
    """

    op: JoinedOp
    seconds: float
    self_seconds: float
    runs: float

    def shortest(self, peaks: StepPeaks) -> float:
        """The time of its matmuls at the peak."""
        record = self.op.record
        return 0.0 if record is None else self.runs * peaks.seconds(record.flops_by_dtype)


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """One device; all times are seconds per step.

    A key may occur several times in a sequence of pairs: its values add up.

    Attributes:
        device: its times.
        steps: number of measured steps.
        ops: times by op.
        idle: idle time by what the host did, as in `MeasuredStep`.
        causes: idle time by what the host did, and by what its thread was called.
        executions: number of executions of each program per step.
        steps_with: number of measured steps in which each program ran.
        late_after: idle time because of a late call that follows an execution of a program.
        idle_within: idle time during an execution of a program.
        after_callbacks: the part of it after the execution's first callback.
        host: what the thread that calls the steps did.
    """

    device: DeviceTime
    steps: int
    ops: Mapping[OpName, OpTime]
    idle: Mapping[str, float]
    causes: Sequence[tuple[tuple[str, str], float]]
    executions: Mapping[Program, float]
    steps_with: Counter[Program]
    late_after: Sequence[tuple[Program, float]]
    idle_within: Sequence[tuple[Program, float]]
    after_callbacks: float
    host: HostSums


def on_one_device(
    timeline: DeviceTimeline,
    thread: HostThread | None,
    events: ClassifiedEvents | None,
    window: Window,
    versions: frozenset[Program],
    join: Join,
    transfers: Intervals,
) -> OneDevice:
    """Divides the wall time of one device.

    Args:
        timeline: its ops, named as far as possible.
        thread: the thread that calls its steps; None if the trace does not say.
        events: the thread's events.
        window: the measured steps.
        versions: the step's program.
        join: finds the instructions.
        transfers: when the host's threads transfer arrays to devices.
    """
    joined = join.ops(timeline.names)
    scale = 1 / (_PICOSECONDS * window.steps)
    parents = parents_of(timeline.lanes, timeline.starts, timeline.ends)
    classes = np.array([op.work for op in joined])[timeline.ops]
    time = attribute_time(
        timeline.starts,
        timeline.ends,
        np.where(_beside(timeline), _LAST, classes),
        parents,
        window.begin,
        window.end,
    )
    executions, host = timeline.executions, HostSums()
    late_after: Sequence[tuple[Program, float]] = ()
    if thread is not None and events is not None:
        waits = waits_of(thread, executions)
        steps, copies = executions.of(versions), _copies(timeline, joined)
        gaps = DispatchGaps(thread, waits, executions, steps, time, copies, transfers)
        host = host_sums(thread, events, gaps, executions, window.bounds, scale)
        until = np.append(executions.starts[1:], executions.ends[-1:])
        late_after = _by_program(executions, gaps.idle_within(executions.ends, until) * scale)
    until = np.minimum(executions.ends, np.append(executions.starts[1:], executions.ends[-1:]))
    called = np.sort(timeline.starts[classes == DeviceWork.HOST])
    first = np.append(called, np.iinfo(np.int64).max)[np.searchsorted(called, executions.starts)]
    ran, ran_in_step = _executions(executions, window)
    return OneDevice(
        device=DeviceTime(
            device=timeline.device,
            step=(window.end - window.begin) * scale,
            idle=time.idle * scale,
            compute=step_by_step(
                timeline.starts, time.shares * (classes == DeviceWork.COMPUTE), window
            ),
        ),
        steps=window.steps,
        ops=_op_times(timeline, joined, time, parents, window),
        idle=_idle(time, thread, scale),
        causes=[] if thread is None else _idle_causes(time, thread, scale),
        executions={program: count / window.steps for program, count in ran.items()},
        steps_with=ran_in_step,
        late_after=late_after,
        idle_within=_by_program(executions, time.idle_within(executions.starts, until) * scale),
        after_callbacks=time.idle_within(np.minimum(first, until), until).sum() * scale,
        host=host,
    )


def _copies(timeline: DeviceTimeline, joined: Sequence[JoinedOp]) -> Intervals:
    """When the loop's arrays are copied to the device."""
    is_copy = np.array([op.is_host_copy and op.kind == TO_DEVICE for op in joined], bool)
    chosen = is_copy[timeline.ops]
    return timeline.starts[chosen], timeline.ends[chosen]


def _by_program(executions: Executions, seconds: FloatArray) -> list[tuple[Program, float]]:
    return list(zip(executions.programs, seconds.tolist(), strict=True))


def _executions(
    executions: Executions, window: Window
) -> tuple[Counter[Program], Counter[Program]]:
    """How often each program ran in the window, and in how many of its steps."""
    steps = np.searchsorted(window.bounds, executions.starts, "right").tolist()
    inside = [
        (program, step)
        for program, step in zip(executions.programs, steps, strict=True)
        if 0 < step <= window.steps
    ]
    return Counter(program for program, _ in inside), Counter(program for program, _ in set(inside))


def _op_times(
    timeline: DeviceTimeline,
    joined: Sequence[JoinedOp],
    time: TimeAttribution,
    parents: IntArray,
    window: Window,
) -> dict[OpName, OpTime]:
    """The times of each op of a device's table; runs are events, several if kernels share it."""
    count, scale = len(timeline.names), 1 / (_PICOSECONDS * window.steps)
    own = _self_times(timeline, parents, window)
    is_inside = (timeline.starts >= window.begin) & (timeline.starts < window.end)
    is_inside &= ~_beside(timeline)
    columns = (
        np.bincount(timeline.ops, time.shares, count) * scale,
        np.bincount(timeline.ops, own, count) * scale,
        np.bincount(timeline.ops, is_inside, count) / window.steps,
    )
    rows = zip(timeline.names, joined, *(column.tolist() for column in columns), strict=True)
    return {
        name: OpTime(op=op, seconds=seconds, self_seconds=alone, runs=runs)
        for name, op, seconds, alone, runs in rows
    }


def _beside(timeline: DeviceTimeline) -> npt.NDArray[np.bool_]:
    """Whether each event is on a lane beside the others."""
    return np.isin(timeline.lanes, list(timeline.beside))


def _self_times(timeline: DeviceTimeline, parents: IntArray, window: Window) -> FloatArray:
    """Each event's duration within the window, without the events directly within it."""
    starts = np.clip(timeline.starts, window.begin, window.end)
    lengths = (np.clip(timeline.ends, window.begin, window.end) - starts).astype(np.float64)
    return without_inner(lengths, parents)


def _idle(time: TimeAttribution, thread: HostThread | None, scale: float) -> dict[str, float]:
    """Idle time by whether the host was in the step's call."""
    if thread is None:
        return {"": time.idle * scale}
    in_call = float(time.idle_within(thread.step_starts, thread.step_ends).sum()) * scale
    return {_CALL: in_call, _BETWEEN: time.idle * scale - in_call}


def _idle_causes(
    time: TimeAttribution, thread: HostThread, scale: float
) -> list[tuple[tuple[str, str], float]]:
    """Idle time by whether the host was in the step's call, and by what its thread did."""
    if not len(thread.starts) or not time.idle:
        return []
    rest = without_inner(time.idle_within(thread.starts, thread.ends), thread.parents)
    call = np.searchsorted(thread.step_starts, thread.starts, side="right") - 1
    in_call = (call >= 0) & (thread.starts < thread.step_ends[call])
    causes = []
    for where, chosen in ((_CALL, in_call), (_BETWEEN, ~in_call)):
        sums = np.bincount(thread.ops[chosen], rest[chosen], len(thread.names))
        for op in np.flatnonzero(sums > 0).tolist():
            causes.append(((where, in_words(thread.names[op])), float(sums[op]) * scale))
    return causes
