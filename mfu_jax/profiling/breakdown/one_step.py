"""The events of one step, for a picture: the longest events of each lane, on a few devices."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mfu_jax.profiling.attribution.step_times import Measured
from mfu_jax.profiling.attribution.step_windows import window_of
from mfu_jax.profiling.join.kernel_order import with_instructions
from mfu_jax.profiling.join.ops import Join, JoinedOp
from mfu_jax.profiling.timeline.devices import Program, Timeline
from mfu_jax.profiling.timeline.host import Host, HostThread
from mfu_jax.profiling.timeline.time_attribution import NO_PARENT, parents_of
from mfu_jax.profiling.trace.wire import Integers

_PICOSECONDS = 1e12
_MOST_DEVICES, _MOST_LANES, _MOST_EVENTS = 8, 6, 2400
_MOST_DEPTH = 3
_BUSY = 0.05  # of the busiest lane's time
_BINS = 400  # short events are drawn together, in at most this many bins per lane


class Event(NamedTuple):
    """One event of a step.

    Attributes:
        name: the op's name, or what the host did.
        start: seconds after the step's start.
        seconds: its length.
        depth: how many events of its lane enclose it.
        op: the op; None on the host, and for several short events drawn as one.
    """

    name: str
    start: float
    seconds: float
    depth: int
    op: JoinedOp | None = None


class Lane(NamedTuple):
    """A thread, stream or line of a device, or the host's thread."""

    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class StepPicture:
    """One step.

    Attributes:
        seconds: how long it took on all devices shown.
        lanes: the host's lanes, then the devices'.
        devices: number of devices shown; those with the most and the least idle time are included.
    """

    seconds: float
    lanes: tuple[Lane, ...]
    devices: int


class _Shown(NamedTuple):
    """A device, and the step shown; times in picoseconds."""

    timeline: Timeline
    thread: HostThread | None
    begin: int
    end: int


def picture(
    devices: Sequence[tuple[Timeline, Host]], measured: Measured, join: Join
) -> StepPicture:
    """The median step of the first device, and what the others did meanwhile.

    Args:
        devices: as returned by `read_devices`.
        measured: the same trace, measured.
        join: finds the instructions.
    """
    shown = _steps(devices, measured)
    begins = {
        id(one.thread): min(o.begin for o in shown if o.thread is one.thread) for one in shown
    }
    length = max(one.end - begins[id(one.thread)] for one in shown)
    lanes: list[Lane] = []
    threads = {id(one.thread): one for one in shown if one.thread is not None}
    few = _MOST_EVENTS // max(1, len(threads) + sum(_lane_count(one.timeline) for one in shown))
    for one in threads.values():
        lanes += _host_lane(one, begins[id(one.thread)], length, few)
    for one in shown:
        lanes += _device_lanes(one, begins[id(one.thread)], length, few, join)
    return StepPicture(
        seconds=length / _PICOSECONDS,
        lanes=tuple(lane for lane in lanes if lane.events),
        devices=len(shown),
    )


def _lane_count(timeline: Timeline) -> int:
    return min(_MOST_LANES, len(np.unique(timeline.lanes)))


def _steps(devices: Sequence[tuple[Timeline, Host]], measured: Measured) -> list[_Shown]:
    """The same step on each device shown."""
    module = measured.main.module
    known = [
        (timeline, thread, bounds)
        for timeline, host in devices
        if (bounds := _bounds(timeline, thread := host.thread(module), measured.versions))
        is not None
    ]
    order = sorted(range(len(known)), key=lambda i: measured.devices[i].idle)
    places = np.linspace(0, len(known) - 1, min(_MOST_DEVICES, len(known))).round().astype(int)
    shown = [known[i] for i in sorted(order[place] for place in places)]
    lengths = np.diff(shown[0][2])
    median = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
    found = []
    for timeline, thread, bounds in shown:
        k = min(median, len(bounds) - 2)
        found.append(_Shown(timeline, thread, int(bounds[k]), int(bounds[k + 1])))
    return found


def _bounds(
    timeline: Timeline, thread: HostThread | None, versions: Set[Program]
) -> Integers | None:
    """The start of each measured step of a device, and the end of the last one."""
    window = window_of(timeline.executions.of(versions), thread)
    return None if window is None else window.bounds


def _device_lanes(one: _Shown, begin: int, length: int, few: int, join: Join) -> list[Lane]:
    """The busiest lanes of a device, and all others as one, since a CPU has many threads."""
    timeline = with_instructions(one.timeline, join)
    inside = np.flatnonzero((timeline.starts < begin + length) & (timeline.ends > begin))
    if not len(inside):
        return []
    joined = join.ops(timeline.names)
    kinds: list[tuple[str, JoinedOp | None]] = [(op.name.name, op) for op in joined]
    busy = np.bincount(timeline.lanes[inside], (timeline.ends - timeline.starts)[inside])
    busiest = np.argsort(-busy, kind="stable")[: _MOST_LANES - 1]
    alone = sorted(lane for lane in busiest.tolist() if busy[lane] > _BUSY * busy.max())
    chosen = [(str(n), timeline.lanes[inside] == lane) for n, lane in enumerate(alone, 1)]
    chosen.append(("others", ~np.isin(timeline.lanes[inside], alone)))
    chosen = [(name, mask) for name, mask in chosen if mask.any()]
    lanes = []
    for name, mask in chosen:
        own = inside[mask]
        starts, ends = timeline.starts[own] - begin, timeline.ends[own] - begin
        events = _events(kinds, timeline.ops[own], starts, ends, length, few)
        full = timeline.device if len(chosen) == 1 else f"{timeline.device} · {name}"
        lanes.append(Lane(full, tuple(events)))
    return lanes


def _host_lane(one: _Shown, begin: int, length: int, few: int) -> list[Lane]:
    """What the thread that calls the steps did."""
    thread = one.thread
    assert thread is not None
    inside = np.flatnonzero((thread.starts < begin + length) & (thread.ends > begin))
    starts, ends = thread.starts[inside] - begin, thread.ends[inside] - begin
    kinds = [(name, None) for name in thread.names]
    return [Lane("host", tuple(_events(kinds, thread.ops[inside], starts, ends, length, few)))]


def _events(
    kinds: Sequence[tuple[str, JoinedOp | None]],
    ops: Integers,
    starts: Integers,
    ends: Integers,
    length: int,
    few: int,
) -> list[Event]:
    """The longest events of a lane one by one, the others in bins."""
    depths = _depths(starts, ends)
    starts, ends = np.clip(starts, 0, length), np.clip(ends, 0, length)
    order = np.argsort(starts - ends, kind="stable")
    order = order[depths[order] < _MOST_DEPTH]
    events = [
        Event(
            kinds[int(ops[i])][0],
            int(starts[i]) / _PICOSECONDS,
            int(ends[i] - starts[i]) / _PICOSECONDS,
            int(depths[i]),
            kinds[int(ops[i])][1],
        )
        for i in np.sort(order[:few])
    ]
    return events + _binned(starts[order[few:]], ends[order[few:]], depths[order[few:]], length)


def _binned(starts: Integers, ends: Integers, depths: Integers, length: int) -> list[Event]:
    """Short events, merged into bins by where they start."""
    events = []
    for depth in np.unique(depths).tolist():
        own = np.flatnonzero(depths == depth)
        bins = starts[own] * _BINS // (length + 1)
        for number in np.unique(bins).tolist():
            of_bin = own[bins == number]
            first = int(starts[of_bin].min())
            seconds = (int(ends[of_bin].max()) - first) / _PICOSECONDS
            name = f"{len(of_bin)} short events"
            events.append(Event(name, first / _PICOSECONDS, seconds, depth))
    return events


def _depths(starts: Integers, ends: Integers) -> Integers:
    """How many other events enclose each event."""
    parents = parents_of(np.zeros(len(starts), np.int64), starts, ends)
    depths = np.zeros(len(starts), np.int64)
    for event in np.lexsort((-ends, starts)).tolist():  # outer events first
        if parents[event] != NO_PARENT:
            depths[event] = depths[parents[event]] + 1
    return depths
