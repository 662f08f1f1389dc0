"""Multi-part steps: how long each phase took, and how well it used the hardware.

::

    with logger.step():
        with logger.phase("rollout"):
            trajectory = rollout(state)
        with logger.phase("update"):
            state, metrics = update(state, trajectory)

JAX returns before the device is done, so a phase ends when its last output is ready. The watcher's
thread waits for that; the training thread never waits. A phase begins when it has been entered and
the previous one has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.loop.spans import Span, means_of
from mfu_jax.logger.records.step_cost import StepCost, add_costs
from mfu_jax.logger.records.summary import PhaseTotals
from mfu_jax.logger.timing.readiness import Watcher, end_marker
from mfu_jax.logger.timing.timed_step import Reading, TimedStep
from mfu_jax.util.failsafe import Boundary, failsafe
from mfu_jax.util.formatting import counted

_log = logging.getLogger("mfu_jax")

# Most phases that wait for their step: a loop that records none must not fill the memory.
_MOST_PHASES = 10_000

_RATES = ("per_device_tflops", "per_device_tflops_per_sec", "mfu", "hfu")

LateCost = StepCost | Callable[[], StepCost]


def _now(cost: LateCost) -> StepCost:
    return cost() if callable(cost) else cost


class _PhaseEdge(NamedTuple):
    """When the host left a phase, and when the device did, if it had anything to do."""

    left: float = 0.0
    ready: Future[float] | None = None

    def read(self) -> float:
        """The later of the two, in seconds; waits for the device."""
        return self.left if self.ready is None else max(self.left, self.ready.result())


class _PhaseOutputs(TimedStep):
    """What the watcher waits for at the end of a phase, and then the clock's reading."""

    def __init__(self, marker: Any) -> None:
        self.metrics = {"_end": marker}
        self.ended: Future[float] = Future()

    def see(self, begun: Reading, ready: Reading) -> None:
        self.ended.set_result(ready[1])


class Phase(Span):
    """One part of a step; made by `MetricLogger.phase`.

    Attributes:
        name: shown as ``phase/<name>/…``.
        costs: what it consists of; empty if its cost is not known.
        has_compiled: something was compiled inside it, so its time is meaningless.
    """

    usually = "a phase around the whole step; use `with logger.step():` for that"

    def __init__(
        self, book: PhaseBook, name: str, cost: StepCost | None, clock: Callable[[], float]
    ) -> None:
        super().__init__(name, book.boundary)
        self.has_compiled = False
        self._book = book
        self._clock = clock
        self.costs: list[LateCost] = [] if cost is None else [cost]
        self._is_given = cost is not None
        self._marker: Any = None
        self._entered = 0.0
        self._before = self._ended = _PhaseEdge()

    def __str__(self) -> str:
        return f"phase {self.name!r}"

    @failsafe("the time of phase {0.name} is not known")
    def wait_for(self, outputs: Any) -> None:
        """Declares the phase's outputs, if no instrumented function runs in it.

        Args:
            outputs: arrays, or a tree of them; the phase ends when they are ready.
        """
        self._marker = end_marker(outputs)

    def _begin(self) -> None:
        self._book.enter(self)
        self._entered = self._clock()

    def _end(self, *, has_failed: bool) -> None:
        left = self._clock()
        marker, self._marker = self._marker, None
        self._ended = _PhaseEdge(left, self._book.watch(marker) if marker is not None else None)
        self._before = self._book.closed(self, self._ended)

    def add(self, cost: LateCost, marker: Any) -> None:
        """Adds a call of an instrumented function."""
        if not self._is_given:
            self.costs.append(cost)
        self._marker = marker

    def seconds(self) -> float:
        """Duration in seconds, from when the phase before it has ended; waits for the device."""
        return max(0.0, self._ended.read() - max(self._entered, self._before.read()))


class PhaseBook:
    """The phases of one logger: those of the current step, and totals over all steps.

    Args:
        clock: monotonic clock in seconds.
        watcher: waits for the ends of phases.
        warmup_steps: number of first steps whose phases are excluded from the totals.
        boundary: where failures are reported.

    Attributes:
        boundary: the one given, or a new one.
        has_phases: True if ended phases wait for their step to be recorded.
        totals: over the measured steps that were written.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        watcher: Watcher,
        *,
        warmup_steps: int = 0,
        boundary: Boundary | None = None,
    ) -> None:
        self.boundary = boundary or Boundary()
        self.has_phases = False
        self.totals = PhaseTotals()
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._open: dict[type[Span], Any] = {}
        self._last = _PhaseEdge()
        self._closed: deque[Phase] = deque(maxlen=_MOST_PHASES)
        self._watcher = watcher

    def phase(self, name: str, cost: StepCost | None) -> Phase:
        """A new phase."""
        if not name or "/" in name:
            raise UserError(
                f"phase name {name!r} is not usable; expected a word without a slash",
                hint="usually an empty string or a path; the metrics are named "
                "phase/<name>/seconds and so on",
            )
        return Phase(self, name, cost, self._clock)

    def enter(self, span: Phase | StepScope) -> None:
        """Called when a phase or step is entered."""
        outer = self._open.get(type(span))
        if outer is not None and not self.boundary.failures:  # a failure may have kept it open
            raise UserError(
                f"{span} was entered inside {outer}; expected one after the other",
                hint=f"usually {span.usually}",
            )
        self._open[type(span)] = span

    def leave(self, span: Phase | StepScope) -> bool:
        """Called when a phase or step is left; False if it could not be entered."""
        return self._open.pop(type(span), None) is span

    def closed(self, phase: Phase, ended: _PhaseEdge) -> _PhaseEdge:
        """Called when a phase is left; returns when the one before it ended."""
        self.leave(phase)
        self._closed.append(phase)
        self.has_phases = True
        before, self._last = self._last, ended
        return before

    def add_call(self, name: str, cost: LateCost, metrics: dict[str, Any], output: Any) -> bool:
        """Adds a call of an instrumented function to what is open; False if nothing is.

        A step holds its own calls; their cost belongs to the phase around them, if there is one.
        """
        phase, step = self._open.get(Phase), self._open.get(StepScope)
        if phase is not None:
            arrays = [v for v in metrics.values() if isinstance(v, jax.Array)]
            phase.add(cost, arrays[-1] if arrays else end_marker(output))
        if step is not None:
            step.calls.append((name, metrics))
            if phase is None:
                step.costs.append(cost)
        return phase is not None or step is not None

    def compiling(self) -> None:
        """Called when the loop's thread compiles."""
        if (phase := self._open.get(Phase)) is not None:
            phase.has_compiled = True

    def watch(self, marker: Any) -> Future[float]:
        """A future of the clock reading when `marker` is ready."""
        outputs = _PhaseOutputs(marker)
        self._watcher.watch(outputs)
        return outputs.ended

    def take(self) -> tuple[dict[str, Any], Callable[[], StepCost] | None]:
        """Metrics of the phases since the last step; a function for their total cost, if known."""
        phases = [*self._closed]
        self._closed.clear()
        self.has_phases = False
        is_warm, self._warmup_steps = self._warmup_steps <= 0, self._warmup_steps - 1
        by_name: dict[str, list[Phase]] = {}
        for phase in phases:
            by_name.setdefault(phase.name, []).append(phase)
        metrics = {
            f"phase/{name}": functools.partial(self._measure, name, same, is_warm)
            for name, same in by_name.items()
        }
        return metrics, sum_of([cost for phase in phases for cost in phase.costs])

    def _measure(self, name: str, phases: list[Phase], is_warm: bool) -> dict[str, float]:
        seconds = sum(phase.seconds() for phase in phases)
        total = sum_of([cost for phase in phases for cost in phase.costs])
        cost = None if total is None else total()
        if is_warm and not any(phase.has_compiled for phase in phases):
            self.totals.add(name, len(phases), seconds, cost)
        rates = {} if cost is None else cost.rates(seconds)
        known = {name: rates[f"perf/{name}"] for name in _RATES if f"perf/{name}" in rates}
        return {"seconds": seconds, **known}


def sum_of(costs: list[LateCost]) -> Callable[[], StepCost] | None:
    """A function that adds up costs, and may wait for counts; None if there are none."""
    return (lambda: add_costs(map(_now, costs))) if costs else None


def _cost_of_calls(costs: list[StepCost]) -> StepCost:
    """The cost of the calls of a step, whose tokens those that have any state in equal parts.

    A call that only updates the weights may state none, though it is one of the step's calls.
    """
    tokens = len(costs) * max(cost.tokens_per_device for cost in costs)
    return dataclasses.replace(add_costs(costs), tokens_per_device=tokens)


class StepScope(Span):
    """One step, timed as a block; made by `MetricLogger.step`.

    Attributes:
        number: the step's number.
        metrics: what will be logged with it; see `log`.
        calls: name and metrics of each call of an instrumented function in it.
        costs: of its calls outside phases.
    """

    usually = "a part of the step was meant; use logger.phase(name)"

    def __init__(self, book: PhaseBook, record: Callable[..., None], number: int) -> None:
        super().__init__("step", book.boundary)
        self.number = number
        self.metrics: dict[str, Any] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.costs: list[LateCost] = []
        self._book = book
        self._record = record

    def __str__(self) -> str:
        return f"step {self.number}"

    @failsafe("a metric is not logged", passes=(UserError,))
    def log(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Adds metrics to the step's record: ``step.log(loss=loss)``."""
        self.metrics |= {**(metrics or {}), **more}

    def _begin(self) -> None:
        self._book.enter(self)

    def _end(self, *, has_failed: bool) -> None:
        was_open = self._book.leave(self)
        metrics, of_phases = self._book.take()
        if has_failed or not was_open:  # then its calls are steps of their own
            return
        costs = self.costs if of_phases is None else [*self.costs, of_phases]
        metrics = self._of_calls() | metrics | self.metrics
        self._record(self.number, metrics, cost=sum_of(costs))

    def _of_calls(self) -> dict[str, Any]:
        """The metrics of instrumented calls, grouped by function if several return any."""
        of_name = dict(self.calls)
        shown = [n for n, metrics in of_name.items() if any(m[0] != "_" for m in metrics)]
        waited_for = {f"_{name}": of_name.pop(name) for name in set(of_name) - set(shown)}
        return (of_name[shown[0]] if len(shown) == 1 else of_name) | waited_for


class StepCalls:
    """Calls of instrumented functions of which several make a step, as with micro-batches.

    Args:
        count: how many make one.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._has_steps = False
        self._calls: list[tuple[dict[str, Any], LateCost]] = []

    def end(self) -> None:
        """Says why nothing is logged, if the calls of the whole run made no step."""
        if self._calls and not self._has_steps:
            _log.warning(
                "the run ended after %s, and nothing is logged: calls_per_step=%d make a step\n"
                "hint: usually calls_per_step is above what the loop makes for one step",
                *(counted(len(self._calls), "call"), self.count),
            )

    def add(
        self, metrics: dict[str, Any], cost: LateCost
    ) -> tuple[dict[str, Any], LateCost | None] | None:
        """Means of the metrics and the total cost, if this call completes a step; else None."""
        if self.count == 1:
            return metrics, cost
        self._calls.append((metrics, cost))
        if len(self._calls) < self.count:
            return None
        calls, self._calls, self._has_steps = self._calls, [], True
        means = means_of([of_call for of_call, _ in calls])
        shown = {name: mean for name, mean in means.items() if name[:1] != "_"}
        return shown | {"_last": metrics}, lambda: _cost_of_calls([_now(cost) for _, cost in calls])
