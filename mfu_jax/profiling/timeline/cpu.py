"""CPU devices: the thunks run by the host's threads.

Every event with an ``hlo_op`` is a thunk; ``device_ordinal`` gives its device, ``run_id`` its
execution. One device's thunks run on several threads, and a thread serves several devices. The
executor's own events enclose them: an execution is over only once it has also freed its memory. A
thunk that continues after it returns gets its own lane, until its result is ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from mfu_jax.profiling.timeline.completions import (
    CONSUMER,
    PRODUCER,
    Completions,
    Results,
    executors,
    results_of,
    waits,
)
from mfu_jax.profiling.timeline.devices import (
    DeviceTimeline,
    OpName,
    OpTable,
    Program,
    executions_of,
)
from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT, EventColumns, Trace, XPlane

PLANE = "/host:CPU"
_POOL = "tf_XLAEigen"  # the names of its threads begin so
_NUMBERS = ("program_id", "run_id", "device_ordinal", PRODUCER, CONSUMER)
_TEXTS = ("hlo_op", "hlo_module")
_COLUMNS = (*_NUMBERS, *_TEXTS, "start", "end", "lane", "until")


def timelines(trace: Trace, plane: XPlane) -> Iterator[DeviceTimeline]:
    """The CPU devices of a host."""
    thunks = _thunks(plane)
    threads = sum(len(line) > 0 and line.name.startswith(_POOL) for line in plane.lines)
    for device in np.unique(thunks["device_ordinal"]).tolist():
        chosen = thunks["device_ordinal"] == device
        of_device = {name: column[chosen] for name, column in thunks.items()}
        timeline = _timeline(trace, 0 if device == ABSENT else device, of_device)
        yield dataclasses.replace(timeline, threads=threads)


def _thunks(plane: XPlane) -> dict[str, IntArray]:
    """Columns of all thunks, over all threads."""
    parts: dict[str, list[IntArray]] = {name: [np.zeros(0, np.int64)] for name in _COLUMNS}
    results: list[Results] = []
    for lane, line in enumerate(plane.lines):
        events = line.events(_NUMBERS, _TEXTS)
        runs = executors(line, events)
        results.append(results_of(line, events, runs))
        chosen = events.texts["hlo_op"] != ABSENT
        columns = {**events.numbers, **events.texts, "start": events.starts, "end": events.ends}
        columns["until"] = _until(events, runs)
        for name, column in columns.items():
            parts[name].append(column[chosen])
        parts["lane"].append(np.full(int(chosen.sum()), lane))
    thunks = {name: np.concatenate(columns) for name, columns in parts.items()}
    return _until_done(thunks, Completions(results), plane)


def _until_done(
    thunks: dict[str, IntArray], completions: Completions, plane: XPlane
) -> dict[str, IntArray]:
    """Extends thunks to the ends of their results, with lanes for those that outlast their call."""
    ops, inverse = np.unique(thunks["hlo_op"], return_inverse=True)
    is_waiting = np.array([waits(plane.trace.texts[op]) for op in ops.tolist()], bool)[inverse]
    done = completions.of(thunks[PRODUCER], thunks["end"])
    done = np.where(is_waiting, thunks["end"], done)
    late = np.flatnonzero(done > thunks["end"])
    lanes = thunks["lane"].copy()
    lanes[late] = len(plane.lines) + _apart(thunks["start"][late], done[late])
    return {**thunks, "lane": lanes, "end": done, "until": np.maximum(thunks["until"], done)}


def _apart(starts: IntArray, ends: IntArray) -> IntArray:
    """Assigns events to as few lanes as possible, such that events of a lane do not overlap."""
    lanes = np.zeros(len(starts), np.int64)
    free: list[int] = []  # when each lane becomes free
    for event in np.argsort(starts, kind="stable").tolist():
        start, end = int(starts[event]), int(ends[event])
        lane = next((n for n, since in enumerate(free) if since <= start), len(free))
        free[lane : lane + 1] = [end]
        lanes[event] = lane
    return lanes


def _timeline(trace: Trace, device: int, thunks: dict[str, IntArray]) -> DeviceTimeline:
    table = OpTable()
    ops = _numbered(
        [thunks["hlo_module"], thunks["program_id"], thunks["hlo_op"]],
        lambda m, p, o: table.number(OpName(_program(trace, m, p), trace.texts[o])),
    )
    programs: dict[tuple[Program, int], int] = {}
    runs = _numbered(
        [thunks["hlo_module"], thunks["program_id"], thunks["run_id"]],
        lambda m, p, r: programs.setdefault((_program(trace, m, p), r), len(programs)),
    )
    return DeviceTimeline(
        device=f"CPU:{device}",
        platform="cpu",
        kind="cpu",
        names=table.names,
        ops=ops,
        lanes=thunks["lane"],
        starts=thunks["start"],
        ends=thunks["end"],
        executions=executions_of(
            runs, [program for program, _ in programs], thunks["start"], thunks["until"]
        ),
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


def _numbered(columns: list[IntArray], number: Callable[[int, int, int], int]) -> IntArray:
    """A number for each row, equal for equal rows; `number` is called once per distinct row."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:  # each has few distinct values
        values, inverse = np.unique(column, return_inverse=True)
        codes = codes * max(len(values), 1) + inverse
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    return np.array([number(*row) for row in rows], np.int64)[inverse]
