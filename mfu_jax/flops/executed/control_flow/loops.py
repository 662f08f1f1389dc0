"""Trip counts of `while` loops, and the integers that each iteration starts with.

CPU and GPU programs state trip counts that do not depend on an outer loop; TPU programs state none.
If the condition compares a counter that changes by a constant, the number of iterations is proved.
Other loops are simulated:
their condition and the few integers that it depends on, with exact arithmetic, for up to
`MAX_TRIPS` iterations. Nothing is extrapolated.

The traced count decides its loops in `traced.integers`, which shares no code; instructions on
integers are in `executed.integers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mfu_jax.flops.executed.control_flow.evaluation import UNKNOWN, StepLimitError
from mfu_jax.flops.executed.hlo.module import HloInstruction
from mfu_jax.flops.executed.hlo.value_refs import TuplePath
from mfu_jax.flops.executed.integers.arithmetic import RELATIONS
from mfu_jax.flops.executed.integers.by_device import among, joined, of_device
from mfu_jax.flops.executed.integers.values import Value, value_range, wrapped

if TYPE_CHECKING:
    from mfu_jax.flops.executed.control_flow.scalar_programs import RegisterStep, ScalarProgram

MAX_TRIPS = 100_000  # maximum simulated iterations of a loop
ENDLESS = "its condition stays true"
ON_DATA = "its trip count depends on data"
OVER_LIMIT = f"its trip count depends on more than {MAX_TRIPS:,} iterations"

State = tuple[Value, ...]


def stated_trip_count(instruction: HloInstruction) -> int | None:
    """The ``known_trip_count`` that the compiler attached to a ``while``, if any."""
    known = instruction.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdecimal():
        return int(known["n"])
    return None


@dataclass(frozen=True, slots=True)
class LoopRun:
    """What one run of a loop does.

    Attributes:
        trips: iterations; None if unknown.
        states: how many iterations start with each state; a single vague state if unknown.
        final: the state after the last iteration.
        reason: why `trips` or the states are not known.
    """

    trips: int | None
    states: dict[State, int]
    final: State
    reason: str = ""


class Loop:
    """The part of a ``while`` that its condition and the wanted values of its state depend on.

    Attributes:
        paths: paths of the state's values that it follows, in the order of a `State`.
        is_joint: whether devices exchange integers in it.
    """

    def __init__(
        self,
        instruction: HloInstruction,
        body: ScalarProgram,
        condition: ScalarProgram,
        wanted: Sequence[TuplePath],
        trips: int | None,
    ) -> None:
        """Follows the values of a loop's state.

        Args:
            instruction: the ``while``.
            body: a program for its body; steps are added to it.
            condition: the same for its condition.
            wanted: paths in its state to follow.
            trips: its iterations; None if unknown: its condition then decides when it ends.
        """
        self.evaluation = body.evaluation
        self.trips = trips
        self.body, self.condition = body, condition
        self.holds = self.condition.root() if trips is None else UNKNOWN
        self.paths: list[TuplePath] = []
        self.next: list[int] = []  # registers of the body that hold the next state
        self._follow([parameter.path for parameter in self.condition.inputs])
        self._follow(wanted)
        if any(parameter.number for parameter in (*self.body.inputs, *self.condition.inputs)):
            raise instruction.error("while whose body or condition takes more than its state")
        self.at = {path: k for k, path in enumerate(self.paths)}
        self.body_at, self.condition_at = (  # input's register → index in a `State`
            {register: self.at[parameter.path] for parameter, register in program.inputs.items()}
            for program in (self.body, self.condition)
        )
        made_by = {step.register: step for step in self.body.steps}
        self.invariant = [self.body_at.get(r) == k for k, r in enumerate(self.next)]
        self.increments = [self._increment(k, made_by.get(r)) for k, r in enumerate(self.next)]
        self.is_joint = self.body.is_joint or self.condition.is_joint
        self.memo: dict[tuple[State, int], list[LoopRun]] = {}  # and of how many devices

    def _increment(self, k: int, step: RegisterStep | None) -> tuple[int, int] | None:
        """Sign and register of what an iteration adds to a value; None if it does not add."""
        opcode = step.instruction.opcode if step else ""
        for sign, place in {"add": ((1, 0), (1, 1)), "subtract": ((-1, 0),)}.get(opcode, ()):
            if step and self.body_at.get(step.operands[place]) == k:
                return sign, step.operands[1 - place]
        return None

    def _follow(self, paths: Iterable[TuplePath]) -> None:
        """Adds paths, and all paths that their values in the next iteration depend on."""
        self._add_paths(paths)
        while len(self.next) < len(self.paths):
            self.next.append(self.body.root(self.paths[len(self.next)]))
            self._add_paths(parameter.path for parameter in self.body.inputs)

    def _add_paths(self, paths: Iterable[TuplePath]) -> None:
        self.paths += dict.fromkeys([path for path in paths if path not in self.paths])

    def is_invariant(self, path: TuplePath) -> bool:
        """Whether the body passes a value on unchanged."""
        return self.invariant[self.at[path]]

    def final(self, initial: Sequence[Value], path: TuplePath) -> Value:
        """A value after the loop, given the values of `paths` before it."""
        start, k = tuple(initial), self.at[path]
        if self.is_joint:
            runs = enumerate(self.run_jointly(start))
            return joined([of_device(run.final[k], device) for device, run in runs])
        first, trips, step = start[k], self.count(start), self._step(start, k)
        if trips is not None and step is not None and isinstance(first, int):
            return wrapped(self.body.shapes[self.next[k]].dtype, first + step * trips)
        return self.run(start).final[k]

    def count(self, initial: State) -> int | None:
        """Iterations, if they are stated or proved without running the loop."""
        return self._proved(initial) if self.trips is None else self.trips

    def run(self, initial: State) -> LoopRun:
        """Runs the loop from a state."""
        return self._runs(initial, 1)[0]

    def run_jointly(self, initial: State) -> list[LoopRun]:
        """The run of each device, starting from a state of all devices."""
        return self._runs(initial, self.evaluation.devices)

    def _runs(self, initial: State, devices: int) -> list[LoopRun]:
        if (initial, devices) not in self.memo:
            self.memo[initial, devices] = self._in_lockstep(initial, devices)
        return self.memo[initial, devices]

    def _in_lockstep(self, initial: State, devices: int) -> list[LoopRun]:
        """Runs the loop on devices that drop out when they are done."""
        trips = self.count(initial)
        running = set(range(devices))
        states: list[Counter[State]] = [Counter() for _ in running]
        runs: dict[int, LoopRun] = {}
        state, done, reason = initial, 0, OVER_LIMIT
        try:
            while done <= MAX_TRIPS:
                holds = self._holds(state) if trips is None else done < trips
                for device in running:
                    goes_on = of_device(holds, device)
                    if goes_on is None:
                        runs[device] = self._vague(initial, None, ON_DATA)
                    elif not goes_on:
                        runs[device] = LoopRun(done, dict(states[device]), state)
                if runs and not running.isdisjoint(runs):
                    running -= runs.keys()
                    state = among(state, running)
                if not running:
                    break
                following = self._after(state)
                repeats = 1
                if following == state and trips is not None:
                    repeats = trips - done
                elif following == state:
                    reason = ENDLESS
                    break
                for device in running:
                    states[device][state] += repeats
                done += repeats
                state = following
        except StepLimitError:
            pass
        for device in running:
            runs[device] = self._vague(initial, trips, reason)
        return [runs[device] for device in range(devices)]

    def _vague(self, initial: State, trips: int | None, reason: str) -> LoopRun:
        """A run with only the invariant values known, and `trips` if given."""
        self.evaluation.limited |= reason == OVER_LIMIT
        pairs = zip(initial, self.invariant, strict=True)
        vague = tuple(value if invariant else None for value, invariant in pairs)
        return LoopRun(trips, {vague: 1 if trips is None else trips}, vague, reason)

    def _holds(self, state: State) -> Value:
        """Whether the loop continues: 1 or 0, by device if they differ; None if unknown."""
        return self.condition.run([state[k] for k in self.condition_at.values()])[self.holds]

    def _after(self, state: State) -> State:
        values = self.body.run([state[k] for k in self.body_at.values()])
        return tuple([values[register] for register in self.next])

    # The proof: a comparison of values that change by a constant.

    def _step(self, initial: State, k: int) -> int | None:
        """The change of a value of the state in one iteration; None if it varies."""
        if self.invariant[k]:
            return 0
        if (increment := self.increments[k]) is None:
            return None
        sign, register = increment
        added, at = self.body.initial[register], self.body_at.get(register)
        if at is not None and self.invariant[at]:
            added = initial[at]
        return sign * added if isinstance(added, int) else None

    def _lines(self, initial: State) -> list[_Line | None]:
        """The registers of the condition that change by a constant, or not at all."""
        known = self.condition.initial
        lines = [_Line(value, 0) if isinstance(value, int) else None for value in known]
        for register, k in self.condition_at.items():
            first, step = initial[k], self._step(initial, k)
            if isinstance(first, int) and step is not None:
                lines[register] = _Line(first, step)
        for made in self.condition.steps:
            operands = [lines[register] for register in made.operands]
            rule = _LINEAR.get(made.instruction.opcode)
            lines[made.register] = rule(*operands) if rule and None not in operands else None
        return lines

    def _proved(self, initial: State) -> int | None:
        """Iterations, if the condition compares values that change by a constant."""
        comparison = next((s for s in self.condition.steps if s.register == self.holds), None)
        if comparison is None or comparison.instruction.opcode != "compare":
            return None
        lines = self._lines(initial)
        left, right = (lines[register] for register in comparison.operands)
        if left is None or right is None:
            return None
        direction = comparison.instruction.attribute("direction")
        if not RELATIONS[direction](left.first, right.first):
            return 0
        trips = closed_form(left.first - right.first, left.step - right.step, direction)
        in_range = trips is not None and all(
            low <= line.first <= high and low <= line.first + line.step * trips <= high
            for line, shape in zip(lines, self.condition.shapes, strict=True)
            if line is not None
            for low, high in [value_range(shape.dtype) or (0, 0)]
        )
        return trips if in_range else None


class _Line(NamedTuple):
    """``first + t·step`` in iteration t."""

    first: int
    step: int


def _product(a: _Line, b: _Line) -> _Line | None:
    if a.step and b.step:
        return None
    return _Line(a.first * b.first, a.first * b.step + b.first * a.step)


_LINEAR: dict[str, Callable[..., _Line | None]] = {
    "add": lambda a, b: _Line(a.first + b.first, a.step + b.step),
    "subtract": lambda a, b: _Line(a.first - b.first, a.step - b.step),
    "multiply": _product,
    "negate": lambda a: _Line(-a.first, -a.step),
    "convert": lambda a: a,
}


def closed_form(first: int, step: int, direction: str) -> int | None:
    """The smallest k for which ``first + k·step DIRECTION 0`` does not hold, if there is one."""
    if direction in ("GT", "GE"):
        first, step, direction = -first, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        first, direction = first - 1, "LT"
    if direction == "LT" and step > 0:
        return -(first // step)
    if direction == "NE" and step and first % step == 0 and -first // step >= 0:
        return -first // step
    return 1 if direction == "EQ" and step else None
