"""The timeline of one device: its ops, and the program executions that they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT

TO_DEVICE, TO_HOST = "host-to-device copy", "device-to-host copy"
ON_DEVICE = "memory copy"
_COPIES = {
    TO_DEVICE: re.compile(r"MemcpyH(2|to)D|CopyHostToDevice", re.IGNORECASE),
    TO_HOST: re.compile(r"MemcpyD(2|to)H|CopyDeviceToHost", re.IGNORECASE),
    ON_DEVICE: re.compile(r"Mem(cpy|set)|^Copy\w+To\w+$|rocclr_(copy|fill)Buffer", re.IGNORECASE),
}


def copy_kind(name: str) -> str:
    """What an op of this name copies; empty if it is no copy.

    >>> copy_kind("MemcpyH2D"), copy_kind("Memset 0"), copy_kind("loop_add_fusion")
    ('host-to-device copy', 'memory copy', '')
    """
    return next((kind for kind, pattern in _COPIES.items() if pattern.search(name)), "")


class Program(NamedTuple):
    """A program as a trace names it; `number` is `ABSENT` if the trace has none."""

    module: str
    number: int = ABSENT


class OpName(NamedTuple):
    """An instruction as a trace names it.

    Attributes:
        program: its program.
        name: the instruction's name, or the kernel's if `is_kernel`.
        is_kernel: whether the trace names only a kernel, no instruction.
        buffer: of a kernel, the command buffer that launches it; empty if none does.
        position: of a kernel in its command buffer.
    """

    program: Program
    name: str
    is_kernel: bool = False
    buffer: str = ""
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Executions:
    """Runs of programs on one device, sorted by start.

    Attributes:
        programs: the program of each execution.
        starts: picoseconds.
        ends: the same.
    """

    programs: tuple[Program, ...]
    starts: IntArray
    ends: IntArray

    def of(self, programs: Set[Program]) -> Executions:
        """The executions of some programs."""
        chosen = np.array([p in programs for p in self.programs], bool)
        return Executions(
            programs=tuple(p for p in self.programs if p in programs),
            starts=self.starts[chosen],
            ends=self.ends[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class DeviceTimeline:
    """What one device did.

    Attributes:
        device: such as ``TPU:0``, with its host if there are several.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        kind: JAX's device kind; empty if the trace does not say.
        names: table of ops.
        ops: each event's index in `names`.
        lanes: each event's thread, stream or line; events of one lane are nested.
        starts: picoseconds.
        ends: the same.
        executions: program executions.
        beside: lanes of work in flight beside the others; their events take no time from those.
        kernels: each event's index in `kernel_names`, on GPUs, whatever instruction it runs.
        kernel_names: names of the kernels.
        threads: threads of the pool that computes, on CPUs; all devices of a host share it.
    """

    device: str
    platform: str
    kind: str
    names: tuple[OpName, ...]
    ops: IntArray
    lanes: IntArray
    starts: IntArray
    ends: IntArray
    executions: Executions
    beside: frozenset[int] = frozenset()
    kernels: IntArray | None = None
    kernel_names: tuple[str, ...] = ()
    threads: int = 0

    @property
    def kernels_of(self) -> dict[OpName, set[str]]:
        """The kernels that ran as each op."""
        found: dict[OpName, set[str]] = {}
        if self.kernels is not None:
            rows = np.stack([self.ops[: len(self.kernels)], self.kernels])
            for op, kernel in np.unique(rows, axis=1).T.tolist():
                found.setdefault(self.names[op], set()).add(self.kernel_names[kernel])
        return found

    def of_program(self, program: Program) -> DeviceTimeline:
        """The timeline with all its ops and executions assigned to the only program that may have
        run: kernels from command buffers name none."""
        runs = self.executions
        return replace(
            self,
            names=tuple(name._replace(program=program) for name in self.names),
            executions=replace(runs, programs=(program,) * len(runs.programs)),
        )


Lane = tuple[IntArray, IntArray, IntArray]
"""For each event of one lane: its op's number, its start and its end."""


class LaneEvents(NamedTuple):
    """The events of all lanes, with fields as in `DeviceTimeline`."""

    ops: IntArray
    lanes: IntArray
    starts: IntArray
    ends: IntArray

    @classmethod
    def of(cls, lanes: Sequence[Lane]) -> LaneEvents:
        """Combines the events of several lanes."""
        ops, starts, ends = map(np.concatenate, zip(*lanes, strict=True))
        numbers = np.repeat(np.arange(len(lanes)), [len(lane[0]) for lane in lanes])
        return cls(ops, numbers, starts, ends)


class OpTable:
    """Assigns a number to every op; to `names`, their place."""

    def __init__(self, names: Iterable[OpName] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}

    def number(self, name: OpName) -> int:
        """The number of an op."""
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> tuple[OpName, ...]:
        """The ops by number."""
        return tuple(self._numbers)


def apart(starts: IntArray, ends: IntArray) -> IntArray:
    """Assigns events to as few lanes as possible, such that events of a lane do not overlap.

    >>> apart(np.array([0, 4, 10]), np.array([10, 12, 14])).tolist()
    [0, 1, 0]
    """
    lanes = np.zeros(len(starts), np.int64)
    free: list[int] = []  # when each lane becomes free
    for event in np.argsort(starts, kind="stable").tolist():
        start, end = int(starts[event]), int(ends[event])
        lane = next((n for n, since in enumerate(free) if since <= start), len(free))
        free[lane : lane + 1] = [end]
        lanes[event] = lane
    return lanes


def groups(*columns: IntArray) -> IntArray:
    """The same number, counted from 0, for events that are equal in all columns.

    Sorting numbers column by column is several times as fast as sorting rows.
    """
    group = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if len(column) and np.min(column) != np.max(column):
            values, codes = np.unique(column, return_inverse=True)
            group = np.unique(group * len(values) + codes, return_inverse=True)[1]
    return group


def numbered(number: Callable[..., int], *columns: IntArray) -> IntArray:
    """`number` of each event's values in all columns, called once for equal events."""
    group = groups(*columns)
    some = np.unique(group, return_index=True)[1]  # an event of each group
    rows = zip(*(column[some].tolist() for column in columns), strict=True)
    return np.array([number(*row) for row in rows], np.int64)[group]


def spans(
    keys: IntArray, count: int, starts: IntArray, ends: IntArray
) -> tuple[IntArray, IntArray]:
    """The first start and the last end of the events of each key.

    Args:
        keys: each event's key, below `count`.
        count: number of keys; those without events start after they end.
        starts: starts of the events.
        ends: ends of the events.
    """
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(first, keys, starts)
    np.maximum.at(last, keys, ends)
    return first, last


def by_start(programs: Sequence[Program], starts: IntArray, ends: IntArray) -> Executions:
    """Sorts executions, given in any order, by start."""
    order = np.argsort(starts, kind="stable")
    return Executions(
        programs=tuple(programs[i] for i in order), starts=starts[order], ends=ends[order]
    )
