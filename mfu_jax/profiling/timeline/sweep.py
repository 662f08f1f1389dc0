"""Divides wall time among events that overlap.

At each instant, the time goes to the events of the first class that is active, in equal parts:
communication beside a matmul costs nothing, communication alone is exposed. An event within another
one of the same lane replaces it: a loop costs what is left of it beside its body.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mfu_jax.profiling.trace.wire import Integers

Floats = npt.NDArray[np.float64]

NO_PARENT = -1


@dataclass(frozen=True, kw_only=True)
class Division:
    """Wall time, divided.

    Attributes:
        shares: of each event, picoseconds.
        idle: time in which no event is active.
        points: instants at which anything changes.
        idle_until: idle time before each of `points`.
    """

    shares: Floats
    idle: float
    points: Integers
    idle_until: Floats

    def idle_within(self, starts: Integers, ends: Integers) -> Floats:
        """Idle time within intervals."""
        until = np.interp(np.concatenate([starts, ends]), self.points, self.idle_until)
        return until[len(starts) :] - until[: len(starts)]


def parents_of(lanes: Integers, starts: Integers, ends: Integers) -> Integers:
    """Of each event, the innermost event of its lane that it lies within, else `NO_PARENT`."""
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


def divide(
    starts: Integers,
    ends: Integers,
    classes: Integers,
    parents: Integers,
    begin: int,
    end: int,
) -> Division:
    """Divides the time from `begin` to `end`.

    Args:
        starts: of the events, picoseconds.
        ends: the same.
        classes: of the events; 0 goes first.
        parents: as `parents_of` has them.
        begin: of the window.
        end: the same.
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
    return Division(shares=shares, idle=float(idle_until[-1]), points=points, idle_until=idle_until)


def _active(first: Integers, last: Integers, points: int) -> Integers:
    """How many events are active between each point and the next."""
    changes = np.bincount(first, minlength=points) - np.bincount(last, minlength=points)
    return np.cumsum(changes)[:-1]
