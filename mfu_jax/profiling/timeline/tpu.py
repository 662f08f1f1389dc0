"""TPU devices: a line of ops, one of asynchronous ops beside it, one of the programs' executions.

An event of ``XLA Ops`` is named by its instruction's text; ops of a loop's body lie within the
loop's event. The program is the one whose execution (``XLA Modules``) an op lies in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from mfu_jax.profiling.timeline.devices import (
    Events,
    Executions,
    Lane,
    OpName,
    OpTable,
    Program,
    Timeline,
    by_start,
)
from mfu_jax.profiling.trace.xspace import ABSENT, Line, Metadata, Plane, Trace

PLANE = "/device:TPU:"
_OPS, _ASYNC_OPS, _MODULES = "XLA Ops", "Async XLA Ops", "XLA Modules"
_INSTRUCTION = re.compile(r"%?([^\s=]+) = ")
_MODULE = re.compile(r"(.*)\((\d+)\)$")


def timelines(trace: Trace, plane: Plane) -> Iterator[Timeline]:
    """The device of a plane; none if nothing ran on it."""
    lines = [line for line in plane.lines if line.name in (_OPS, _ASYNC_OPS) and len(line)]
    if not lines:
        return
    executions = _executions(plane)
    table = OpTable()
    events = Events.of([_ops(plane, line, executions, table) for line in lines])
    yield Timeline(
        device=plane.name.removeprefix("/device:"),
        platform="tpu",
        kind=str(plane.stats.get("device_type_string", "")),
        names=table.names,
        **events._asdict(),
        executions=executions,
    )


def _executions(plane: Plane) -> Executions:
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


def _ops(plane: Plane, line: Line, executions: Executions, table: OpTable) -> Lane:
    events = line.events()
    within = np.searchsorted(executions.starts, events.starts, side="right") - 1
    kinds = [*dict.fromkeys(executions.programs), Program("", ABSENT)]
    numbers = {program: number for number, program in enumerate(kinds)}
    of_execution = np.array([numbers[p] for p in executions.programs] + [len(kinds) - 1])
    programs = of_execution[within]  # −1, before the first one, is the last: no program
    pairs, inverse = np.unique(events.metadata * len(kinds) + programs, return_inverse=True)
    ops = [
        table.number(OpName(kinds[pair % len(kinds)], instruction(plane.about(pair // len(kinds)))))
        for pair in pairs.tolist()
    ]
    return np.array(ops, np.int64)[inverse], events.starts, events.ends


def instruction(metadata: Metadata) -> str:
    """The name of the instruction that an event is about.

    >>> instruction(Metadata("%fusion.3 = bf16[8]{0} fusion(%p)", "fusion.3", {}))
    'fusion.3'
    """
    match = _INSTRUCTION.match(metadata.name)
    return match[1] if match else metadata.display_name or metadata.name
