"""What the thread that calls the steps did: waiting, compiling, data, evaluation, dispatch."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mfu_jax.profiling.attribution.dispatch_gaps import DispatchGaps, Intervals
from mfu_jax.profiling.timeline.devices import Executions
from mfu_jax.profiling.timeline.host import HostThread
from mfu_jax.profiling.timeline.time_attribution import NO_PARENT, FloatArray
from mfu_jax.profiling.trace.wire import IntArray

_PICOSECONDS = 1e12


class HostWork(Enum):
    """A kind of work of the host's thread; idle time goes to the first kind that explains it."""

    COMPILE = "tracing and compiling"
    EVALUATION = "evaluation"
    WAIT = "waiting for the device"
    DATA = "making or waiting for data"
    DISPATCH = "calling programs"
    OTHER = "everything else"


class HostTime(NamedTuple):
    """Time of one kind of work.

    Attributes:
        seconds: per step; for calls, without the programs that the device runs within them.
        idle: the part between the end of a step on the device and the call of the next one; for
            waiting, from its start until that call.
        times: how often per step; waits only if they leave the device idle.
        steps: number of measured steps in which it occurred.
        name: what took most of it, as named in the trace; of waits, what left the device idle.
        caller: the function that most of it was called from; empty if the trace does not say.
    """

    seconds: float
    idle: float
    times: float
    steps: int
    name: str
    caller: str


# Names are `$file.py:12 function` for Python; others are the runtime's. The first match decides.
_KINDS = (
    (
        HostWork.COMPILE,
        re.compile(
            r"backend_compile|compile_or_get_cached|\b_?cached_compilation|_resolve_and_lower"
            r"|lower_sharding_computation|lower_jaxpr|trace_to_jaxpr|_trace_for_jit|_pjit_lower"
            r"|_create_pjit_jaxpr|Client::Compile"
        ),
    ),
    (
        HostWork.EVALUATION,  # not `validate_arguments`
        re.compile(
            r"\$.* _?(run_)?((eval|evaluate)\w*"
            r"|(validate|validation)(_(step|epoch|loop|model|batch|set|fn)\w*)?)$"
        ),
    ),
    (
        HostWork.WAIT,
        re.compile(
            r"\$array\.py:\d+ (_value|item|tolist|__(float|int|bool|array|index|complex)__)$"
            r"|^np\.asarray\(jax\.Array\)|block_until_ready|BlockHostUntilReady|effects_barrier"
            r"|\$api\.py:\d+ (device_get|_device_get)$"
        ),
    ),
    (
        HostWork.DATA,
        re.compile(
            r"\$.* (__next__|next|_?(next|get|load|make|read|fetch)_?(batch|data|example)\w*"
            r"|\w*(data_?load|tokeniz)\w*|\w*(batches|examples|samples|stream)|(\w+_)?gen(erator)?)$"
            r"|\$[^ ]*(dataset|data_?loader|loader|input_pipeline)\w*\.py:\d+ "
        ),
    ),
    (HostWork.DISPATCH, re.compile(r"^PjitFunction\(|^ParallelFor|ExecuteHelper|LoadedExecutable")),
)
# Uses no core.
_SLEEPS = re.compile(r"^\$(time sleep|select \w+|_queue\.\w+ get|.*(lock|Lock|RLock) acquire)$")
_SAVES = re.compile(r"^\$.* _?(save|checkpoint)\w*$")  # what it waits for is its own
# NumPy reads a CPU array's memory without a call that the trace names. What calls it is long for a
# step, calls nothing else, and ends with an execution each time.
_LONG = 0.02  # of a step
_ALONE = 0.8  # of the event: without what it calls
_AT_ONCE = 500_000_000  # picoseconds between the two ends
_USUALLY = 0.5  # of the function's long events
# NumPy's own functions hardly take long but for this, so they may also wake up late on a busy host.
_NUMPY = re.compile(r"^\$numpy \w+$")
_LATE = 0.25  # of the event
_WORK = tuple(HostWork)
_WEAK = (HostWork.DISPATCH, HostWork.OTHER)  # work within them may be of another kind


def kind_of(name: str) -> HostWork:
    """The kind of work of an event with this name.

    >>> kind_of("$array.py:615 _value"), kind_of("$train.py:80 log")
    (<HostWork.WAIT: 'waiting for the device'>, <HostWork.OTHER: 'everything else'>)
    >>> kind_of("$config.py:9 _validate_default_device"), kind_of("$loop.py:7 validate_model")
    (<HostWork.OTHER: 'everything else'>, <HostWork.EVALUATION: 'evaluation'>)
    """
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), HostWork.OTHER)


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
    kinds = [kind_of(name) is HostWork.OTHER for name in thread.names]
    is_long = np.array(kinds, bool)[thread.ops] & thread.is_python & ~_named(thread, _SLEEPS)
    own = _without_inner(lengths.astype(np.float64), thread.parents)
    long = np.flatnonzero(is_long & (lengths > _LONG * np.median(steps)) & (own > _ALONE * lengths))
    ends, slack = thread.ends[long], np.minimum(_AT_ONCE, lengths[long] // 2)
    late = np.where(_named(thread, _NUMPY)[long], _LATE * lengths[long], 0).astype(np.int64)
    done = np.append(np.sort(executions.ends), np.iinfo(np.int64).max)
    at_once = done[np.searchsorted(done, ends - np.maximum(slack, late))] <= ends + slack
    functions, count = thread.ops[long], len(thread.names)
    often = np.bincount(functions[at_once], minlength=count)
    is_usual = often > _USUALLY * np.bincount(functions, minlength=count)
    found[long[at_once & is_usual[functions]]] = True
    return found


def _named(thread: HostThread, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    return np.array([bool(pattern.search(name)) for name in thread.names], bool)[thread.ops]


class HostSums:
    """Adds up what the threads of several devices did."""

    def __init__(self) -> None:
        self._late = self._recording = self._asleep = 0.0
        self._sums = np.zeros((3, len(_WORK)))
        self._steps = np.zeros(len(_WORK), np.int64)
        self._names: dict[tuple[HostWork, str, str], float] = defaultdict(float)
        self._threads: dict[int, _ClassifiedEvents] = {}

    def add(
        self,
        thread: HostThread,
        late: DispatchGaps,
        executions: Executions,
        bounds: IntArray,
        scale: float,
    ) -> None:
        """Adds one device's thread.

        Args:
            thread: the thread that calls the device's steps.
            late: its intervals from the end of a step to the call of the next one.
            executions: executions of all programs on the device.
            bounds: start of each measured step, and end of the last one, picoseconds.
            scale: seconds per step for one picosecond of the trace.
        """
        begin, end = int(bounds[0]), int(bounds[-1])
        self._recording += float(thread.recording(bounds[:1], bounds[-1:])[0]) * scale
        self._late += float(late.idle_within(*np.array([[begin], [end]]))[0]) * scale
        if id(thread) not in self._threads:
            self._threads[id(thread)] = _ClassifiedEvents.of(thread, executions)
        events = self._threads[id(thread)]
        first, last = np.clip(thread.starts, begin, end), np.clip(thread.ends, begin, end)
        own = _without_inner((last - first).astype(np.float64), events.parents)
        is_call = events.is_first & (events.kinds == _WORK.index(HostWork.DISPATCH))
        own -= np.where(thread.is_python, np.minimum(own, thread.per_call), 0.0)
        own = (own - np.where(is_call, _executing(executions, first, last), 0.0)) * scale
        idle = _without_inner(late.idle_within(thread.starts, thread.ends), events.parents) * scale
        self._asleep += float(idle[_named(thread, _SLEEPS)].sum())
        is_wait = events.kinds == _WORK.index(HostWork.WAIT)
        stalls = np.where(events.is_first, _stalls(thread, late) * scale, 0.0)
        idle = np.where(is_wait, stalls, idle)
        step = np.searchsorted(bounds, thread.starts, "right") - 1
        starts = events.is_first & (step >= 0) & (thread.starts < end)
        starts &= ~is_wait | (stalls > 0)
        for row, column in enumerate((own, idle, starts * scale * _PICOSECONDS)):
            self._sums[row] += np.bincount(events.kinds, column, len(_WORK))
        occurred = np.unique(np.stack([events.kinds[starts], step[starts]]), axis=1)
        self._steps = np.maximum(self._steps, np.bincount(occurred[0], minlength=len(_WORK)))
        seconds = np.bincount(events.names, np.where(is_wait, stalls, own), len(events.table))
        for name, of_name in zip(events.table, seconds.tolist(), strict=True):
            self._names[name] += of_name

    def late(self, devices: int) -> float:
        """Idle seconds per step because of late calls, as the mean over devices."""
        return self._late / devices

    def asleep(self, devices: int) -> float:
        """The part of `late` in which the host sleeps or waits for others, and uses no core."""
        return self._asleep / devices

    def recording(self, devices: int) -> float:
        """Seconds per step that recording Python's calls takes, as the mean over devices."""
        return self._recording / devices

    def mean(self, devices: int) -> dict[HostWork, HostTime]:
        """Times by kind of work, as the mean over devices."""
        means = {}
        numbers = zip(_WORK, self._sums.T.tolist(), self._steps.tolist(), strict=True)
        for kind, sums, steps in numbers:
            names = {name: own for name, own in self._names.items() if name[0] is kind}
            if names:
                _, name, caller = max(names, key=lambda key: names[key])
                seconds, idle, times = (total / devices for total in sums)
                means[kind] = HostTime(seconds, idle, times, steps, name, caller)
        return means


@dataclass(frozen=True, kw_only=True)
class _ClassifiedEvents:
    """The events of a thread.

    Attributes:
        parents: as returned by `parents_of`.
        kinds: each event's index in `_WORK`.
        is_first: whether an event's kind is its own, not inherited.
        names: each event's index in `table`.
        table: kind, name and caller of what an event belongs to.
    """

    parents: IntArray
    kinds: IntArray
    is_first: npt.NDArray[np.bool_]
    names: IntArray
    table: tuple[tuple[HostWork, str, str], ...]

    @classmethod
    def of(cls, thread: HostThread, executions: Executions) -> _ClassifiedEvents:
        count = len(thread.starts)
        parents = thread.parents
        table_kinds = [kind_of(name) for name in thread.names]
        own_kinds = [table_kinds[op] for op in thread.ops.tolist()]
        for event in np.flatnonzero(_unnamed_waits(thread, executions)).tolist():
            own_kinds[event] = HostWork.WAIT
        kinds, roots = _inherited(thread, parents, own_kinds)
        table: dict[tuple[HostWork, str, str], int] = {}
        callers = _callers(thread, parents)
        ops, names = thread.ops.tolist(), []
        for event, (kind, root) in enumerate(zip(kinds, roots, strict=True)):
            named = event if kind is HostWork.OTHER else root
            key = (kind, thread.names[ops[named]], callers[named])
            names.append(table.setdefault(key, len(table)))
        return cls(
            parents=parents,
            kinds=np.array([_WORK.index(kind) for kind in kinds], np.int64),
            is_first=np.array(roots, np.int64) == np.arange(count),
            names=np.array(names, np.int64),
            table=tuple(table),
        )


def _stalls(thread: HostThread, late: DispatchGaps) -> FloatArray:
    """Each event's idle time as a wait: from its start until the next step is called, at most its
    length; 0 if the device has another step to run when it ends."""
    idle = late.idle_within(thread.starts, late.next_step(thread.ends))
    return np.minimum(idle, (thread.ends - thread.starts).astype(np.float64))


def _executing(executions: Executions, starts: IntArray, ends: IntArray) -> FloatArray:
    """How long the device runs executions that begin and end within each interval.

    The host's thread waits for them there: a CPU's runtime runs programs on several devices, and
    programs with callbacks, within their call.
    """
    done = np.maximum.accumulate(executions.ends)
    begins = np.maximum(executions.starts, np.append(0, done[:-1]))  # overlaps count once
    until = np.append(0, np.cumsum(np.maximum(done - begins, 0)))
    first = np.searchsorted(executions.starts, starts)
    last = np.maximum(first, np.searchsorted(done, ends, "right"))
    return (until[last] - until[first]).astype(np.float64)


def _callers(thread: HostThread, parents: IntArray) -> list[str]:
    """Each event's innermost enclosing Python function that is not JAX's."""
    is_users = [not _OF_JAX.match(name) for name in thread.names]
    ops, outer_of = thread.ops.tolist(), parents.tolist()
    callers = [""] * len(ops)
    for event in np.lexsort((-thread.ends, thread.starts)).tolist():
        outer = outer_of[event]
        if outer != NO_PARENT:
            op = ops[outer]
            callers[event] = thread.names[op] if is_users[op] else callers[outer]
    return callers


_OF_JAX = re.compile(
    r"^\$(array|array_methods|basearray|api|profiler|traceback_util|pjit|compiler|pxla|contextlib"
    r"|dispatch|interpreters)\.py|^\$core\.py:\d+ concrete_or_error|^\$(?!.*\.py:)|^[^$]"
)


def _inherited(
    thread: HostThread, parents: IntArray, own_kinds: list[HostWork]
) -> tuple[list[HostWork], list[int]]:
    """Each event's kind, and the event that gives it: the outermost one with a clear kind."""
    within = np.searchsorted(thread.step_starts, thread.ends)
    holds_steps = (within > np.searchsorted(thread.step_starts, thread.starts, "right")).tolist()
    outer_of = parents.tolist()
    is_saving = _named(thread, _SAVES).tolist()
    kinds = [HostWork.OTHER] * len(own_kinds)
    roots = list(range(len(own_kinds)))
    for event in np.lexsort((-thread.ends, thread.starts)).tolist():
        outer = outer_of[event]
        own = HostWork.OTHER if holds_steps[event] else own_kinds[event]
        if outer != NO_PARENT:
            is_saving[event] |= is_saving[outer]
        if outer == NO_PARENT or (
            kinds[outer] in _WEAK
            and own not in (HostWork.OTHER, kinds[outer])
            and not is_saving[event]
        ):
            kinds[event] = own
        else:
            kinds[event], roots[event] = kinds[outer], roots[outer]
    return kinds, roots


def _without_inner(lengths: FloatArray, parents: IntArray) -> FloatArray:
    """Each event's length without the events directly within it."""
    inner = np.flatnonzero(parents != NO_PARENT)
    own = lengths.copy()
    np.subtract.at(own, parents[inner], lengths[inner])
    return own
