"""Divides wall time among overlapping events.

At each instant, the time goes in equal parts to the events of the first active class:
communication beside a matmul costs nothing, communication alone is exposed. An event within another
one of the same lane replaces it: a loop costs only what its body does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mfu_jax.profiling.trace.wire import IntArray

FloatArray = npt.NDArray[np.float64]

Intervals = tuple[IntArray, IntArray]
"""Starts and ends, picoseconds."""

NO_PARENT = -1


_KeyT = TypeVar("_KeyT", bound=Hashable)


def summed(pairs: Iterable[tuple[_KeyT, float]], count: int = 1) -> dict[_KeyT, float]:
    """The sum of each key's values, divided by `count`."""
    sums: dict[_KeyT, float] = defaultdict(float)
    for key, value in pairs:
        sums[key] += value
    return {key: total / count for key, total in sums.items()}


@dataclass(frozen=True, kw_only=True)
class TimeAttribution:
    """Wall time, divided.

    Attributes:
        shares: each event's share, picoseconds.
        idle: time in which no event is active.
        points: instants at which something changes.
        idle_until: idle time before each of `points`.
    """

    shares: FloatArray
    idle: float
    points: IntArray
    idle_until: FloatArray

    def idle_within(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """Idle time within each interval."""
        until = np.interp(np.concatenate([starts, ends]), self.points, self.idle_until)
        return until[len(starts) :] - until[: len(starts)]


def parents_of(lanes: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """The innermost event of its lane that encloses each event, else `NO_PARENT`."""
    parents = np.full(len(starts), NO_PARENT)
    order = np.lexsort((-ends, starts, lanes))
    stack: list[int] = []
    lane = None
    lane_of, start_of, end_of = lanes.tolist(), starts.tolist(), ends.tolist()
    for event in order.tolist():
        if lane_of[event] != lane:
            lane, stack = lane_of[event], []
        start, end = start_of[event], end_of[event]
        while stack and end_of[stack[-1]] <= start:
            stack.pop()
        for outer in reversed(stack):
            if end_of[outer] >= end:
                parents[event] = outer
                break
        stack.append(event)
    return parents


def without_inner(lengths: FloatArray, parents: IntArray) -> FloatArray:
    """Each event's length without the events directly within it."""
    inner = np.flatnonzero(parents != NO_PARENT)
    own = lengths.copy()
    np.subtract.at(own, parents[inner], lengths[inner])
    return own


def attribute_time(
    starts: IntArray,
    ends: IntArray,
    classes: IntArray,
    parents: IntArray,
    begin: int,
    end: int,
) -> TimeAttribution:
    """Divides the time from `begin` to `end`.

    Args:
        starts: starts of the events, picoseconds.
        ends: the same.
        classes: classes of the events; 0 goes first.
        parents: as returned by `parents_of`.
        begin: start of the window.
        end: end of the window.
    """
    starts, ends = np.clip(starts, begin, end), np.clip(ends, begin, end)
    points = np.unique(np.concatenate([starts, ends, [begin, end]]))
    first, last = np.searchsorted(points, starts), np.searchsorted(points, ends)
    inner = np.flatnonzero(parents != NO_PARENT)
    outer = parents[inner]
    lengths = np.diff(points).astype(np.float64)
    shares = np.zeros(len(starts))
    is_taken = np.zeros(len(lengths), bool)
    for number in np.unique(classes).tolist():
        own = np.flatnonzero(classes == number)
        replaced = inner[classes[outer] == number]
        active = _active(first[own], last[own], len(points))
        active -= _active(first[replaced], last[replaced], len(points))
        weights = np.where((active > 0) & ~is_taken, lengths / np.maximum(active, 1), 0.0)
        until = np.concatenate([[0.0], np.cumsum(weights)])
        shares[own] += until[last[own]] - until[first[own]]
        np.subtract.at(shares, parents[replaced], until[last[replaced]] - until[first[replaced]])
        is_taken |= active > 0
    idle_until = np.concatenate([[0.0], np.cumsum(np.where(is_taken, 0.0, lengths))])
    return TimeAttribution(
        shares=shares, idle=float(idle_until[-1]), points=points, idle_until=idle_until
    )


def _active(first: IntArray, last: IntArray, points: int) -> IntArray:
    """How many events are active between each point and the next."""
    changes = np.bincount(first, minlength=points) - np.bincount(last, minlength=points)
    return np.cumsum(changes)[:-1]
