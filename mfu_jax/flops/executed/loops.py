"""Trip counts of `while` loops: from `known_trip_count`, or from the condition and its counter.

CPU and GPU programs carry the trip count; TPU programs do not. There, the few integers that the
condition depends on are followed through tuples, copies and fusions: their initial values outside
the loop, their change in one iteration, and the comparison that ends the loop.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from mfu_jax.flops.executed.dataflow import (
    MAX_DEPTH,
    Dataflow,
    Frame,
    TuplePath,
    UnknownValueError,
)
from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction

_MAX_SIMULATED = 10_000  # iterations of a counter that does not grow by a constant: bounds the time
_MAX_STEPS = 200_000  # instructions evaluated for one loop: bounds the time, whatever the text


def _divide(a: int, b: int) -> int:
    """Division towards zero, as in XLA."""
    if b == 0:
        raise UnknownValueError
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shift_right(a: int, b: int) -> int:
    if b < 0:
        raise UnknownValueError
    return a >> b


def _shift_right_logical(a: int, b: int) -> int:
    if a < 0:  # the result depends on the bit width
        raise UnknownValueError
    return _shift_right(a, b)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": _divide,
    "remainder": lambda a, b: a - b * _divide(a, b),
    "shift-right-arithmetic": _shift_right,
    "shift-right-logical": _shift_right_logical,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def hlo_trip_count(
    dataflow: Dataflow, computation: HloComputation, instruction: HloInstruction
) -> int | None:
    """Iterations of one run of a ``while``, or None if they depend on data.

    Args:
        dataflow: of the program.
        computation: the computation that the loop is in.
        instruction: the ``while``.
    """
    known = instruction.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdecimal():
        return int(known["n"])
    loop = _Loop(dataflow, computation, instruction)
    try:
        return loop.iterations()
    except UnknownValueError:
        return None


@dataclass(slots=True, eq=False)
class _Loop:
    """Runs the integers that one loop's condition depends on."""

    dataflow: Dataflow
    computation: HloComputation
    instruction: HloInstruction
    steps: int = 0
    needed: set[int] = field(default_factory=set)  # indices of the state that were read

    def iterations(self) -> int:
        body_name, condition_name = self.instruction.loop_computations
        body = Frame(self.dataflow.module[body_name], state={})
        condition = Frame(self.dataflow.module[condition_name], state={})
        outside = self.dataflow.frame_of(self.computation)
        compared, comparison = self._comparison(condition)
        direction = comparison.attributes.get("direction", "")
        if direction not in _COMPARE:
            raise UnknownValueError

        def difference(state: dict[int, int]) -> int:
            condition.state = state
            operands = [compared.computation.operand(comparison, i) for i in (0, 1)]
            left, right = (self._value(compared, operand, ()) for operand in operands)
            return left - right

        def after(state: dict[int, int]) -> dict[int, int]:
            body.state = state
            root = body.computation.root
            return {i: self._value(body, root, (i,)) for i in state}

        state = self._first_state(outside, difference, after)
        differences = [difference(state)]
        holds = _COMPARE[direction]
        for _ in range(_MAX_SIMULATED):
            if not holds(differences[-1], 0):
                return len(differences) - 1
            state = after(state)
            differences.append(difference(state))
            if len(differences) == 4 and _evenly_spaced(differences):
                return _closed_form(differences[0], differences[1] - differences[0], direction)
        raise UnknownValueError

    def _first_state(
        self,
        outside: Frame,
        difference: Callable[[dict[int, int]], int],
        after: Callable[[dict[int, int]], dict[int, int]],
    ) -> dict[int, int]:
        """Initial values of the integers that the condition depends on, found by trial."""
        start = self.computation.operand(self.instruction, 0)
        state: dict[int, int] = {}
        while True:
            self.needed.clear()
            try:
                difference(state)
                after(state)
            except UnknownValueError:
                missing = self.needed - state.keys()
                if not missing:
                    raise
                for i in missing:
                    state[i] = self._value(outside, start, (i,))
            else:
                return state

    def _comparison(self, frame: Frame) -> tuple[Frame, HloInstruction]:
        """The comparison that a condition returns, and the frame that it is in."""
        frame, root, _ = self.dataflow.follow(frame, frame.computation.root)
        if root.opcode != "compare":
            raise UnknownValueError
        return frame, root

    def _value(
        self, frame: Frame, instruction: HloInstruction, path: TuplePath, depth: int = 0
    ) -> int:
        """The integer value of an instruction, or of the element at `path` of its tuple."""
        self.steps += 1
        if self.steps > _MAX_STEPS or depth > MAX_DEPTH:
            raise UnknownValueError
        frame, instruction, path = self.dataflow.follow(frame, instruction, path)
        opcode = instruction.opcode

        def operand(i: int) -> int:
            return self._value(frame, frame.computation.operand(instruction, i), (), depth + 1)

        if opcode == "parameter" and frame.state is not None and len(path) == 1:
            self.needed.add(path[0])
            if path[0] in frame.state:
                return frame.state[path[0]]
        if path:
            raise UnknownValueError
        if opcode == "constant":
            return _constant(instruction.operand_text)
        if opcode == "broadcast":
            return operand(0)
        if opcode in _BINARY:
            return _BINARY[opcode](operand(0), operand(1))
        if opcode == "negate":
            return -operand(0)
        if opcode == "sign":
            value = operand(0)
            return (value > 0) - (value < 0)
        if opcode == "select":
            return operand(1) if operand(0) else operand(2)
        if opcode == "compare" and instruction.attributes.get("direction") in _COMPARE:
            return _COMPARE[instruction.attributes["direction"]](operand(0), operand(1))
        raise UnknownValueError


def _constant(text: str) -> int:
    text = text.strip().strip("{} ")
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return int(text)
    except ValueError:
        raise UnknownValueError from None


def _evenly_spaced(values: list[int]) -> bool:
    return len({b - a for a, b in itertools.pairwise(values)}) == 1


def _closed_form(first: int, step: int, direction: str) -> int:
    """The smallest k for which ``first + k·step DIRECTION 0`` does not hold."""
    if direction in ("GT", "GE"):
        first, step, direction = -first, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        first, direction = first - 1, "LT"
    if direction == "LT" and step > 0:
        return -(first // step)
    if direction == "NE" and step and first % step == 0 and -first // step >= 0:
        return -first // step
    raise UnknownValueError  # it never ends, or ends another way
