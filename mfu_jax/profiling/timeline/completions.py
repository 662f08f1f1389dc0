"""When a CPU's thunks are done: some return at once, and threads without events go on with them.

XLA's matmuls (Eigen's contractions) and large copies are such. Each thunk has an instant event
``end: NAME`` when its result is ready, joined by the ids of producer and consumer
(xla/backends/cpu/runtime/thunk_executor.cc). Where what waited for the result runs at once, on the
same thread, that event follows it: the result was ready when it began.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from mfu_jax.profiling.trace.wire import Integers
from mfu_jax.profiling.trace.xspace import ABSENT, Events, Line

Bools = npt.NDArray[np.bool_]

PRODUCER, CONSUMER = "_p", "_c"
_END, _EXECUTOR = "end: ", "ThunkExecutor::Execute"
_WAITS = re.compile(r"(while|call|conditional)(\.|$)")  # for ops that have events of their own
_AT_ONCE = 10_000_000  # picoseconds: the way back from a call


class Completions:
    """The ends of all thunks of a host.

    Args:
        lines: the threads, and their events with the numbers `PRODUCER` and `CONSUMER`.
    """

    def __init__(self, lines: Iterable[tuple[Line, Events]]) -> None:
        found = [_markers(line, events) for line, events in lines]
        ids, times, begins = (
            np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*found, strict=True)
        )
        order = np.argsort(ids, kind="stable")
        self._ids, self._times, self._begins = ids[order], times[order], begins[order]

    def of(self, producers: Integers, ends: Integers) -> Integers:
        """When thunks are done; their own ends where they are done when they return.

        Args:
            producers: their ids.
            ends: when they return, picoseconds.
        """
        if not len(self._ids):
            return ends
        at = np.minimum(np.searchsorted(self._ids, producers), len(self._ids) - 1)
        done = np.where(self._begins[at] >= ends, self._begins[at], self._times[at])
        is_late = (self._ids[at] == producers) & (done > ends + _AT_ONCE)
        return np.where(is_late, done, ends)


def waits(name: str) -> bool:
    """Whether an op of this name only waits for others.

    >>> waits("while.3"), waits("dot.3")
    (True, False)
    """
    return _WAITS.match(name) is not None


def executors(line: Line, events: Events) -> Integers:
    """Which events of a thread are the executor's, around the thunks that it runs."""
    return np.flatnonzero(_named(line, events, lambda name: name == _EXECUTOR))


def _markers(line: Line, events: Events) -> tuple[Integers, Integers, Integers]:
    """Of each result: its id, the time of its event, and when the executor began before that.

    `ABSENT`, if the executor did not run just before.
    """
    ids = events.numbers[CONSUMER]
    is_marker = (ids != ABSENT) & _named(line, events, lambda name: name.startswith(_END))
    times, runs = events.starts[is_marker], executors(line, events)
    if not len(runs):
        return ids[is_marker], times, np.full(len(times), ABSENT)
    runs = runs[np.lexsort((-events.starts[runs], events.ends[runs]))]
    last = np.searchsorted(events.ends[runs], times, "right") - 1
    before = runs[np.maximum(last, 0)]
    is_just_before = (last >= 0) & (times - events.ends[before] < _AT_ONCE)
    return ids[is_marker], times, np.where(is_just_before, events.starts[before], ABSENT)


def _named(line: Line, events: Events, choose: Callable[[str], bool]) -> Bools:
    kinds = np.unique(events.metadata).tolist()
    return np.isin(events.metadata, [k for k in kinds if choose(line.plane.about(k).name)])
