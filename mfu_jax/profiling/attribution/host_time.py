"""How long the thread that calls the steps did what, and how much of it left the device idle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mfu_jax.host_work import HostWork
from mfu_jax.profiling.attribution.dispatch_gaps import DispatchGaps
from mfu_jax.profiling.attribution.host_work import (
    KINDS,
    SLEEPS,
    ClassifiedEvents,
    named,
)
from mfu_jax.profiling.timeline.devices import Executions
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import FloatArray, without_inner
from mfu_jax.profiling.trace.wire import IntArray

_PICOSECONDS = 1e12


class HostTime(NamedTuple):
    """Time of one kind of work.

    Attributes:
        seconds: per step; for calls, without the programs that the device runs within them.
        idle: the part between the end of a step on the device and the call of the next one; for
            waiting, from its start until that call; for transfers, until the array is copied.
        times: how often per step; waits only if they leave the device idle.
        steps: number of measured steps in which it occurred.
        name: what took most of it, as named in the trace; of waits, what left the device idle.
        caller: the function that most of it was called from; empty if the trace does not say.
    """

    seconds: float
    idle: float
    times: float
    steps: int
    name: str
    caller: str


@dataclass(kw_only=True)
class HostSums:
    """What the threads of devices did, one added after the other, in seconds per step.

    Attributes:
        late: idle seconds because of late calls.
        asleep: the part of `late` in which the host sleeps or waits for others, and uses no core.
        recording: seconds that recording Python's calls takes.
        by_kind: [3, kinds]: seconds, idle seconds and number of times of each kind in `KINDS`.
        steps: [kinds]: number of measured steps in which each kind occurred, the most of a device.
        by_name: seconds by kind, name and caller.
    """

    late: float = 0.0
    asleep: float = 0.0
    recording: float = 0.0
    by_kind: FloatArray = field(default_factory=lambda: np.zeros((3, len(KINDS))))
    steps: IntArray = field(default_factory=lambda: np.zeros(len(KINDS), np.int64))
    by_name: dict[tuple[HostWork, str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )

    def add(
        self,
        thread: HostThread,
        events: ClassifiedEvents,
        gaps: DispatchGaps,
        executions: Executions,
        bounds: IntArray,
        scale: float,
    ) -> None:
        """Adds what the thread of one device did.

        Args:
            thread: the thread that calls the device's steps.
            events: its events.
            gaps: its intervals from the end of a step to the call of the next one.
            executions: executions of all programs on the device.
            bounds: start of each measured step, and end of the last one, picoseconds.
            scale: seconds per step for one picosecond of the trace.
        """
        begin, end = int(bounds[0]), int(bounds[-1])
        first, last = np.clip(thread.starts, begin, end), np.clip(thread.ends, begin, end)
        own = without_inner((last - first).astype(np.float64), thread.parents)
        is_call = events.is_first & (events.kinds == KINDS.index(HostWork.DISPATCH))
        own -= np.where(thread.is_python, np.minimum(own, thread.per_call), 0.0)
        own = (own - np.where(is_call, _executing(executions, first, last), 0.0)) * scale
        idle = without_inner(gaps.idle_within(thread.starts, thread.ends), thread.parents) * scale
        self.asleep += float(idle[named(thread, SLEEPS)].sum())
        is_wait = events.kinds == KINDS.index(HostWork.WAIT)
        stalls = _stalls(thread, gaps, is_wait & events.is_first) * scale
        idle = np.where(is_wait, stalls, idle)
        transfer = KINDS.index(HostWork.TRANSFER)
        puts = events.is_first & (events.kinds == transfer)
        transferring = gaps.transferring(thread.starts[puts], thread.ends[puts]).sum() * scale
        step = np.searchsorted(bounds, thread.starts, "right") - 1
        starts = events.is_first & (step >= 0) & (thread.starts < end)
        starts &= ~is_wait | (stalls > 0)
        columns = (own, idle, starts * scale * _PICOSECONDS)
        occurred = np.unique(np.stack([events.kinds[starts], step[starts]]), axis=1)
        seconds = np.bincount(events.names, np.where(is_wait, stalls, own), len(events.table))
        sums = [np.bincount(events.kinds, column, len(KINDS)) for column in columns]
        sums[1][transfer] = transferring
        self.late += float(gaps.idle_within(*np.array([[begin], [end]]))[0]) * scale
        self.recording += float(thread.recording(bounds[:1], bounds[-1:])[0]) * scale
        self.by_kind += np.stack(sums)
        self.steps = np.maximum(self.steps, np.bincount(occurred[0], minlength=len(KINDS)))
        for name, own_seconds in zip(events.table, seconds.tolist(), strict=True):
            self.by_name[name] += own_seconds

    def mean(self, devices: int) -> dict[HostWork, HostTime]:
        """Times by kind of work, as the mean over devices."""
        means = {}
        numbers = zip(KINDS, self.by_kind.T.tolist(), self.steps.tolist(), strict=True)
        for kind, sums, steps in numbers:
            names = {name: own for name, own in self.by_name.items() if name[0] is kind}
            if names or any(sums):  # another thread's transfers have no name here
                _, name, caller = max(names, key=lambda key: names[key], default=(kind, "", ""))
                seconds, idle, times = (total / devices for total in sums)
                means[kind] = HostTime(seconds, idle, times, steps, name, caller)
        return means


def _stalls(thread: HostThread, gaps: DispatchGaps, is_wait: npt.NDArray[np.bool_]) -> FloatArray:
    """Each event's idle time as a wait: from its start until the next step is called; 0 if the
    device has another step to run when it ends.

    A loop without its waits is shorter by their length at most. Since it may then run several steps
    ahead of the device, this limits their sum, not each.
    """
    until = gaps.next_step(thread.ends)
    idle = np.where(is_wait, gaps.idle_within(thread.starts, until), 0.0)
    lengths = np.where(idle > 0, thread.ends - thread.starts, 0)
    _, step = np.unique(until, return_inverse=True)
    of_step = np.zeros(len(until))
    np.maximum.at(of_step, step, idle)  # of several waits for one step, the first has it all
    alone = np.minimum(idle, lengths)
    return alone * max(1.0, min(of_step.sum(), lengths.sum()) / max(alone.sum(), 1.0))


def _executing(executions: Executions, starts: IntArray, ends: IntArray) -> FloatArray:
    """How long the device runs executions that begin and end within each interval.

    The host's thread waits for them there: a CPU's runtime runs programs on several devices, and
    programs with callbacks, within their call.
    """
    done = np.maximum.accumulate(executions.ends)
    begins = np.maximum(executions.starts, np.append(0, done[:-1]))  # overlaps count once
    until = np.append(0, np.cumsum(np.maximum(done - begins, 0)))
    first = np.searchsorted(executions.starts, starts)
    last = np.maximum(first, np.searchsorted(done, ends, "right"))
    return (until[last] - until[first]).astype(np.float64)
