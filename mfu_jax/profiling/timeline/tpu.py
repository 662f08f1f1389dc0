"""TPU devices: one line of ops, one of asynchronous ops, and one of program executions.

An event of ``XLA Ops`` is named after its instruction's text; ops of a loop's body lie within the
loop's event. An op belongs to the program whose execution (``XLA Modules``) it lies in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from mfu_jax.profiling.timeline.devices import (
    DeviceTimeline,
    Executions,
    LaneEvents,
    OpName,
    OpTable,
    Program,
    by_start,
    numbered,
    spans,
)
from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT, EventColumns, Metadata, Trace, XPlane

PLANE = "/device:TPU:"
_OPS, _ASYNC_OPS, _MODULES = "XLA Ops", "Async XLA Ops", "XLA Modules"
_OWN_CLOCK = ("device_offset_ps", "device_duration_ps")
_INSTRUCTION = re.compile(r"%?([^\s=]+) = ")
_MODULE = re.compile(r"(.*)\((\d+)\)$")


def timelines(trace: Trace, plane: XPlane) -> Iterator[DeviceTimeline]:
    """A plane's device; none if nothing ran on it."""
    lines = [line for line in plane.lines if line.name in (_OPS, _ASYNC_OPS) and len(line)]
    if not lines:
        return
    aligned = _executions(plane)
    table = OpTable()
    lanes, executions = [], aligned
    for line in lines:
        columns = line.events(numbers=_OWN_CLOCK)
        within = np.searchsorted(aligned.starts, columns.starts, side="right") - 1
        starts, ends = columns.starts, columns.ends
        if line.name == _OPS and _has_own_clock(columns):
            starts, ends = _on_own_clock(columns)
            executions = _by_their_ops(aligned, within, starts, ends)
        lanes.append((_ops(plane, columns.metadata, aligned.programs, within, table), starts, ends))
    events = LaneEvents.of(lanes)
    yield DeviceTimeline(
        device=plane.name.removeprefix("/device:"),
        platform="tpu",
        kind=str(plane.stats.get("device_type_string", "")),
        names=table.names,
        **events._asdict(),
        executions=executions,
        beside=frozenset(i for i, line in enumerate(lines) if line.name == _ASYNC_OPS),
    )


def _has_own_clock(events: EventColumns) -> bool:
    return all(len(column) and (column != ABSENT).all() for column in events.numbers.values())


def _on_own_clock(events: EventColumns) -> tuple[IntArray, IntArray]:
    """Starts and ends by the device's own clock, with the same origin as the events' own times.

    Those are fitted to the host's clock: one op may get half of its time, and the next one none.
    """
    offsets, durations = (events.numbers[name] for name in _OWN_CLOCK)
    starts = offsets + int(np.median(events.starts - offsets))
    return starts, starts + durations


def _by_their_ops(
    executions: Executions, within: IntArray, starts: IntArray, ends: IntArray
) -> Executions:
    """Executions from their first op to their last; those without ops stay as they are."""
    inside = within >= 0
    count = len(executions.starts)
    first, last = spans(within[inside], count, starts[inside], ends[inside])
    is_empty = first > last
    return by_start(
        executions.programs,
        np.where(is_empty, executions.starts, first),
        np.where(is_empty, executions.ends, last),
    )


def _executions(plane: XPlane) -> Executions:
    programs: list[Program] = []
    starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for line in plane.lines:
        if line.name == _MODULES:
            events = line.events()
            programs += [_program(plane.about(i)) for i in events.metadata.tolist()]
            starts.append(events.starts)
            ends.append(events.ends)
    return by_start(programs, np.concatenate(starts), np.concatenate(ends))


def _program(metadata: Metadata) -> Program:
    """The program of an execution's event, ``jit_step(1234)``."""
    match = _MODULE.match(metadata.name)
    return Program(match[1], int(match[2])) if match else Program(metadata.name)


def _ops(
    plane: XPlane,
    metadata: IntArray,
    programs: Sequence[Program],
    within: IntArray,
    table: OpTable,
) -> IntArray:
    """Op numbers of a line's events, given the execution that each lies in; −1 is none."""
    kinds = [*dict.fromkeys(programs), Program("", ABSENT)]
    numbers = {program: number for number, program in enumerate(kinds)}
    of_execution = np.array([numbers[p] for p in programs] + [len(kinds) - 1])
    return numbered(
        lambda kind, run: table.number(OpName(kinds[run], instruction(plane.about(kind)))),
        metadata,
        of_execution[within],
    )


def instruction(metadata: Metadata) -> str:
    """The name of an event's instruction.

    >>> instruction(Metadata("%fusion.3 = bf16[8]{0} fusion(%p)", "fusion.3", {}))
    'fusion.3'
    """
    match = _INSTRUCTION.match(metadata.name)
    return match[1] if match else metadata.display_name or metadata.name
