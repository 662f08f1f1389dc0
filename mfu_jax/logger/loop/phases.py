"""Multi-part steps: how long each phase took, and how well it used the hardware.

::

    with logger.step():
        with logger.phase("rollout"):
            trajectory = rollout(state)
        with logger.phase("update"):
            state, metrics = update(state, trajectory)

JAX returns before the device is done, so a phase ends when its last output is ready. A separate
thread waits for that; the training thread never waits. A phase begins when it has been entered and
the previous one has ended.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.records.non_finite import RERAISED
from mfu_jax.logger.records.step_cost import StepCost, add_costs
from mfu_jax.logger.records.summary import PhaseTotals
from mfu_jax.logger.timing.readiness import end_marker
from mfu_jax.logger.timing.watcher import PhaseEnds
from mfu_jax.util.failsafe import ITSELF, Boundary, failsafe

_log = logging.getLogger("mfu_jax")

# Most phases that wait for their step; a loop that records no step must not fill the memory.
_MOST_PHASES = 10_000

LateCost = StepCost | Callable[[], StepCost]


class Recorder(Protocol):
    """The part of `MetricLogger` that the scopes need."""

    def record(
        self, step: int, metrics: Mapping[str, Any], *, cost: LateCost | None = None
    ) -> None: ...


def _now(cost: LateCost) -> StepCost:
    return cost() if callable(cost) else cost


@dataclasses.dataclass(slots=True)
class _Part:
    """One call of an instrumented function in a step; an enclosing phase holds its cost."""

    name: str
    cost: LateCost | None
    metrics: dict[str, Any]


@dataclasses.dataclass(slots=True)
class _Scopes:
    """The open step and phase of one thread, and the phase that ended there last."""

    phase: Phase | None = None
    step: StepScope | None = None
    last: Phase | None = None


class Phase:
    """One part of a step; made by `MetricLogger.phase`.

    Attributes:
        name: shown as ``phase/<name>/…``.
        has_compiled: something was compiled inside it, so its time is meaningless.
        scopes: the scopes of the thread that entered it.
    """

    def __init__(
        self, book: PhaseBook, name: str, cost: StepCost | None, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.has_compiled = False
        self.scopes = _Scopes()
        self._book = book
        self._boundary = book.boundary
        self._clock = clock
        self._given = cost
        self._costs: list[LateCost] = []
        self._marker: Any = None
        self._entered = self._left = 0.0
        self._ended: Future[float] | None = None
        self._before: Phase | None = None
        self._span: float | None = None

    @failsafe("the time of phase {0.name} is not known")
    def wait_for(self, outputs: Any) -> None:
        """Declares the phase's outputs, if no instrumented function runs in it.

        Args:
            outputs: arrays, or a tree of them; the phase ends when they are ready.
        """
        self._marker = end_marker(outputs)

    @failsafe("phase {0.name} is not logged", passes=RERAISED, instead=ITSELF)
    def __enter__(self) -> Self:
        self._book.open(self)
        self._entered = self._clock()
        return self

    @failsafe("phase {0.name} is not logged", passes=RERAISED)
    def __exit__(self, *error: object) -> None:
        self._left = self._clock()
        marker, self._marker = self._marker, None
        self._ended = self._book.watch(marker) if marker is not None else None
        self._book.closed(self)

    def add(self, cost: LateCost, marker: Any) -> None:
        """Adds a call of an instrumented function."""
        self._costs.append(cost)
        self._marker = marker

    def follow(self, before: Phase | None) -> None:
        """Sets the phase that must end before this one begins."""
        self._before = before

    @property
    def has_cost(self) -> bool:
        """Whether `cost` is known."""
        return self._given is not None or bool(self._costs)

    def cost(self) -> StepCost | None:
        """Cost of the phase on one device; None if unknown. May wait for a count."""
        if self._given is not None:
            return self._given
        return add_costs(map(_now, self._costs)) if self._costs else None

    def end(self) -> float:
        """Clock reading at its end, in seconds; waits for the device."""
        return self._left if self._ended is None else max(self._left, self._ended.result())

    def seconds(self) -> float:
        """Duration in seconds; waits for the device."""
        if self._span is None:
            begin = self._entered
            if self._before is not None:
                begin, self._before = max(begin, self._before.end()), None
            self._span = max(0.0, self.end() - begin)
        return self._span


class PhaseBook:
    """The phases of one logger: those of the current step, and totals over all steps.

    Each thread has its own steps and phases, e.g. an actor and a learner. A thread that opens none
    acts on behalf of the first thread that did.

    Args:
        clock: monotonic clock in seconds.
        warmup_steps: number of first steps whose phases are excluded from the totals.
        boundary: where failures are reported.

    Attributes:
        boundary: the one given, or a new one.
        has_phases: True if ended phases wait for their step to be recorded.
        totals: over the measured steps that were written.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        warmup_steps: int = 0,
        boundary: Boundary | None = None,
    ) -> None:
        self.boundary = boundary or Boundary()
        self.has_phases = False
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._closed: deque[Phase] = deque()
        self._is_full = False
        self._has_scopes = False
        self._first = _Scopes()
        self._own = threading.local()
        self._ends: PhaseEnds | None = None
        self.totals = PhaseTotals()
        self._lock = threading.Lock()

    @property
    def takes_calls(self) -> bool:
        """Whether this thread is inside a step or phase, which then owns instrumented calls."""
        if not self._has_scopes:
            return False
        here = self._here
        return here.phase is not None or here.step is not None

    @property
    def _here(self) -> _Scopes:
        scopes: _Scopes = getattr(self._own, "scopes", self._first)
        return scopes

    def _own_here(self) -> _Scopes:
        if not hasattr(self._own, "scopes"):
            with self._lock:
                self._own.scopes = _Scopes() if self._has_scopes else self._first
                self._has_scopes = True
        scopes: _Scopes = self._own.scopes
        return scopes

    def phase(self, name: str, cost: StepCost | None) -> Phase:
        """A new phase."""
        if not name or "/" in name:
            raise UserError(
                f"phase name {name!r} is not usable; expected a word without a slash; usually an "
                f"empty string or a path; the metrics are named phase/<name>/seconds and so on"
            )
        return Phase(self, name, cost, self._clock)

    def step(self, logger: Recorder, number: int) -> StepScope:
        """A new step."""
        return StepScope(self, logger, number)

    def open(self, phase: Phase) -> None:
        """Called when a phase is entered."""
        here = self._own_here()
        if here.phase is not None and not self.boundary.failures:  # a failure may keep it open
            raise UserError(
                f"phase {phase.name!r} was entered inside phase {here.phase.name!r}; expected one "
                f"after the other; usually a phase around the whole step; use "
                f"`with logger.step():` for that"
            )
        phase.scopes, here.phase = here, phase

    def closed(self, phase: Phase) -> None:
        """Called when a phase is left."""
        here = phase.scopes
        here.phase = None
        phase.follow(here.last)
        here.last = phase
        with self._lock:
            self._closed.append(phase)
            self.has_phases = True
            oldest = self._closed.popleft() if len(self._closed) > _MOST_PHASES else None
        if oldest is not None:
            self._leave_out(oldest)

    def _leave_out(self, phase: Phase) -> None:
        phase.follow(None)  # else each phase keeps all earlier ones alive
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "%d phases since the last recorded step, now %r; the oldest are left out; expected "
                "a step around them; usually no step is recorded; put `with logger.step():` around "
                "the phases of one step",
                _MOST_PHASES,
                phase.name,
            )

    def open_step(self, step: StepScope) -> None:
        """Called when a step is entered."""
        here = self._own_here()
        if here.step is not None and not self.boundary.failures:
            raise UserError(
                f"step {step.number} was entered inside step {here.step.number}; expected one "
                f"after the other; usually a part of the step was meant; use logger.phase(name)"
            )
        step.scopes, here.step = here, step

    def add_call(self, name: str, cost: LateCost, metrics: dict[str, Any], output: Any) -> None:
        """Adds a call of an instrumented function to the current phase and step."""
        here = self._here
        if here.phase is not None:
            arrays = [v for v in metrics.values() if isinstance(v, jax.Array)]
            here.phase.add(cost, arrays[-1] if arrays else end_marker(output))
        if here.step is not None:
            own = cost if here.phase is None else None
            here.step.parts.append(_Part(name, own, metrics))

    def compiling(self) -> None:
        """Called when the training thread compiles."""
        here = getattr(self._own, "scopes", self._first)
        if here.phase is not None:
            here.phase.has_compiled = True

    def watch(self, marker: Any) -> Future[float]:
        """A future of the clock reading when `marker` is ready."""
        with self._lock:
            if self._ends is None:
                self._ends = PhaseEnds(self._clock)
        return self._ends.watch(marker)

    def take(self) -> tuple[dict[str, Any], Callable[[], StepCost] | None]:
        """Metrics of the phases since the last step; a function for their total cost, if known."""
        with self._lock:
            phases, self._closed = self._closed, deque()
            self.has_phases = False
        is_warm, self._warmup_steps = self._warmup_steps <= 0, self._warmup_steps - 1
        by_name: dict[str, list[Phase]] = {}
        for phase in phases:
            by_name.setdefault(phase.name, []).append(phase)
        metrics: dict[str, Any] = {}
        for name, same in by_name.items():
            metrics |= self._metrics(name, same, is_warm)
        known = [phase for phase in phases if phase.has_cost]
        if not known:
            return metrics, None
        return metrics, lambda: add_costs(c for p in known if (c := p.cost()) is not None)

    def _metrics(self, name: str, phases: list[Phase], is_warm: bool) -> dict[str, Any]:
        found: dict[str, float] = {}

        def value(metric: str) -> Callable[[], float | None]:
            def read() -> float | None:
                if not found:
                    found.update(self._measure(name, phases, is_warm))
                return found.get(metric)

            return read

        metrics = ("seconds", "per_device_tflops", "per_device_tflops_per_sec", "mfu", "hfu")
        return {f"phase/{name}/{metric}": value(metric) for metric in metrics}

    def _measure(self, name: str, phases: list[Phase], is_warm: bool) -> dict[str, float]:
        seconds = sum(phase.seconds() for phase in phases)
        costs = [cost for phase in phases if (cost := phase.cost()) is not None]
        cost = add_costs(costs) if costs else None
        if is_warm and not any(phase.has_compiled for phase in phases):
            self.totals.add(name, len(phases), seconds, cost)
        if cost is None:
            return {"seconds": seconds}
        rates = {k.removeprefix("perf/"): v for k, v in cost.rates(seconds).items()}
        return rates | {"seconds": seconds}

    def close(self) -> None:
        """Stops the thread."""
        if self._ends is not None:
            self._ends.close()


class StepScope:
    """One step, timed as a block; made by `MetricLogger.step`.

    Attributes:
        number: the step's number.
        metrics: what will be logged with it; see `log`.
        scopes: the scopes of the thread that entered it.
    """

    def __init__(self, book: PhaseBook, logger: Recorder, number: int) -> None:
        self.number = number
        self.metrics: dict[str, Any] = {}
        self.parts: list[_Part] = []
        self.scopes = _Scopes()
        self._book = book
        self._boundary = book.boundary
        self._logger = logger

    @failsafe("a metric is not logged", passes=(UserError,))
    def log(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Adds metrics to the step's record: ``step.log(loss=loss)``."""
        self.metrics |= {**(metrics or {}), **more}

    @failsafe("step {0.number} is not logged", passes=RERAISED, instead=ITSELF)
    def __enter__(self) -> Self:
        self._book.open_step(self)
        return self

    @failsafe("step {0.number} is not logged", passes=RERAISED)
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        was_open, self.scopes.step = self.scopes.step is self, None
        metrics, of_phases = self._book.take()
        if kind is not None or not was_open:  # then its calls are steps of their own
            return
        costs = [part.cost for part in self.parts if part.cost is not None]
        if of_phases is not None:
            costs.append(of_phases)
        cost = (lambda: add_costs(map(_now, costs))) if costs else None
        self._logger.record(self.number, self._of_parts() | metrics | self.metrics, cost=cost)

    def _of_parts(self) -> dict[str, Any]:
        """The metrics of instrumented calls, grouped by function if several return any."""
        of_name = {part.name: part.metrics for part in self.parts}
        shown = [n for n, metrics in of_name.items() if any(m[0] != "_" for m in metrics)]
        waited_for = {f"_{name}": of_name.pop(name) for name in set(of_name) - set(shown)}
        return (of_name[shown[0]] if len(shown) == 1 else of_name) | waited_for
