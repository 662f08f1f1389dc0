"""CPU devices: the thunks run by the host's threads.

Every event with an ``hlo_op`` is a thunk; ``device_ordinal`` gives its device, ``run_id`` its
execution. One device's thunks run on several threads, and a thread serves several devices. The
executor's own events enclose them: an execution is over only once it has also freed its memory.

Some thunks return at once, and threads without events continue them: XLA's matmuls (Eigen's
contractions) and large copies. Such a thunk gets its own lane, until its result is ready. Each has
an instant event ``end: NAME`` then, joined by the ids of producer and consumer
(xla/backends/cpu/runtime/thunk_executor.cc). If the work waiting for the result runs immediately on
the same thread, that event comes only after it: the result was ready when that work began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mfu_jax.profiling.timeline.devices import (
    DeviceTimeline,
    OpName,
    OpTable,
    Program,
    apart,
    by_start,
    numbered,
    spans,
)
from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT, EventColumns, Trace, XLine, XPlane

PLANE = "/host:CPU"
_PRODUCER, _CONSUMER = "_p", "_c"
_END, _EXECUTOR = "end: ", "ThunkExecutor::Execute"
_WAITS = re.compile(r"(while|call|conditional)(\.|$)")  # for ops with their own events
_AT_ONCE = 10_000_000  # picoseconds: returning from a call
_POOL = "tf_XLAEigen"  # the names of its threads begin so
_NUMBERS = ("program_id", "run_id", "device_ordinal", _PRODUCER, _CONSUMER)
_TEXTS = ("hlo_op", "hlo_module")
_COLUMNS = (*_NUMBERS, *_TEXTS, "start", "end", "lane", "until")


def timelines(trace: Trace, plane: XPlane) -> Iterator[DeviceTimeline]:
    """The CPU devices of a host."""
    thunks = _thunks(plane)
    threads = sum(len(line) > 0 and line.name.startswith(_POOL) for line in plane.lines)
    for device in np.unique(thunks["device_ordinal"]).tolist():
        chosen = thunks["device_ordinal"] == device
        of_device = {name: column[chosen] for name, column in thunks.items()}
        yield _timeline(trace, 0 if device == ABSENT else device, of_device, threads)


def _thunks(plane: XPlane) -> dict[str, IntArray]:
    """Columns of all thunks, over all threads."""
    parts: dict[str, list[IntArray]] = {name: [np.zeros(0, np.int64)] for name in _COLUMNS}
    results: list[_Results] = []
    for lane, line in enumerate(plane.lines):
        events = line.events(_NUMBERS, _TEXTS)
        runs = _executors(line, events)
        results.append(_results_of(line, events, runs))
        chosen = events.texts["hlo_op"] != ABSENT
        columns = {**events.numbers, **events.texts, "start": events.starts, "end": events.ends}
        columns["until"] = _until(events, runs)
        for name, column in columns.items():
            parts[name].append(column[chosen])
        parts["lane"].append(np.full(int(chosen.sum()), lane))
    thunks = {name: np.concatenate(columns) for name, columns in parts.items()}
    return _until_done(thunks, results, plane)


def _until_done(
    thunks: dict[str, IntArray], results: Sequence[_Results], plane: XPlane
) -> dict[str, IntArray]:
    """Extends thunks to the ends of their results, with lanes for those that outlast their call."""
    ops, inverse = np.unique(thunks["hlo_op"], return_inverse=True)
    is_waiting = np.array([_waits(plane.trace.texts[op]) for op in ops.tolist()], bool)[inverse]
    done = _done(results, thunks[_PRODUCER], thunks["end"])
    done = np.where(is_waiting, thunks["end"], done)
    late = np.flatnonzero(done > thunks["end"])
    lanes = thunks["lane"].copy()
    lanes[late] = len(plane.lines) + apart(thunks["start"][late], done[late])
    return {**thunks, "lane": lanes, "end": done, "until": np.maximum(thunks["until"], done)}


def _timeline(
    trace: Trace, device: int, thunks: dict[str, IntArray], threads: int
) -> DeviceTimeline:
    table = OpTable()
    modules = (thunks["hlo_module"], thunks["program_id"])
    ops = numbered(
        lambda m, p, o: table.number(OpName(_program(trace, m, p), trace.texts[o])),
        *modules,
        thunks["hlo_op"],
    )
    programs: dict[tuple[Program, int], int] = {}
    runs = numbered(
        lambda m, p, r: programs.setdefault((_program(trace, m, p), r), len(programs)),
        *modules,
        thunks["run_id"],
    )
    first, last = spans(runs, len(programs), thunks["start"], thunks["until"])
    return DeviceTimeline(
        device=f"CPU:{device}",
        platform="cpu",
        kind="cpu",
        names=table.names,
        ops=ops,
        lanes=thunks["lane"],
        starts=thunks["start"],
        ends=thunks["end"],
        executions=by_start([program for program, _ in programs], first, last),
        threads=threads,
    )


def _until(events: EventColumns, runs: IntArray) -> IntArray:
    """When the executor that runs each event is done; without one, the event's own end.

    Args:
        events: a thread's events.
        runs: indices of the executor's events.
    """
    runs = runs[np.argsort(events.starts[runs], kind="stable")]
    if not len(runs):
        return events.ends
    starts, ends = events.starts[runs], np.maximum.accumulate(events.ends[runs])
    last = np.searchsorted(starts, events.starts, "right") - 1
    return np.where(last < 0, events.ends, np.maximum(events.ends, ends[last]))


def _program(trace: Trace, module: int, number: int) -> Program:
    return Program("" if module == ABSENT else trace.texts[module], number)


class _Results(NamedTuple):
    """The results that a thread reports.

    Attributes:
        ids: id of each result's producer.
        times: time of each result's event, picoseconds.
        begins: when the executor that ran just before began; `ABSENT` if none did.
    """

    ids: IntArray
    times: IntArray
    begins: IntArray


def _done(results: Sequence[_Results], producers: IntArray, ends: IntArray) -> IntArray:
    """When thunks are done, picoseconds; their own ends if they are done when they return.

    Args:
        results: the results of all threads.
        producers: the thunks' ids.
        ends: when they return, picoseconds.
    """
    if not any(len(result.ids) for result in results):
        return ends
    ids, times, begins = map(np.concatenate, zip(*results, strict=True))
    order = np.argsort(ids, kind="stable")
    at = order[np.minimum(np.searchsorted(ids[order], producers), len(ids) - 1)]
    done = np.where(begins[at] >= ends, begins[at], times[at])
    is_late = (ids[at] == producers) & (done > ends + _AT_ONCE)
    return np.where(is_late, done, ends)


def _waits(name: str) -> bool:
    """Whether an op of this name only waits for others.

    >>> _waits("while.3"), _waits("dot.3")
    (True, False)
    """
    return _WAITS.match(name) is not None


def _executors(line: XLine, events: EventColumns) -> IntArray:
    """The indices of a thread's executor events, which enclose the thunks that it runs."""
    kinds = np.unique(events.metadata).tolist()
    named = [kind for kind in kinds if line.plane.about(kind).name == _EXECUTOR]
    return np.flatnonzero(np.isin(events.metadata, named))


def _results_of(line: XLine, events: EventColumns, runs: IntArray) -> _Results:
    """The results that a thread reports.

    Args:
        line: the thread.
        events: its events, with the `_CONSUMER` numbers.
        runs: indices of the executor's events.
    """
    ended = np.flatnonzero(events.numbers[_CONSUMER] != ABSENT)
    kinds = events.metadata[ended]
    named = [k for k in np.unique(kinds).tolist() if line.plane.about(k).name.startswith(_END)]
    ended = ended[np.isin(kinds, named)]
    ids, times = events.numbers[_CONSUMER][ended], events.starts[ended]
    if not len(runs):
        return _Results(ids, times, np.full(len(times), ABSENT))
    runs = runs[np.lexsort((-events.starts[runs], events.ends[runs]))]
    last = np.searchsorted(events.ends[runs], times, "right") - 1
    before = runs[np.maximum(last, 0)]
    is_just_before = (last >= 0) & (times - events.ends[before] < _AT_ONCE)
    return _Results(ids, times, np.where(is_just_before, events.starts[before], ABSENT))
