"""The time of a step, op by op: the mean over the steps and devices of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from mfu_jax.host_work import HostWork
from mfu_jax.profiling.attribution.device_times import DeviceTime, OpTime, StepSums
from mfu_jax.profiling.attribution.host_time import HostTime
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

_KeyT = TypeVar("_KeyT", bound=Hashable)


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
    first, host = devices[0]
    versions = versions_of(main, first, host.thread(main.module))
    classified: dict[int, ClassifiedEvents] = {}  # by `id`: devices of a host share its thread
    sums = StepSums()
    for timeline, host in devices:
        thread = host.thread(main.module)
        window = window_of(timeline.executions.of(versions), thread)
        if window is None:
            continue
        if thread is not None and id(thread) not in classified:
            classified[id(thread)] = ClassifiedEvents.of(thread, timeline.executions)
        events = classified.get(id(thread))
        named = with_callbacks(with_instructions(timeline, join), host, join)
        sums.add(named, thread, events, window, versions, join, host.transfers)
    if not sums.devices:
        raise no_steps()
    count, causes = len(sums.devices), defaultdict[str, dict[str, float]](dict)
    for (where, name), seconds in sums.causes.items():
        causes[where][name] = seconds / count

    def mean(summed: Mapping[_KeyT, float]) -> dict[_KeyT, float]:
        return {key: total / count for key, total in summed.items()}

    return MeasuredStep(
        platform=first.platform,
        kind=first.kind,
        main=main,
        versions=versions,
        steps=min(sums.steps),
        step_seconds=sum(device.step for device in sums.devices) / count,
        ops=_mean_ops(sums),
        idle=mean(sums.idle),
        idle_causes=causes,
        late_calls=sums.host.late / count,
        late_asleep=sums.host.asleep / count,
        recording=sums.host.recording / count,
        host=sums.host.mean(count),
        executions=mean(sums.executions),
        steps_with=sums.steps_with,
        late_after=mean(sums.late_after),
        idle_within=mean(sums.idle_within),
        after_callbacks=sums.after_callbacks / count,
        devices=tuple(sums.devices),
        threads=first.threads,
        kernels=sums.kernels,
    )


def _mean_ops(sums: StepSums) -> tuple[OpTime, ...]:
    """The ops that took time or ran, longest first."""
    count = len(sums.devices)
    times = []
    for name, op in sums.joined.items():
        seconds, alone, events = sums.ops[name].tolist()
        if seconds or events:
            runs = _runs(op, events, sums.executions) / count
            time = OpTime(op=op, seconds=seconds / count, self_seconds=alone / count, runs=runs)
            times.append(time)
    return tuple(sorted(times, key=lambda time: -time.seconds))


def _runs(op: JoinedOp, events: float, executions: Mapping[Program, float]) -> float:
    """Runs of an instruction: a library call may be several kernels that share its name."""
    record, program = op.record, op.name.program
    if record is None or not record.runs or program not in executions:
        return events
    return min(events, record.runs * executions[program])
