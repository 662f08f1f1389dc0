"""The timeline of one device: its ops, and the executions of programs that they belong to."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mfu_jax.profiling.trace.wire import Integers
from mfu_jax.profiling.trace.xspace import ABSENT


class Program(NamedTuple):
    """A program as a trace names it; `number` is `ABSENT` where the trace has none."""

    module: str
    number: int = ABSENT


class OpName(NamedTuple):
    """An instruction as a trace names it.

    Attributes:
        program: whose it is.
        name: of the instruction; of the kernel where `is_kernel`.
        is_kernel: the trace names no instruction.
    """

    program: Program
    name: str
    is_kernel: bool = False


@dataclass(frozen=True, kw_only=True)
class Executions:
    """Runs of programs on one device, by their start.

    Attributes:
        programs: which program each of them ran.
        starts: picoseconds.
        ends: the same.
    """

    programs: tuple[Program, ...]
    starts: Integers
    ends: Integers

    def of(self, programs: Set[Program]) -> Executions:
        """Those of some programs."""
        chosen = np.array([p in programs for p in self.programs], bool)
        return Executions(
            programs=tuple(p for p in self.programs if p in programs),
            starts=self.starts[chosen],
            ends=self.ends[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What one device did.

    Attributes:
        device: such as ``TPU:0``, with its host where there are several.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        kind: as JAX names the device; empty if the trace does not say.
        about: then, what else it says of the device.
        names: table of ops.
        ops: of each event, the index in `names`.
        lanes: of each event, its thread, stream or line; events of one lane are nested.
        starts: picoseconds.
        ends: the same.
        executions: of programs.
        beside: lanes that show what is under way beside the others; their events take no time from
            those.
    """

    device: str
    platform: str
    kind: str
    names: tuple[OpName, ...]
    ops: Integers
    lanes: Integers
    starts: Integers
    ends: Integers
    executions: Executions
    beside: frozenset[int] = frozenset()
    about: str = ""


Lane = tuple[Integers, Integers, Integers]
"""Of each event of one lane: the number of its op, its start and its end."""


class Events(NamedTuple):
    """The events of all lanes, as a `Timeline` has them."""

    ops: Integers
    lanes: Integers
    starts: Integers
    ends: Integers

    @classmethod
    def of(cls, lanes: Sequence[Lane]) -> Events:
        """Those of several lanes."""
        ops, starts, ends = map(np.concatenate, zip(*lanes, strict=True))
        numbers = np.repeat(np.arange(len(lanes)), [len(lane[0]) for lane in lanes])
        return cls(ops, numbers, starts, ends)


class OpTable:
    """Gives every op a number."""

    def __init__(self) -> None:
        self._numbers: dict[OpName, int] = {}

    def number(self, name: OpName) -> int:
        """The number of an op."""
        return self._numbers.setdefault(name, len(self._numbers))

    @property
    def names(self) -> tuple[OpName, ...]:
        """The ops by number."""
        return tuple(self._numbers)


def executions_of(
    keys: Integers, programs: list[Program], starts: Integers, ends: Integers
) -> Executions:
    """Executions from the ops that belong to them.

    Args:
        keys: of each op, the index of its execution in `programs`.
        programs: that the executions ran.
        starts: of the ops.
        ends: the same.
    """
    first = np.full(len(programs), np.iinfo(np.int64).max)
    last = np.full(len(programs), np.iinfo(np.int64).min)
    np.minimum.at(first, keys, starts)
    np.maximum.at(last, keys, ends)
    return by_start(programs, first, last)


def by_start(programs: Sequence[Program], starts: Integers, ends: Integers) -> Executions:
    """Executions in any order, sorted."""
    order = np.argsort(starts, kind="stable")
    return Executions(
        programs=tuple(programs[i] for i in order), starts=starts[order], ends=ends[order]
    )
