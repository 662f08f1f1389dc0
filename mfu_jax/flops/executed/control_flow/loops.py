"""Trip counts of `while` loops, and the integers that each iteration starts with.

CPU and GPU programs state trip counts that do not depend on an outer loop; TPU programs state none.
If a counter changes by a constant, the number of iterations is proved. Other loops are simulated:
their condition and the few integers that it depends on, with exact arithmetic, for up to
`MAX_TRIPS` iterations. Nothing is extrapolated.

The traced count decides its loops in `traced.integers`, which shares no code; instructions on
integers are in `executed.integers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mfu_jax.flops.executed.control_flow.affine import (
    HOLDS,
    LINEAR,
    Affine,
    as_affine,
    closed_form,
    propagate,
)
from mfu_jax.flops.executed.control_flow.evaluation import UNKNOWN, StepLimitError
from mfu_jax.flops.executed.hlo.module import HloInstruction
from mfu_jax.flops.executed.hlo.value_refs import TuplePath
from mfu_jax.flops.executed.integers.by_device import among, joined, of_device
from mfu_jax.flops.executed.integers.values import Value, value_range, wrapped

if TYPE_CHECKING:
    from mfu_jax.flops.executed.control_flow.scalar_programs import ScalarProgram

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
        self.counted = len(self.paths)  # those that the trip count depends on come first
        self._follow(wanted)
        if any(parameter.number for parameter in (*self.body.inputs, *self.condition.inputs)):
            raise instruction.error("while whose body or condition takes more than its state")
        self.at = {path: k for k, path in enumerate(self.paths)}
        self.body_at = [self.at[parameter.path] for parameter in self.body.inputs]
        self.condition_at = [self.at[parameter.path] for parameter in self.condition.inputs]
        entering = {parameter.path: register for parameter, register in self.body.inputs.items()}
        self.invariant = [
            entering.get(path) == register
            for path, register in zip(self.paths, self.next, strict=True)
        ]
        self.is_joint = self.body.is_joint or self.condition.is_joint
        linear = {step.register for step in self.body.steps if step.instruction.opcode in LINEAR}
        self.may_be_affine = [register in linear for register in self.next]
        self.memo: dict[State, LoopRun] = {}
        self.proofs: dict[State, int | None] = {}  # by the `counted` values
        self.joint_memo: dict[State, list[LoopRun]] = {}  # of each device
        self.known_steps: dict[State, list[int | None]] = {}  # by the values that never change

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
        first, trips, step = start[k], self.count(start), None
        if self.may_be_affine[k] or self.invariant[k]:
            step = self._steps(start)[k]
        if trips is not None and step is not None and isinstance(first, int):
            return wrapped(self.body.shapes[self.next[k]].dtype, first + step * trips)
        return self.run(start).final[k]

    def count(self, initial: State) -> int | None:
        """Iterations, if they are stated or proved without running the loop."""
        if self.trips is not None:
            return self.trips
        counted = initial[: self.counted]
        if counted not in self.proofs:
            try:
                self.proofs[counted] = self._proved(initial)
            except StepLimitError:
                return None
        return self.proofs[counted]

    def run(self, initial: State) -> LoopRun:
        """Runs the loop from a state."""
        if initial not in self.memo:
            self.memo[initial] = self._run(initial)
        return self.memo[initial]

    def _run(self, initial: State) -> LoopRun:
        trips = self.count(initial)
        states: Counter[State] = Counter()
        state, done, reason = initial, 0, OVER_LIMIT
        try:
            while done <= MAX_TRIPS:
                holds = self._holds(state) if trips is None else done < trips
                if not holds:
                    if holds is not None:
                        return LoopRun(done, dict(states), state)
                    reason = ON_DATA
                    break
                following = self._after(state)
                if following != state:
                    repeats = 1
                elif trips is not None:
                    repeats = trips - done
                else:
                    reason = ENDLESS
                    break
                states[state] += repeats
                done += repeats
                state = following
        except StepLimitError:
            pass
        return self._vague(initial, trips, reason)

    def _vague(self, initial: State, trips: int | None, reason: str) -> LoopRun:
        """A run with only the invariant values known, and `trips` if given."""
        self.evaluation.limited |= reason == OVER_LIMIT
        pairs = zip(initial, self.invariant, strict=True)
        vague = tuple(value if invariant else None for value, invariant in pairs)
        return LoopRun(trips, {vague: 1 if trips is None else trips}, vague, reason)

    def run_jointly(self, initial: State) -> list[LoopRun]:
        """The run of each device, starting from a state of all devices."""
        if initial not in self.joint_memo:
            self.joint_memo[initial] = self._run_jointly(initial)
        return self.joint_memo[initial]

    def _run_jointly(self, initial: State) -> list[LoopRun]:
        """As `_run`, for all devices in lockstep; those that are done drop out."""
        running = set(range(self.evaluation.devices))
        states: list[Counter[State]] = [Counter() for _ in running]
        runs: dict[int, LoopRun] = {}
        state, done, reason = initial, 0, OVER_LIMIT
        try:
            while running and done <= MAX_TRIPS:
                holds = self._holds(state) if self.trips is None else done < self.trips
                for device in running:
                    goes_on = of_device(holds, device)
                    if goes_on is None:
                        runs[device] = self._vague(initial, None, ON_DATA)
                    elif not goes_on:
                        runs[device] = LoopRun(done, dict(states[device]), state)
                if not running.isdisjoint(runs):
                    running -= runs.keys()
                    state = among(state, running)
                following = self._after(state)
                repeats = 1
                if following == state and self.trips is not None:
                    repeats = self.trips - done
                elif following == state:
                    reason = ENDLESS
                    break
                for device in running:
                    states[device][state] += repeats
                done += repeats
                state = following
        except StepLimitError:
            pass
        for device in running - runs.keys():
            runs[device] = self._vague(initial, self.trips, reason)
        return [run for _, run in sorted(runs.items())]

    def _holds(self, state: State) -> Value:
        """Whether the loop continues: 1 or 0, by device if they differ; None if unknown."""
        return self.condition.run([state[k] for k in self.condition_at])[self.holds]

    def _after(self, state: State) -> State:
        values = self.body.run([state[k] for k in self.body_at])
        return tuple([values[register] for register in self.next])

    # The proof: values that change by a constant, and a comparison that is linear in them.

    def _steps(self, initial: State) -> list[int | None]:
        """The change of each value of the state in one iteration; None if it varies."""
        pairs = zip(initial, self.invariant, strict=True)
        key = tuple([value for value, invariant in pairs if invariant])
        if key not in self.known_steps:
            self.known_steps[key] = self._found_steps(initial)
        return self.known_steps[key]

    def _found_steps(self, initial: State) -> list[int | None]:
        inputs = [
            initial[k] if self.invariant[k] else Affine(0, 0, k)  # the value of k, plus 0
            for k in self.body_at
        ]
        values = propagate(self.body, inputs)
        steps: list[int | None] = []
        for k, register in enumerate(self.next):
            value = values[register]
            if isinstance(value, Affine) and value.of == k:
                steps.append(value.first)
            else:
                steps.append(0 if self.invariant[k] else None)
        return steps

    def _proved(self, initial: State) -> int | None:
        """Iterations, if the condition compares values that change by a constant."""
        steps = {s.register: s for s in self.condition.steps}
        comparison = steps.get(self.holds)
        if comparison is None or comparison.instruction.opcode != "compare":
            return None
        inputs: list[Value | Affine] = []
        for k, (first, step) in enumerate(zip(initial, self._steps(initial), strict=True)):
            if self.invariant[k]:
                inputs.append(first)
            elif isinstance(first, int) and step is not None:
                inputs.append(Affine(first, step))
            else:
                inputs.append(None)
        values = propagate(self.condition, [inputs[k] for k in self.condition_at])
        left, right = (as_affine(values[register]) for register in comparison.operands)
        if left is None or right is None:
            return None
        direction = comparison.instruction.attribute("direction")
        first, step = left.first - right.first, left.step - right.step
        if not HOLDS[direction](first, 0):
            return 0
        trips = closed_form(first, step, direction)
        if trips is None or not self._stays_in_range(values, trips):
            return None
        return trips

    def _stays_in_range(self, values: list[Value | Affine], trips: int) -> bool:
        """Whether no value of the condition overflows before the loop ends."""
        for value, shape in zip(values, self.condition.shapes, strict=True):
            if isinstance(value, Affine):
                low, high = value_range(shape.dtype) or (0, 0)
                last = value.first + value.step * trips
                if not (low <= value.first <= high and low <= last <= high):
                    return False
        return True
