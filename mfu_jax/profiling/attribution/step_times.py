"""The time of a step, op by op: the mean over the steps and devices of a trace."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from mfu_jax.host_work import HostWork
from mfu_jax.profiling.attribution.device_times import DeviceTime, OneDevice, OpTime, on_one_device
from mfu_jax.profiling.attribution.host_time import HostSums, HostTime
from mfu_jax.profiling.attribution.host_work import ClassifiedEvents
from mfu_jax.profiling.attribution.step_windows import (
    main_program,
    no_steps,
    versions_of,
    window_of,
)
from mfu_jax.profiling.join.callbacks import with_callbacks
from mfu_jax.profiling.join.ops import Join, JoinedOp
from mfu_jax.profiling.join.unnamed_kernels import with_instructions
from mfu_jax.profiling.timeline.devices import DeviceTimeline, OpName, Program
from mfu_jax.profiling.timeline.host import HostThreads
from mfu_jax.profiling.timeline.time_attribution import summed


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
        after_callbacks: seconds of these after the first callback of an execution.
        devices: each device on its own.
        threads: threads that compute, on CPUs.
        kernels: the kernels that ran as each op, on GPUs.
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
    after_callbacks: float
    devices: tuple[DeviceTime, ...]
    threads: int = 0
    kernels: Mapping[OpName, Set[str]] = field(default_factory=dict)

    @property
    def busy_seconds(self) -> float:
        """Seconds per step in which anything ran."""
        return sum(op.seconds for op in self.ops)

    @property
    def coverage(self) -> float:
        """The share of `busy_seconds` whose ops have an instruction, or are the loop's copies."""
        known = [op for op in self.ops if op.op.record is not None or op.op.is_host_copy]
        joined = sum(op.seconds for op in known)
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
    classified: dict[int, ClassifiedEvents] = {}  # by `id`: devices of a host share its thread
    found = []
    kernels: dict[OpName, Set[str]] = {}
    for timeline, host in devices:
        thread = host.thread(main.module)
        window = window_of(timeline.executions.of(versions), thread)
        if window is None:
            continue
        if thread is not None and id(thread) not in classified:
            classified[id(thread)] = ClassifiedEvents.of(thread, timeline.executions)
        events = classified.get(id(thread))
        named = with_callbacks(with_instructions(timeline, join), host, join)
        for name, names in named.kernels_of.items():
            kernels[name] = kernels.get(name, set()) | names
        found.append(on_one_device(named, thread, events, window, versions, join, host.transfers))
    if not found:
        raise no_steps()
    return replace(_mean(found, devices[0][0], main, versions), kernels=kernels)


def _mean(
    found: Sequence[OneDevice],
    timeline: DeviceTimeline,
    main: Program,
    versions: frozenset[Program],
) -> MeasuredStep:
    """The mean over devices, of which `timeline` is the first."""
    count = len(found)
    executions = summed(pair for one in found for pair in one.executions.items())
    host = functools.reduce(operator.add, (one.host for one in found), HostSums())
    causes: dict[str, dict[str, float]] = {}
    pairs = (pair for one in found for pair in one.causes)
    for (where, name), seconds in summed(pairs, count).items():
        causes.setdefault(where, {})[name] = seconds
    return MeasuredStep(
        platform=timeline.platform,
        kind=timeline.kind,
        main=main,
        versions=versions,
        steps=min(one.steps for one in found),
        step_seconds=sum(one.device.step for one in found) / count,
        ops=_mean_ops(found, executions),
        idle=summed((pair for one in found for pair in one.idle.items()), count),
        idle_causes=causes,
        late_calls=host.late / count,
        late_asleep=host.asleep / count,
        recording=host.recording / count,
        host=host.mean(count),
        executions={program: runs / count for program, runs in executions.items()},
        steps_with=functools.reduce(operator.or_, (one.steps_with for one in found)),
        late_after=summed((pair for one in found for pair in one.late_after), count),
        idle_within=summed((pair for one in found for pair in one.idle_within), count),
        after_callbacks=sum(one.after_callbacks for one in found) / count,
        devices=tuple(one.device for one in found),
        threads=timeline.threads,
    )


def _mean_ops(
    found: Sequence[OneDevice], executions: Mapping[Program, float]
) -> tuple[OpTime, ...]:
    """The ops that took time or ran, longest first."""
    count, rows = len(found), [row for one in found for row in one.ops.items()]
    joined = {name: time.op for name, time in rows}
    seconds = summed((name, time.seconds) for name, time in rows)
    alone = summed((name, time.self_seconds) for name, time in rows)
    events = summed((name, time.runs) for name, time in rows)
    times = [
        OpTime(
            op=op,
            seconds=seconds[name] / count,
            self_seconds=alone[name] / count,
            runs=_runs(op, events[name], executions) / count,
        )
        for name, op in joined.items()
        if seconds[name] or events[name]
    ]
    return tuple(sorted(times, key=lambda time: -time.seconds))


def _runs(op: JoinedOp, events: float, executions: Mapping[Program, float]) -> float:
    """Runs of an instruction: a library call may be several kernels that share its name."""
    record, program = op.record, op.name.program
    if record is None or not record.runs or program not in executions:
        return events
    return min(events, record.runs * executions[program])
