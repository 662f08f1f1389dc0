"""What the thread that calls the steps did: each event's kind of work, by its name and callers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mfu_jax.host_work import HostWork
from mfu_jax.profiling.timeline.devices import Executions
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import NO_PARENT, Intervals, without_inner
from mfu_jax.profiling.trace.wire import IntArray
from mfu_jax.util.yaml_files import read_mapping

_TABLE: Mapping[str, Any] = read_mapping(Path(__file__).with_name("host_work.yml"))


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


_COMPILED = {HostWork[kind.upper()]: _any_of(found) for kind, found in _TABLE["kinds"].items()}
# Idle time goes to the first kind that explains it.
KINDS = (*_COMPILED, HostWork.PYTHON)
SLEEPS = _any_of(_TABLE["sleeps"])
_SAVES, _NUMPY = _any_of(_TABLE["saves"]), _any_of(_TABLE["numpy"])
_OF_JAX, _OF_LOGGER = _any_of(_TABLE["of_jax"]), _any_of(_TABLE["of_logger"])
# NumPy reads a CPU array's memory without a call that the trace names. What calls it is long for a
# step, calls nothing else, and ends with an execution each time.
_LONG = 0.02  # of a step
_ALONE = 0.8  # of the event: without what it calls
_AT_ONCE = 500_000_000  # picoseconds between the two ends
_USUALLY = 0.5  # of the function's long events
_LATE = 0.25  # of the event
_WEAK = (HostWork.DISPATCH, HostWork.PYTHON)  # work within them may be of another kind


def kind_of(name: str) -> HostWork:
    """The kind of work of an event with this name; `PYTHON` is everything else.

    >>> kind_of("$array.py:615 _value"), kind_of("$train.py:80 log")
    (<HostWork.WAIT: 'wait'>, <HostWork.PYTHON: 'python'>)
    >>> kind_of("$config.py:9 _validate_default_device"), kind_of("$loop.py:7 validate_model")
    (<HostWork.PYTHON: 'python'>, <HostWork.EVALUATION: 'evaluation'>)
    """
    found = (kind for kind, pattern in _COMPILED.items() if pattern.search(name))
    return next(found, HostWork.PYTHON)


def in_words(name: str) -> str:
    """An event's name, or what it is if it is the step logger's.

    >>> in_words("$readiness.py:155 block_until_ready"), in_words("$train.py:80 log")
    ('waiting for the previous step', '$train.py:80 log')
    """
    return "waiting for the previous step" if _OF_LOGGER.match(name) else name


def waits_of(thread: HostThread, executions: Executions) -> Intervals:
    """When the thread waits for the device, for whatever purpose."""
    kinds = np.array([kind_of(name) is HostWork.WAIT for name in thread.names], bool)
    chosen = kinds[thread.ops] | _unnamed_waits(thread, executions)
    return thread.starts[chosen], thread.ends[chosen]


def _unnamed_waits(thread: HostThread, executions: Executions) -> npt.NDArray[np.bool_]:
    """Which Python functions are waits by when they end, as NumPy's reading a result is."""
    lengths, steps = thread.ends - thread.starts, np.diff(thread.step_starts)
    found = np.zeros(len(lengths), bool)
    if not len(steps) or not len(executions.ends):
        return found
    kinds = [kind_of(name) is HostWork.PYTHON for name in thread.names]
    is_long = np.array(kinds, bool)[thread.ops] & thread.is_python & ~named(thread, SLEEPS)
    own = without_inner(lengths.astype(np.float64), thread.parents)
    long = np.flatnonzero(is_long & (lengths > _LONG * np.median(steps)) & (own > _ALONE * lengths))
    ends, slack = thread.ends[long], np.minimum(_AT_ONCE, lengths[long] // 2)
    late = np.where(named(thread, _NUMPY)[long], _LATE * lengths[long], 0).astype(np.int64)
    done = np.append(np.sort(executions.ends), np.iinfo(np.int64).max)
    at_once = done[np.searchsorted(done, ends - np.maximum(slack, late))] <= ends + slack
    functions, count = thread.ops[long], len(thread.names)
    often = np.bincount(functions[at_once], minlength=count)
    is_usual = often > _USUALLY * np.bincount(functions, minlength=count)
    found[long[at_once & is_usual[functions]]] = True
    return found


def named(thread: HostThread, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Which events have a name that the pattern finds."""
    return np.array([bool(pattern.search(name)) for name in thread.names], bool)[thread.ops]


@dataclass(frozen=True, kw_only=True)
class ClassifiedEvents:
    """The events of a thread.

    Attributes:
        kinds: each event's index in `KINDS`.
        is_first: whether an event's kind is its own, not inherited.
        names: each event's index in `table`.
        table: kind, name and caller of what an event belongs to.
    """

    kinds: IntArray
    is_first: npt.NDArray[np.bool_]
    names: IntArray
    table: tuple[tuple[HostWork, str, str], ...]

    @classmethod
    def of(cls, thread: HostThread, executions: Executions) -> ClassifiedEvents:
        """Classifies the events of a thread, beside the executions of a device that it calls."""
        count = len(thread.starts)
        table_kinds = [kind_of(name) for name in thread.names]
        own_kinds = [table_kinds[op] for op in thread.ops.tolist()]
        for event in np.flatnonzero(_unnamed_waits(thread, executions)).tolist():
            own_kinds[event] = HostWork.WAIT
        kinds, roots = _inherited(thread, own_kinds)
        table: dict[tuple[HostWork, str, str], int] = {}
        callers = _callers(thread)
        ops, names = thread.ops.tolist(), []
        for event, (kind, root) in enumerate(zip(kinds, roots, strict=True)):
            named = event if kind is HostWork.PYTHON else root
            key = (kind, thread.names[ops[named]], callers[named])
            names.append(table.setdefault(key, len(table)))
        return cls(
            kinds=np.array([KINDS.index(kind) for kind in kinds], np.int64),
            is_first=np.array(roots, np.int64) == np.arange(count),
            names=np.array(names, np.int64),
            table=tuple(table),
        )


def _callers(thread: HostThread) -> list[str]:
    """Each event's innermost enclosing Python function that is not JAX's."""
    is_users = [not _OF_JAX.match(name) for name in thread.names]
    ops, outer_of = thread.ops.tolist(), thread.parents.tolist()
    callers = [""] * len(ops)
    for event in np.lexsort((-thread.ends, thread.starts)).tolist():
        outer = outer_of[event]
        if outer != NO_PARENT:
            op = ops[outer]
            callers[event] = thread.names[op] if is_users[op] else callers[outer]
    return callers


def _inherited(thread: HostThread, own_kinds: list[HostWork]) -> tuple[list[HostWork], list[int]]:
    """Each event's kind, and the event that gives it: the outermost one with a clear kind."""
    within = np.searchsorted(thread.step_starts, thread.ends)
    holds_steps = (within > np.searchsorted(thread.step_starts, thread.starts, "right")).tolist()
    outer_of = thread.parents.tolist()
    is_saving = named(thread, _SAVES).tolist()
    kinds = [HostWork.PYTHON] * len(own_kinds)
    roots = list(range(len(own_kinds)))
    for event in np.lexsort((-thread.ends, thread.starts)).tolist():
        outer = outer_of[event]
        own = HostWork.PYTHON if holds_steps[event] else own_kinds[event]
        if outer != NO_PARENT:
            is_saving[event] |= is_saving[outer]
        if outer == NO_PARENT or (
            kinds[outer] in _WEAK
            and own not in (HostWork.PYTHON, kinds[outer])
            and not is_saving[event]
        ):
            kinds[event] = own
        else:
            kinds[event], roots[event] = kinds[outer], roots[outer]
    return kinds, roots
