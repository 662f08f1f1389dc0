"""CPU devices: the thunks that threads of the host run.

Every event with an ``hlo_op`` is one; ``device_ordinal`` says of which device, ``run_id`` of which
execution. One device's thunks run on several threads, and a thread serves several devices. The
executor's own events enclose them: an execution is over when it has freed its memory, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mfu_jax.profiling.timeline.devices import (
    OpName,
    OpTable,
    Program,
    Timeline,
    executions_of,
)
from mfu_jax.profiling.trace.wire import Integers
from mfu_jax.profiling.trace.xspace import ABSENT, Events, Line, Plane, Trace

PLANE = "/host:CPU"
_NUMBERS = ("program_id", "run_id", "device_ordinal")
_TEXTS = ("hlo_op", "hlo_module")
_COLUMNS = (*_NUMBERS, *_TEXTS, "start", "end", "lane", "until")
_EXECUTOR = "ThunkExecutor::Execute"


def timelines(trace: Trace, plane: Plane) -> Iterator[Timeline]:
    """The CPU devices of a host."""
    thunks = _thunks(plane)
    for device in np.unique(thunks["device_ordinal"]).tolist():
        chosen = thunks["device_ordinal"] == device
        of_device = {name: column[chosen] for name, column in thunks.items()}
        yield _timeline(trace, 0 if device == ABSENT else device, of_device)


def _thunks(plane: Plane) -> dict[str, Integers]:
    """Columns of all thunks, over all threads."""
    parts: dict[str, list[Integers]] = {name: [np.zeros(0, np.int64)] for name in _COLUMNS}
    for lane, line in enumerate(plane.lines):
        events = line.events(_NUMBERS, _TEXTS)
        chosen = events.texts["hlo_op"] != ABSENT
        columns = {**events.numbers, **events.texts, "start": events.starts, "end": events.ends}
        columns["until"] = _until(line, events)
        for name, column in columns.items():
            parts[name].append(column[chosen])
        parts["lane"].append(np.full(int(chosen.sum()), lane))
    return {name: np.concatenate(columns) for name, columns in parts.items()}


def _timeline(trace: Trace, device: int, thunks: dict[str, Integers]) -> Timeline:
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
    return Timeline(
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


def _until(line: Line, events: Events) -> Integers:
    """When the executor that runs each event is done; else the event's own end."""
    names = {kind: line.plane.about(kind).name for kind in np.unique(events.metadata).tolist()}
    kinds = [kind for kind, name in names.items() if name == _EXECUTOR]
    executors = np.flatnonzero(np.isin(events.metadata, kinds))
    executors = executors[np.argsort(events.starts[executors], kind="stable")]
    if not len(executors):
        return events.ends
    starts, ends = events.starts[executors], np.maximum.accumulate(events.ends[executors])
    last = np.searchsorted(starts, events.starts, "right") - 1
    return np.where(last < 0, events.ends, np.maximum(events.ends, ends[last]))


def _program(trace: Trace, module: int, number: int) -> Program:
    return Program("" if module == ABSENT else trace.texts[module], number)


def _numbered(columns: list[Integers], number: Callable[[int, int, int], int]) -> Integers:
    """A number for each row, the same for equal rows; `number` is called once for each of them."""
    codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:  # each has few different values
        values, inverse = np.unique(column, return_inverse=True)
        codes = codes * max(len(values), 1) + inverse
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    return np.array([number(*row) for row in rows], np.int64)[inverse]
