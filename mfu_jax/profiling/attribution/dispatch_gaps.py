"""Idle time caused by the host: the device has finished a step, and the next is not yet called.

A step that is called may still have to wait for its arguments: the copy of an array of the host's
ends such an interval, if it comes after the call. Idle time after that, or within a step, is due to
the device or the runtime. So is idle time
before another program that the host waits for when the step ends, such as an evaluation: it was
called in time, and a next step in its place would have started no earlier. What the profiler takes
to record Python's calls delays the next step only in a trace, and is left out.
"""

from __future__ import annotations

import numpy as np

from mfu_jax.profiling.timeline.devices import Executions
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import FloatArray, Intervals, TimeAttribution
from mfu_jax.profiling.trace.wire import IntArray

# Of a step or a transfer: two threads, or two clocks, record a wait's end and the end of what it
# waited for, and either may come first. On a CPU they are up to 0.4 ms apart.
_AT_ITS_END = 0.02
_OUT_OF_ORDER = 0.1  # of the steps
_MOST_IN_FLIGHT = 64  # steps called before they begin


class DispatchGaps:
    """The intervals from the end of a step to the call of the next one.

    Args:
        thread: the thread that calls and marks the steps.
        waits: starts and ends of its waits for the device.
        executions: executions of all programs on a device.
        steps: executions of the step's program.
        attributed: the device's time.
        copies: starts and ends of the loop's copies to the device.
        transfers: the same of transfers of the host's arrays by any thread; those that a step does
            not wait for are left out.
    """

    def __init__(
        self,
        thread: HostThread,
        waits: Intervals,
        executions: Executions,
        steps: Executions,
        attributed: TimeAttribution,
        copies: Intervals,
        transfers: Intervals,
    ) -> None:
        self._attributed = attributed
        self.starts = _device_ready(waits, executions, steps)
        called = _called(thread, steps)
        ends = np.minimum(steps.starts, called)[1:]
        since = np.maximum(called[:-1], _last_before(waits[1], ends))
        ends = ends - thread.recording(since, ends).astype(np.int64)
        begins, until = transfers
        nearly = until - ((until - begins) * _AT_ITS_END).astype(np.int64)
        step = np.minimum(np.searchsorted(steps.starts, nearly), len(called) - 1)
        is_awaited = (called[step] < nearly) & (nearly <= steps.starts[step])
        until = np.minimum(until, steps.starts[step])
        copies = (
            np.append(copies[0], begins[is_awaited]),
            np.append(copies[1], until[is_awaited]),
        )
        self._copies, self._called = copies, called
        ends = np.maximum(ends, _last_before(copies[1], steps.starts[1:]))
        self.ends = np.maximum(self.starts, ends)
        lengths = (steps.ends - steps.starts)[: len(self.starts)]
        self._done = self.starts - (lengths * _AT_ITS_END).astype(np.int64)
        idle = attributed.idle_within(self.starts, self.ends)
        self._until = np.concatenate([[0.0], np.cumsum(idle)])

    @property
    def idle(self) -> float:
        """Idle time in all of these intervals, picoseconds."""
        return float(self._until[-1])

    def idle_within(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """Idle time in these intervals that lies within other intervals, picoseconds."""
        return self._idle_until(ends) - self._idle_until(starts)

    def transferring(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """Idle time of each interval from which a step waits for its arguments, picoseconds.

        Args:
            starts: when the host begins to transfer an array.
            ends: when it goes on, as the copy may follow later.
        """
        begins, until = self._copies
        gap = np.searchsorted(self.starts, begins, "right") - 1
        put = _last_before(starts, begins)
        is_steps = (gap >= 0) & (put >= self._called[gap])  # no array of an earlier step
        begins = np.concatenate([starts, np.where(is_steps, put, begins)])
        until = np.concatenate([ends, until])
        order = np.argsort(begins, kind="stable")
        begins, until = begins[order], np.maximum.accumulate(until[order])
        begins = np.maximum(begins, np.append(0, until[:-1]))  # overlaps count once
        return self.idle_within(np.minimum(begins, until), until)

    def next_step(self, times: IntArray) -> IntArray:
        """The ends of the intervals that contain `times`, or begin at nearly the same time; a time
        itself if there is none."""
        if not len(self.starts):
            return times
        last = np.maximum(np.searchsorted(self._done, times, "right") - 1, 0)
        is_within = (self._done[last] <= times) & (times <= self.ends[last])
        return np.where(is_within, self.ends[last], times)

    def _idle_until(self, times: IntArray) -> FloatArray:
        if not len(self.starts):
            return np.zeros(len(times))
        before = np.searchsorted(self.starts, times, "right") - 1
        last = np.maximum(before, 0)
        partly = np.clip(times, self.starts[last], self.ends[last])
        within = self._attributed.idle_within(self.starts[last], partly)
        return np.where(before < 0, 0.0, self._until[last] + within)


def _device_ready(waits: Intervals, executions: Executions, steps: Executions) -> IntArray:
    """When each step but the last ends, or when a program that the host awaits next begins."""
    ends = steps.ends[:-1]
    if not len(ends) or not len(waits[0]):
        return ends
    following = np.searchsorted(executions.starts, ends)
    begins = np.append(executions.starts, ends[-1])[following]
    order = np.argsort(waits[0], kind="stable")
    last = np.searchsorted(waits[0][order], ends, "right") - 1
    until = np.where(last < 0, ends, np.maximum.accumulate(waits[1][order])[last])
    is_waited_for = (begins <= until) & (begins < steps.starts[1:])
    return np.where(is_waited_for, begins, ends)


def _last_before(times: IntArray, ends: IntArray) -> IntArray:
    """The last of `times` before each of `ends`; the smallest number if there is none."""
    times = np.append(np.iinfo(np.int64).min, np.sort(times))
    return times[np.searchsorted(times, ends, "right") - 1]


def _called(thread: HostThread, steps: Executions) -> IntArray:
    """When each execution's call had returned: the end of its mark.

    If a mark covers several executions, the calls are somewhere within it: they count as called
    when they start.
    """
    marks, count = len(thread.step_ends), len(steps.starts)
    called = steps.starts.copy()
    if marks and max(count // marks, 1) == 1:
        marks -= _unfinished(thread, steps)
        each = min(marks, count)
        called[count - each :] = thread.step_ends[marks - each : marks]
    return called


def _unfinished(thread: HostThread, steps: Executions) -> int:
    """How many of the last marks have no execution, because the trace ended before it began.

    As few as possible, such that calls begin before their executions; a tenth may seem not to, as
    two clocks tell the times.
    """
    marks, count = thread.step_starts, len(steps.starts)
    for missing in range(min(len(marks), _MOST_IN_FLIGHT)):
        begun = marks[: len(marks) - missing][-count:]
        if (begun > steps.starts[-len(begun) :]).mean() <= _OUT_OF_ORDER:
            return missing
    return 0
