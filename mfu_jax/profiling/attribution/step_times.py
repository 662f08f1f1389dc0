"""The time of a step, op by op: the mean over the steps and devices of a trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mfu_jax.errors import UserError
from mfu_jax.profiling.attribution.dispatch_gaps import DispatchGaps
from mfu_jax.profiling.attribution.host_work import HostSums, HostTime, HostWork, waits_of
from mfu_jax.profiling.attribution.step_windows import (
    NO_STEPS,
    Window,
    main_program,
    step_by_step,
    versions_of,
    window_of,
)
from mfu_jax.profiling.join.kernel_order import with_instructions
from mfu_jax.profiling.join.ops import DeviceWork, Join, JoinedOp
from mfu_jax.profiling.timeline.devices import DeviceTimeline, Executions, OpName, Program
from mfu_jax.profiling.timeline.host import HostThread, HostThreads
from mfu_jax.profiling.timeline.time_attribution import (
    NO_PARENT,
    FloatArray,
    TimeAttribution,
    attribute_time,
    parents_of,
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


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A trace reduced to the times of a step.

    Attributes:
        platform: the devices' platform.
        kind: JAX's device kind; empty if the trace does not say.
        main: the program that takes the most time, among those with a dump if there are any.
        versions: `main`, and recompiled programs of the same name that ran in its place.
        steps: number of measured steps on each device.
        step_seconds: time of one step; `ops` and `idle` sum to it.
        ops: longest first.
        idle: seconds in which nothing ran, by what the host did: in the step's call, between calls,
            or empty if its calls are not in the trace.
        idle_causes: the same, broken down by what the host's thread did.
        late_calls: idle seconds from the end of a step until the next one is called.
        late_asleep: the part of them in which the host sleeps or waits for others.
        recording: what the profiler takes to record the Python calls of the thread that calls the
            steps; only a traced step waits for it.
        host: what the thread that calls the steps did, by kind; empty if its calls are not in
            the trace.
        executions: number of executions of each program per step.
        steps_with: number of measured steps in which each program ran.
        late_after: the part of `late_calls` that follows each program.
        idle_within: seconds in which nothing ran during executions of each program.
        devices: each device on its own.
        threads: threads that compute, on CPUs.
    """

    platform: str
    kind: str
    main: Program
    versions: frozenset[Program]
    steps: int
    step_seconds: float
    ops: tuple[OpTime, ...]
    idle: Mapping[str, float]
    idle_causes: Mapping[str, Mapping[str, float]]
    late_calls: float
    late_asleep: float
    recording: float
    host: Mapping[HostWork, HostTime]
    executions: Mapping[Program, float]
    steps_with: Mapping[Program, int]
    late_after: Mapping[Program, float]
    idle_within: Mapping[Program, float]
    devices: tuple[DeviceTime, ...]
    threads: int = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds per step in which anything ran."""
        return sum(op.seconds for op in self.ops)

    @property
    def coverage(self) -> float:
        """The share of `busy_seconds` whose ops have an instruction."""
        joined = sum(op.seconds for op in self.ops if op.op.record is not None)
        return joined / self.busy_seconds if self.busy_seconds else 0.0


def measure(devices: Sequence[tuple[DeviceTimeline, HostThreads]], join: Join) -> MeasuredStep:
    """Divides the wall time of all devices.

    Args:
        devices: as returned by `read_devices`.
        join: finds the instructions.

    Raises:
        UserError: the executions of a program cannot be told apart.
    """
    main = main_program([timeline for timeline, _ in devices], join)
    timeline, host = devices[0]
    versions = versions_of(main, timeline, host.thread(main.module))
    sums = _Sums()
    for timeline, host in devices:
        thread = host.thread(main.module)
        window = window_of(timeline.executions.of(versions), thread)
        if window is not None:
            sums.add(with_instructions(timeline, join), thread, window, versions, join)
    if not sums.devices:
        raise UserError(NO_STEPS)
    return sums.mean(devices[0][0], main, versions)


class _Sums:
    """Adds up what devices did; all times are seconds per step."""

    def __init__(self) -> None:
        self.devices: list[DeviceTime] = []
        self.steps: list[int] = []
        self.ops: dict[OpName, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.joined: dict[OpName, JoinedOp] = {}
        self.idle: dict[str, float] = defaultdict(float)
        self.causes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.executions: dict[Program, float] = defaultdict(float)
        self.steps_with: dict[Program, int] = defaultdict(int)
        self.late_after: dict[Program, float] = defaultdict(float)
        self.idle_within: dict[Program, float] = defaultdict(float)
        self.host = HostSums()

    def add(
        self,
        timeline: DeviceTimeline,
        thread: HostThread | None,
        window: Window,
        versions: frozenset[Program],
        join: Join,
    ) -> None:
        joined = join.ops(timeline.names)
        scale = 1 / (_PICOSECONDS * window.steps)
        parents = parents_of(timeline.lanes, timeline.starts, timeline.ends)
        classes = np.array([op.work for op in joined])[timeline.ops]
        division = attribute_time(
            timeline.starts,
            timeline.ends,
            np.where(_beside(timeline), _LAST, classes),
            parents,
            window.begin,
            window.end,
        )
        self._add_ops(timeline, window, division, parents, scale)
        self.joined.update(zip(timeline.names, joined, strict=True))
        self._add_idle(division, thread, scale)
        if thread is not None:
            executions = timeline.executions
            late = DispatchGaps(
                thread, waits_of(thread, executions), executions, executions.of(versions), division
            )
            self.host.add(thread, late, executions, window.bounds, scale)
            following = np.append(executions.starts[1:], executions.ends[-1:])
            after = late.idle_within(executions.ends, following) * scale
            for program, seconds in zip(executions.programs, after.tolist(), strict=True):
                self.late_after[program] += seconds
        self._add_executions(timeline.executions, window, division, scale)
        self.steps.append(window.steps)
        is_compute = classes == DeviceWork.COMPUTE
        self.devices.append(
            DeviceTime(
                device=timeline.device,
                step=(window.end - window.begin) * scale,
                idle=division.idle * scale,
                compute=step_by_step(timeline.starts, division.shares * is_compute, window),
            )
        )

    def _add_ops(
        self,
        timeline: DeviceTimeline,
        window: Window,
        division: TimeAttribution,
        parents: IntArray,
        scale: float,
    ) -> None:
        count = len(timeline.names)
        own = _self_times(timeline, parents, window)
        is_inside = (timeline.starts >= window.begin) & (timeline.starts < window.end)
        is_inside &= ~_beside(timeline)
        columns = (
            np.bincount(timeline.ops, division.shares, count) * scale,
            np.bincount(timeline.ops, own, count) * scale,
            np.bincount(timeline.ops, is_inside, count) / window.steps,
        )
        for name, *numbers in zip(timeline.names, *(c.tolist() for c in columns), strict=True):
            self.ops[name] = [a + b for a, b in zip(self.ops[name], numbers, strict=True)]

    def _add_idle(self, division: TimeAttribution, thread: HostThread | None, scale: float) -> None:
        if thread is None:
            self.idle[""] += division.idle * scale
            return
        in_call = float(division.idle_within(thread.step_starts, thread.step_ends).sum()) * scale
        self.idle[_CALL] += in_call
        self.idle[_BETWEEN] += division.idle * scale - in_call
        for where, name, seconds in _idle_causes(division, thread):
            self.causes[where][name] += seconds * scale

    def _add_executions(
        self, executions: Executions, window: Window, division: TimeAttribution, scale: float
    ) -> None:
        steps = np.searchsorted(window.bounds, executions.starts, "right").tolist()
        inside = [
            (program, step)
            for program, step in zip(executions.programs, steps, strict=True)
            if 0 < step <= window.steps
        ]
        for program, number in Counter(program for program, _ in inside).items():
            self.executions[program] += number / window.steps
        for program, number in Counter(program for program, _ in set(inside)).items():
            self.steps_with[program] = max(self.steps_with[program], number)
        ends = np.minimum(executions.ends, np.append(executions.starts[1:], executions.ends[-1:]))
        idle = division.idle_within(executions.starts, ends) * scale
        for program, seconds in zip(executions.programs, idle.tolist(), strict=True):
            self.idle_within[program] += seconds

    def _runs(self, name: OpName, events: float) -> float:
        """Runs of an instruction: a library call may be several kernels that share its name."""
        record = self.joined[name].record
        if record is None or not record.runs or name.program not in self.executions:
            return events
        return min(events, record.runs * self.executions[name.program])

    def mean(
        self, timeline: DeviceTimeline, main: Program, versions: frozenset[Program]
    ) -> MeasuredStep:
        count = len(self.devices)
        times = [
            OpTime(
                op=self.joined[name],
                seconds=a / count,
                self_seconds=b / count,
                runs=self._runs(name, c) / count,
            )
            for name, (a, b, c) in self.ops.items()
            if a or c
        ]
        return MeasuredStep(
            platform=timeline.platform,
            kind=timeline.kind,
            main=main,
            versions=versions,
            steps=min(self.steps),
            step_seconds=sum(device.step for device in self.devices) / count,
            ops=tuple(sorted(times, key=lambda op: -op.seconds)),
            idle={where: seconds / count for where, seconds in self.idle.items()},
            idle_causes={
                where: {name: seconds / count for name, seconds in causes.items()}
                for where, causes in self.causes.items()
            },
            late_calls=self.host.late(count),
            late_asleep=self.host.asleep(count),
            recording=self.host.recording(count),
            host=self.host.mean(count),
            executions={p: n / count for p, n in self.executions.items()},
            steps_with=self.steps_with,
            late_after={p: seconds / count for p, seconds in self.late_after.items()},
            idle_within={p: seconds / count for p, seconds in self.idle_within.items()},
            devices=tuple(self.devices),
            threads=timeline.threads,
        )


def _beside(timeline: DeviceTimeline) -> npt.NDArray[np.bool_]:
    """Whether each event is on a lane beside the others."""
    return np.isin(timeline.lanes, list(timeline.beside))


def _self_times(timeline: DeviceTimeline, parents: IntArray, window: Window) -> FloatArray:
    """Each event's duration within the window, without the events directly within it."""
    starts = np.clip(timeline.starts, window.begin, window.end)
    lengths = (np.clip(timeline.ends, window.begin, window.end) - starts).astype(np.float64)
    inner = np.flatnonzero(parents != NO_PARENT)
    own = lengths.copy()
    np.subtract.at(own, parents[inner], lengths[inner])
    return own


def _idle_causes(division: TimeAttribution, thread: HostThread) -> list[tuple[str, str, float]]:
    """Idle time by what the host's thread did, and by whether that was in the step's call."""
    events = len(thread.starts)
    if not events or not division.idle:
        return []
    parents = thread.parents
    own = division.idle_within(thread.starts, thread.ends)
    inner = np.flatnonzero(parents != NO_PARENT)
    rest = own.copy()
    np.subtract.at(rest, parents[inner], own[inner])
    call = np.searchsorted(thread.step_starts, thread.starts, side="right") - 1
    in_call = (call >= 0) & (thread.starts < thread.step_ends[call])
    causes = []
    for where, chosen in ((_CALL, in_call), (_BETWEEN, ~in_call)):
        sums = np.bincount(thread.ops[chosen], rest[chosen], len(thread.names))
        causes += [(where, thread.names[i], float(sums[i])) for i in np.flatnonzero(sums > 0)]
    return causes
