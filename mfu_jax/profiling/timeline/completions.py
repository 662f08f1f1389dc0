"""When a CPU's thunks are done: some return at once, and threads without events continue them.

XLA's matmuls (Eigen's contractions) and large copies do this. Each thunk has an instant event
``end: NAME`` when its result is ready, joined by the ids of producer and consumer
(xla/backends/cpu/runtime/thunk_executor.cc). If the work waiting for the result runs immediately on
the same thread, that event comes only after it: the result was ready when that work began.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT, EventColumns, XLine

PRODUCER, CONSUMER = "_p", "_c"
_END, _EXECUTOR = "end: ", "ThunkExecutor::Execute"
_WAITS = re.compile(r"(while|call|conditional)(\.|$)")  # for ops with their own events
_AT_ONCE = 10_000_000  # picoseconds: returning from a call
_NONE = np.zeros(0, np.int64)


class Results(NamedTuple):
    """The results that a thread reports.

    Attributes:
        ids: id of each result's producer.
        times: time of each result's event, picoseconds.
        begins: when the executor that ran just before began; `ABSENT` if none did.
    """

    ids: IntArray
    times: IntArray
    begins: IntArray


class Completions:
    """The ends of all thunks of a host.

    Args:
        results: the results of its threads.
    """

    def __init__(self, results: Iterable[Results]) -> None:
        columns = zip(Results(_NONE, _NONE, _NONE), *results, strict=True)
        ids, times, begins = map(np.concatenate, columns)
        order = np.argsort(ids, kind="stable")
        self._ids, self._times, self._begins = ids[order], times[order], begins[order]

    def of(self, producers: IntArray, ends: IntArray) -> IntArray:
        """When thunks are done, picoseconds; their own ends if they are done when they return.

        Args:
            producers: the thunks' ids.
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


def executors(line: XLine, events: EventColumns) -> IntArray:
    """The indices of a thread's executor events, which enclose the thunks that it runs."""
    kinds = np.unique(events.metadata).tolist()
    named = [kind for kind in kinds if line.plane.about(kind).name == _EXECUTOR]
    return np.flatnonzero(np.isin(events.metadata, named))


def results_of(line: XLine, events: EventColumns, runs: IntArray) -> Results:
    """The results that a thread reports.

    Args:
        line: the thread.
        events: its events, with the `CONSUMER` numbers.
        runs: indices of the executor's events.
    """
    ended = np.flatnonzero(events.numbers[CONSUMER] != ABSENT)
    kinds = events.metadata[ended]
    named = [k for k in np.unique(kinds).tolist() if line.plane.about(k).name.startswith(_END)]
    ended = ended[np.isin(kinds, named)]
    ids, times = events.numbers[CONSUMER][ended], events.starts[ended]
    if not len(runs):
        return Results(ids, times, np.full(len(times), ABSENT))
    runs = runs[np.lexsort((-events.starts[runs], events.ends[runs]))]
    last = np.searchsorted(events.ends[runs], times, "right") - 1
    before = runs[np.maximum(last, 0)]
    is_just_before = (last >= 0) & (times - events.ends[before] < _AT_ONCE)
    return Results(ids, times, np.where(is_just_before, events.starts[before], ABSENT))
