"""One step on its way from the training thread to the records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.timing.compile_events import CompileEvent

Reading: TypeAlias = tuple[float, float]
"""Both clocks at one moment, in seconds: wall, monotonic. A bare tuple, because one is made every
step, when the caches hold the device's data and each Python call costs microseconds.
"""

NOTHING: Mapping[str, Any] = MappingProxyType({})

# Slewed clocks drift by at most 500 ppm (NTP); anything more is a jump, not the step's time.
JUMP_SECONDS = 1e-3
JUMP_FRACTION = 1e-3


class LoopTimes(NamedTuple):
    """What the training thread did from the end of one `record` to the end of the next, in seconds.

    This interval belongs to the step in flight, which ends with it; or, if that step already ended
    during a wait, to the step just dispatched.

    Attributes:
        seconds: until the loop came back with the next step dispatched.
        wait_seconds: part of `seconds` in declared waits, whether the device was busy or not.
        call_seconds: part of `seconds` in the call of an instrumented step; 0 if not known.
        slack_seconds: from then until the step before ended: the host's lead over the device.
        gc_seconds: part of the whole interval in Python's garbage collector, on any thread.
    """

    seconds: float
    wait_seconds: float
    call_seconds: float
    slack_seconds: float
    gc_seconds: float


class TimedStep:
    """One step on its way through the timer; its metrics are still device arrays.

    One is made every step, so defaults live on the class, most are never set, and there is no
    ``__init__``: set `step` and `metrics`. The training thread only stores `readings`; `measure`
    computes the times from them.

    Attributes:
        step: its number; of several that one call ran, the last one's.
        steps: how many these are.
        metrics: what `record` was given.
        seconds: measured step time.
        ended_at: wall clock at its end, seconds since 1970.
        ended_monotonic: monotonic clock at its end.
        spans: seconds around it not attributed to any step, by name (``eval``, ``data_wait``, …).
        compile_events: what was compiled to dispatch it.
        is_compile: its time cannot be separated from that of a compilation.
        clock_jump_seconds: how far the wall clock jumped during its interval, else None.
        overhead_seconds: time that the logger spent on it on the training thread.
        completed: both clocks when its outputs became ready, if observed.
        is_last: no step comes after it in this run, as may be before a checkpoint.
        watched: the watcher was asked to set `completed`.
        seen: both clocks when the watcher began to wait for its outputs, and when they were ready.
        extra: scalars of the same step that came later, such as those of an eval.
        cost: the cost passed to `record`, if it differs from that of the run; then, its cost.
        loop: what the training thread did in its interval, as bare `LoopTimes`; None around a
            pause.
        readings: both clocks at its start and end.
    """

    step: int
    metrics: Mapping[str, Any]
    steps: int = 1
    seconds: float = 0.0
    ended_at: float = 0.0
    ended_monotonic: float = 0.0
    spans: Mapping[str, float] = NOTHING
    compile_events: Sequence[CompileEvent] = ()
    is_compile: bool = False
    clock_jump_seconds: float | None = None
    overhead_seconds: float = 0.0
    completed: Reading | None = None
    is_last: bool = False
    watched: bool = False
    seen: tuple[Reading, Reading] | None = None
    extra: Mapping[str, Any] = NOTHING
    cost: StepCost | Callable[[], StepCost] | None = None
    loop: tuple[float, float, float, float, float] | None = None
    readings: tuple[Reading, Reading] | None = None

    def see(self, begun: Reading, ready: Reading) -> None:
        """Called by the watcher once it has waited for the outputs."""
        self.seen = self.seen or (begun, ready)
        if self.watched:
            self.completed = self.completed or ready

    def measure(self) -> None:
        """Computes its times from the readings, once."""
        if self.readings is None:
            return
        (begin, end), self.readings = self.readings, None
        seconds, monotonic_seconds = end[0] - begin[0], end[1] - begin[1]
        jump, slewed = seconds - monotonic_seconds, JUMP_FRACTION * monotonic_seconds
        if abs(jump) > slewed:
            # A thread may lose its turn between the two clocks for longer than a short step takes:
            # by the wall clock, a step that another thread saw end may have ended before it began.
            seconds = monotonic_seconds
        if abs(jump) > JUMP_SECONDS + slewed:
            self.clock_jump_seconds = jump
        self.seconds = seconds
        self.ended_at, self.ended_monotonic = end

    @property
    def wait_seconds(self) -> float:
        """Seconds before it in declared waits, with the device idle."""
        if not self.spans:
            return 0.0
        return sum(seconds for name, seconds in self.spans.items() if name.endswith("_wait"))

    def parts(self) -> list[TimedStep]:
        """The steps of one call, each with its share of the time, the cost and the metrics.

        A compilation is in the time of the first.
        """
        self.measure()
        compiling = sum(e.own_seconds for e in self.compile_events) if self.is_compile else 0.0
        each = max(0.0, self.seconds - compiling) / self.steps
        cost = None if self.cost is None else functools.cache(self._cost_of_each)
        found = []
        for number in range(self.steps):
            after = self.steps - 1 - number
            one = TimedStep()
            vars(one).update(vars(self), steps=1, step=self.step - after, cost=cost)
            one.seconds = each if number else self.seconds - each * (self.steps - 1)
            one.ended_at -= after * each
            one.ended_monotonic -= after * each
            one.overhead_seconds /= self.steps
            one.metrics = _of_one(self.metrics, number, self.steps)
            if self.loop is not None:
                one.loop = LoopTimes._make(seconds / self.steps for seconds in self.loop)
            if number:
                one.spans, one.compile_events = NOTHING, ()
                one.clock_jump_seconds = None
            if after:
                one.extra, one.is_last = NOTHING, False
            found.append(one)
        return found

    def _cost_of_each(self) -> StepCost:
        cost = self.cost() if callable(self.cost) else self.cost
        return cost.over(self.steps)  # type: ignore[union-attr]


def _of_one(metrics: Mapping[str, Any], number: int, steps: int) -> dict[str, Any]:
    """A metric with an entry for each of several steps has this step's; others are all theirs."""

    def pick(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _of_one(value, number, steps)
        is_stacked = getattr(value, "shape", ())[:1] == (steps,)
        return (lambda: np.asarray(value)[number]) if is_stacked else value

    return {name: pick(value) for name, value in metrics.items()}
