"""GPU devices: streams of kernels and copies.

A kernel launched by the host carries ``hlo_op`` and ``hlo_module``. One launched by a command
buffer has only its own name, which XLA derives from the instruction's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
from mfu_jax.profiling.trace.wire import Integers
from mfu_jax.profiling.trace.xspace import ABSENT, Line, Plane, Trace

PLANE = "/device:GPU:"
_STREAM = "Stream #"
_NUMBERS = ("program_id", "run_id")
_TEXTS = ("hlo_op", "hlo_module")


def timelines(trace: Trace, plane: Plane) -> Iterator[Timeline]:
    """A plane's device; none if nothing ran on it."""
    lines = [line for line in plane.lines if line.name.startswith(_STREAM) and len(line)]
    if not lines:
        return
    table = OpTable()
    events = Events.of([_ops(trace, plane, line, table) for line in lines])
    yield Timeline(
        device=plane.name.removeprefix("/device:"),
        platform="gpu",
        kind=str(plane.stats.get("gpu_device_name", "")),
        about=_about(plane.stats),
        names=table.names,
        **events._asdict(),
        executions=_executions(table.names, events),
    )


def _about(stats: Mapping[str, Any]) -> str:
    """``AMD, 304 cores, 192 GiB``: what older traces, and AMD's, have instead of a name."""
    vendor, cores, memory = (
        stats.get(name) for name in ("device_vendor", "core_count", "memory_size")
    )
    parts = [
        str(vendor) if vendor else "",
        f"{cores} cores" if cores else "",
        f"{int(memory) / 2**30:.0f} GiB" if memory else "",
    ]
    return ", ".join(part for part in parts if part)


def _ops(trace: Trace, plane: Plane, line: Line, table: OpTable) -> Lane:
    events = line.events(_NUMBERS, _TEXTS)
    columns = [events.metadata, events.texts["hlo_op"], events.texts["hlo_module"]]
    columns.append(events.numbers["program_id"])
    rows, inverse = np.unique(np.stack(columns), axis=1, return_inverse=True)
    ops = [table.number(_name(trace, plane, *row)) for row in rows.T.tolist()]
    return np.array(ops, np.int64)[inverse.reshape(-1)], events.starts, events.ends


def _name(trace: Trace, plane: Plane, kernel: int, op: int, module: int, number: int) -> OpName:
    program = Program("" if module == ABSENT else trace.texts[module], number)
    if op == ABSENT:
        # AMD's kernels are named after their descriptors.
        return OpName(program, plane.about(kernel).name.removesuffix(".kd"), is_kernel=True)
    # The name may include a command buffer or async wrapper: outer name, then inner.
    return OpName(program, trace.texts[op].rpartition("/")[2])


def _executions(names: tuple[OpName, ...], events: Events) -> Executions:
    """Executions of each program, separated by the first among its least frequent ops.

    They begin where that op does, so their spacing is right; they end with their last op.
    """
    programs: list[Program] = []
    begins: list[Integers] = [np.zeros(0, np.int64)]
    finishes: list[Integers] = [np.zeros(0, np.int64)]
    numbers = {program: number for number, program in enumerate({n.program: 0 for n in names})}
    of_event = np.array([numbers[name.program] for name in names], np.int64)[events.ops]
    for program, number in numbers.items():
        chosen = np.flatnonzero(of_event == number)
        begin = _begins(events.ops[chosen], events.starts[chosen])
        within = np.maximum(np.searchsorted(begin, events.starts[chosen], "right") - 1, 0)
        finish = np.zeros(len(begin), np.int64)
        np.maximum.at(finish, within, events.ends[chosen])
        begins.append(begin)
        finishes.append(finish)
        programs += [program] * len(begin)
    return by_start(programs, np.concatenate(begins), np.concatenate(finishes))


def _begins(ops: Integers, starts: Integers) -> Integers:
    """The starts of the op that marks a program's executions."""
    kinds, inverse, counts = np.unique(ops, return_inverse=True, return_counts=True)
    first = np.full(len(kinds), np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, starts)
    mark = np.lexsort((first, counts))[0]
    return np.sort(starts[inverse == mark])
