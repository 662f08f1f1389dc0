"""Where the time of a step went on one device."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.profiling.attribution.dispatch_gaps import DispatchGaps
from mfu_jax.profiling.attribution.host_time import HostSums
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
_SUMS: Callable[[], dict[Any, float]] = functools.partial(defaultdict, float)
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


@dataclass(kw_only=True)
class StepSums:
    """What devices do in a step, one added after the other: seconds and runs, summed over them.

    Attributes:
        devices: each on its own.
        steps: number of measured steps on each.
        joined: the ops.
        ops: of each op its seconds, its seconds without the ops within it, and its events.
        idle: idle time by what the host did, as in `MeasuredStep`.
        causes: the same by that, and by what its thread was called.
        executions: number of executions of each program.
        steps_with: number of measured steps in which each program ran, the most of a device.
        late_after: idle time because of a late call that follows an execution of a program.
        idle_within: idle time during an execution of a program.
        after_callbacks: the part of it after the execution's first callback.
        host: what the threads that call the steps did.
        kernels: the kernels that ran as each op, on GPUs.
    """

    devices: list[DeviceTime] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    joined: dict[OpName, JoinedOp] = field(default_factory=dict)
    ops: dict[OpName, FloatArray] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=_SUMS)
    causes: dict[tuple[str, str], float] = field(default_factory=_SUMS)
    executions: dict[Program, float] = field(default_factory=_SUMS)
    steps_with: Counter[Program] = field(default_factory=Counter)
    late_after: dict[Program, float] = field(default_factory=_SUMS)
    idle_within: dict[Program, float] = field(default_factory=_SUMS)
    after_callbacks: float = 0.0
    host: HostSums = field(default_factory=HostSums)
    kernels: dict[OpName, set[str]] = field(default_factory=dict)

    def add(
        self,
        timeline: DeviceTimeline,
        thread: HostThread | None,
        events: ClassifiedEvents | None,
        window: Window,
        versions: frozenset[Program],
        join: Join,
        transfers: Intervals,
    ) -> None:
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
        is_beside = np.isin(timeline.lanes, list(timeline.beside))
        time = attribute_time(
            timeline.starts,
            timeline.ends,
            np.where(is_beside, _LAST, classes),
            parents,
            window.begin,
            window.end,
        )
        is_inside = (timeline.starts >= window.begin) & (timeline.starts < window.end) & ~is_beside
        self._add_ops(timeline, joined, time.shares, parents, window, is_inside)
        self._add_idle(time, thread, scale)
        compute = time.shares * (classes == DeviceWork.COMPUTE)
        self.devices.append(
            DeviceTime(
                device=timeline.device,
                step=(window.end - window.begin) * scale,
                idle=time.idle * scale,
                compute=step_by_step(timeline.starts, compute, window),
            )
        )
        self.steps.append(window.steps)
        for name, kernels in timeline.kernels_of.items():
            self.kernels.setdefault(name, set()).update(kernels)
        executions = timeline.executions
        following = np.append(executions.starts[1:], executions.ends[-1:])
        until = np.minimum(executions.ends, following)
        called = np.sort(timeline.starts[classes == DeviceWork.HOST])
        nearest = np.append(called, np.iinfo(np.int64).max)
        first = np.minimum(nearest[np.searchsorted(called, executions.starts)], until)
        self.after_callbacks += time.idle_within(first, until).sum() * scale
        _add(self.idle_within, executions, time.idle_within(executions.starts, until) * scale)
        self._count(executions, window)
        if thread is not None and events is not None:
            waits, steps = waits_of(thread, executions), executions.of(versions)
            copies = _copies(timeline, joined)
            gaps = DispatchGaps(thread, waits, executions, steps, time, copies, transfers)
            self.host.add(thread, events, gaps, executions, window.bounds, scale)
            _add(self.late_after, executions, gaps.idle_within(executions.ends, following) * scale)

    def _add_ops(
        self,
        timeline: DeviceTimeline,
        joined: Sequence[JoinedOp],
        shares: FloatArray,
        parents: IntArray,
        window: Window,
        is_inside: npt.NDArray[np.bool_],
    ) -> None:
        """The times of each op of a device; its events are several runs if kernels share it."""
        count, scale = len(timeline.names), 1 / (_PICOSECONDS * window.steps)
        starts = np.clip(timeline.starts, window.begin, window.end)
        lengths = (np.clip(timeline.ends, window.begin, window.end) - starts).astype(np.float64)
        columns = (
            np.bincount(timeline.ops, shares, count) * scale,
            np.bincount(timeline.ops, without_inner(lengths, parents), count) * scale,
            np.bincount(timeline.ops, is_inside, count) / window.steps,
        )
        for name, op, row in zip(timeline.names, joined, np.stack(columns, axis=1), strict=True):
            self.joined[name], self.ops[name] = op, self.ops.get(name, 0.0) + row

    def _count(self, executions: Executions, window: Window) -> None:
        """How often each program ran in the window, and in how many of its steps."""
        steps = np.searchsorted(window.bounds, executions.starts, "right").tolist()
        ran = [
            (p, n) for p, n in zip(executions.programs, steps, strict=True) if 0 < n <= window.steps
        ]
        self.steps_with |= Counter(program for program, _ in set(ran))
        for program, runs in Counter(program for program, _ in ran).items():
            self.executions[program] += runs / window.steps

    def _add_idle(self, time: TimeAttribution, thread: HostThread | None, scale: float) -> None:
        """Idle time by whether the host was in the step's call, and by what its thread did."""
        if thread is None:
            self.idle[""] += time.idle * scale
            return
        in_calls = float(time.idle_within(thread.step_starts, thread.step_ends).sum()) * scale
        self.idle[_CALL] += in_calls
        self.idle[_BETWEEN] += time.idle * scale - in_calls
        if not len(thread.starts) or not time.idle:
            return
        rest = without_inner(time.idle_within(thread.starts, thread.ends), thread.parents)
        call = np.searchsorted(thread.step_starts, thread.starts, side="right") - 1
        in_call = (call >= 0) & (thread.starts < thread.step_ends[call])
        for where, chosen in ((_CALL, in_call), (_BETWEEN, ~in_call)):
            sums = np.bincount(thread.ops[chosen], rest[chosen], len(thread.names))
            for op in np.flatnonzero(sums > 0).tolist():
                self.causes[where, in_words(thread.names[op])] += float(sums[op]) * scale


def _copies(timeline: DeviceTimeline, joined: Sequence[JoinedOp]) -> Intervals:
    """When the loop's arrays are copied to the device."""
    is_copy = np.array([op.is_host_copy and op.kind == TO_DEVICE for op in joined], bool)
    chosen = is_copy[timeline.ops]
    return timeline.starts[chosen], timeline.ends[chosen]


def _add(sums: dict[Program, float], executions: Executions, seconds: FloatArray) -> None:
    for program, own in zip(executions.programs, seconds.tolist(), strict=True):
        sums[program] += own
