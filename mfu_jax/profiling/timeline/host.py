"""The host's side of a trace: the steps marked by a loop, and what its thread did meanwhile.

In a loop that marks no steps, the calls of the step's program take the place of marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mfu_jax.profiling.timeline.time_attribution import FloatArray, Intervals, parents_of
from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.profiling.trace.xspace import ABSENT, XLine, XPlane

PLANE = "/host:CPU"
_STEP = "step_num"
_PYTHON = "$"  # begins the names of Python's functions
# Recording a call takes 0.2 to 0.35 µs (CPython 3.11 on Intel Xeon): most of the time between calls
# where Python makes many. A larger median is Python's own work.
_MOST_PER_CALL = 350_000  # picoseconds
_TRANSFERS = "H2D Dispatch"
_CALL = re.compile(r"^PjitFunction\((.*)\)$")  # of jax.jit; of a compiled step, with `jit(…)`


@dataclass(frozen=True, kw_only=True)
class HostThread:
    """The thread that calls the steps.

    Attributes:
        step_numbers: numbers of the steps it marked (`jax.profiler.StepTraceAnnotation`), or those
            of its calls, counted from 0.
        step_starts: picoseconds; a mark spans the call, which returns before the device is done.
        step_ends: the same.
        names: table of what else it did.
        ops: each event's index in `names`.
        starts: starts of the events, picoseconds.
        ends: the same.
    """

    step_numbers: IntArray
    step_starts: IntArray
    step_ends: IntArray
    names: tuple[str, ...]
    ops: IntArray
    starts: IntArray
    ends: IntArray

    @cached_property
    def parents(self) -> IntArray:
        """As returned by `parents_of`."""
        return parents_of(np.zeros(len(self.starts), np.int64), self.starts, self.ends)

    @cached_property
    def is_python(self) -> npt.NDArray[np.bool_]:
        """Whether each event is a call of a Python function, built in or not."""
        return np.array([name.startswith(_PYTHON) for name in self.names], bool)[self.ops]

    @cached_property
    def per_call(self) -> float:
        """Picoseconds that recording a Python call takes: at most the median time between calls."""
        calls = self._python_calls
        return min(float(np.median(np.diff(calls))), _MOST_PER_CALL) if len(calls) > 1 else 0.0

    def recording(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """Picoseconds of each interval that recording the Python calls that begin in it takes."""
        until = np.searchsorted(self._python_calls, np.stack([starts, ends]))
        taken = self.per_call * np.maximum(until[1] - until[0], 0)
        return np.minimum(taken, np.maximum(ends - starts, 0)).astype(np.float64)

    @cached_property
    def _python_calls(self) -> IntArray:
        return np.sort(self.starts[self.is_python])


class HostThreads:
    """The threads of one host of a trace.

    Args:
        plane: the host's plane; None if the trace has none.
    """

    def __init__(self, plane: XPlane | None) -> None:
        self._plane = plane
        self._callers: dict[str, HostThread | None] = {}

    def thread(self, module: str) -> HostThread | None:
        """The thread that marked the most steps; without marks, the one that called a program most.

        Args:
            module: the name of the step's program.
        """
        if self.marking is not None:
            return self.marking
        if module not in self._callers:
            self._callers[module] = self._caller(module)
        return self._callers[module]

    def called(self, names: Set[str]) -> Iterator[tuple[str, int, int, int]]:
        """Events of any thread with one of these names: the name, the thread, start and end."""
        about = {} if self._plane is None else self._plane.metadata
        inner = {key: event.name.rpartition("/")[2] for key, event in about.items()}
        kinds = {key: name for key, name in inner.items() if name in names}
        for number, line in enumerate(self._lines if kinds else ()):
            events = line.events()
            for event in np.flatnonzero(np.isin(events.metadata, list(kinds))).tolist():
                name = kinds[int(events.metadata[event])]
                yield name, number, int(events.starts[event]), int(events.ends[event])

    @cached_property
    def transfers(self) -> Intervals:
        """When a thread of the runtime transfers an array of the host's to a device."""
        found = sorted(event[2:] for event in self.called({_TRANSFERS}))
        starts, ends = np.array(found, np.int64).reshape(-1, 2).T
        return starts, ends

    @cached_property
    def marking(self) -> HostThread | None:
        """The thread that marked the most steps; None if none did."""
        if self._plane is None or _STEP not in self._plane.stat_names.values():
            return None
        marked = [(int((_numbers(line) != ABSENT).sum()), line) for line in self._lines]
        most, line = max(marked, key=lambda found: found[0], default=(0, None))
        if not most or line is None:
            return None
        numbers = _numbers(line)
        chosen = np.flatnonzero(numbers != ABSENT)
        return _thread(line, chosen, numbers[chosen])

    @property
    def _lines(self) -> list[XLine]:
        return [] if self._plane is None else [line for line in self._plane.lines if len(line)]

    def _caller(self, module: str) -> HostThread | None:
        about = {} if self._plane is None else self._plane.metadata
        kinds = [key for key, event in about.items() if _calls(event.name, module)]
        calls = [(line, _outermost(line, kinds)) for line in self._lines] if kinds else []
        if not calls:
            return None
        line, chosen = max(calls, key=lambda found: len(found[1]))
        return _thread(line, chosen, np.arange(len(chosen))) if len(chosen) else None


def _numbers(line: XLine) -> IntArray:
    return line.events((_STEP,)).numbers[_STEP]


def _calls(name: str, module: str) -> bool:
    """Whether an event of this name is a call of a program.

    >>> _calls("PjitFunction(step)", "jit_step"), _calls("PjitFunction(jit(step))", "jit_step")
    (True, True)
    >>> _calls("PjitFunction(<lambda>)", "jit__lambda"), _calls("PjitFunction(add)", "jit_step")
    (True, False)
    """
    called = _CALL.match(name)
    names = (called[1], f"jit({called[1]})") if called else ()
    return _plain(module) in map(_plain, names)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "_", name).strip("_")


def _outermost(line: XLine, kinds: list[int]) -> IntArray:
    """The events of these kinds that are not within another, by start."""
    events = line.events()
    chosen = np.flatnonzero(np.isin(events.metadata, kinds))
    chosen = chosen[np.lexsort((-events.ends[chosen], events.starts[chosen]))]
    before = np.maximum.accumulate(events.ends[chosen])
    is_outer = np.ones(len(chosen), bool)
    is_outer[1:] = events.starts[chosen][1:] >= before[:-1]
    return chosen[is_outer]


def _thread(line: XLine, marks: IntArray, numbers: IntArray) -> HostThread:
    """A thread with its steps.

    Args:
        line: the thread.
        marks: indices of the events that mark steps.
        numbers: the steps' numbers.
    """
    events = line.events()
    order = np.argsort(events.starts[marks], kind="stable")
    kinds, ops = np.unique(events.metadata, return_inverse=True)
    return HostThread(
        step_numbers=numbers[order],
        step_starts=events.starts[marks][order],
        step_ends=events.ends[marks][order],
        names=tuple(line.plane.about(kind).name for kind in kinds.tolist()),
        ops=ops,
        starts=events.starts,
        ends=events.ends,
    )
