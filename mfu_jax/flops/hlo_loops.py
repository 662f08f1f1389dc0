"""How often a `while` runs: from `known_trip_count`, or from its condition and counter.

CPU and GPU programs carry the trip count; TPU programs do not. There the few integers that the
condition depends on are followed through tuples, copies and fusions: their first values outside of
the loop, what one iteration makes of them, and the comparison that ends it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from mfu_jax.flops.hlo_text import HloComputation, HloInstruction, HloModule

_MAX_SIMULATED = 10_000  # iterations of a counter that grows other than by a constant
_MAX_STEPS = 200_000  # instructions evaluated for one loop
_MAX_DEPTH = 100

_Path = tuple[int, ...]


class _UnknownError(Exception):
    """The value depends on data, or on an instruction that is not evaluated here."""


@dataclass(slots=True, eq=False)
class _Frame:
    """One computation with the meaning of its parameters.

    `arguments` are the operands of the caller, in the caller's frame. A loop's body and condition
    have one parameter, the loop's state: known integers by index (`state`), or, of an enclosing
    loop, what it does not change (`loop`: the `while` and the frame in which it stands).
    """

    computation: HloComputation
    arguments: tuple[tuple[_Frame, HloInstruction], ...] | None = None
    state: dict[int, int] | None = None
    loop: tuple[_Frame | None, HloInstruction] | None = None


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
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
_SAME_VALUE = {
    "copy",
    "bitcast",
    "reshape",
    "convert",
    "broadcast",
    "copy-start",
    "copy-done",
    "opt-barrier",
    "optimization-barrier",
}
_CALLEE = {"fusion": "calls", "call": "to_apply"}


def trip_count(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> int | None:
    """Iterations of one run of a ``while``, or None where they depend on data.

    Args:
        module: the program.
        computation: the computation in which the loop stands.
        instruction: the ``while``.
    """
    known = instruction.backend_config.get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdecimal():
        return int(known["n"])
    loop = _Loop(module, computation, instruction)
    try:
        return loop.trip_count()
    except _UnknownError:
        return None


@dataclass(slots=True, eq=False)
class _Loop:
    module: HloModule
    computation: HloComputation
    instruction: HloInstruction
    steps: int = 0
    needed: set[int] = field(default_factory=set)  # indices of the state that were asked for

    def trip_count(self) -> int:
        bodies = self.instruction.computations("body")
        conditions = self.instruction.computations("condition")
        if len(bodies) != 1 or len(conditions) != 1:
            raise _UnknownError
        body = _Frame(self.module[bodies[0]], state={})
        condition = _Frame(self.module[conditions[0]], state={})
        outside = self._frame_of(self.computation)
        compared, comparison = self._comparison(condition, condition.computation.root)
        direction = comparison.attributes.get("direction", "")
        if direction not in _COMPARE:
            raise _UnknownError

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
        raise _UnknownError

    def _first_state(
        self,
        outside: _Frame,
        difference: Callable[[dict[int, int]], int],
        after: Callable[[dict[int, int]], dict[int, int]],
    ) -> dict[int, int]:
        """First values of the integers that the condition depends on, found by trying."""
        start = self.computation.operand(self.instruction, 0)
        state: dict[int, int] = {}
        while True:
            self.needed.clear()
            try:
                difference(state)
                after(state)
            except _UnknownError:
                missing = self.needed - state.keys()
                if not missing:
                    raise
                for i in missing:
                    state[i] = self._value(outside, start, (i,))
            else:
                return state

    def _frame_of(self, computation: HloComputation) -> _Frame:
        """The frame of a computation that stands in a loop, as far as its caller is one."""
        caller = self.module.caller(computation.name)
        if caller is None or caller[1].opcode != "while":
            return _Frame(computation)
        outer, instruction = caller
        return _Frame(computation, loop=(self._frame_of(outer), instruction))

    def _comparison(self, frame: _Frame, root: HloInstruction) -> tuple[_Frame, HloInstruction]:
        """The comparison that a condition returns, and the frame in which it stands."""
        for _ in range(_MAX_DEPTH):
            if root.opcode == "compare":
                return frame, root
            if root.opcode in _SAME_VALUE:
                root = frame.computation.operand(root, 0)
            elif root.opcode in _CALLEE:
                frame = self._callee(frame, root)
                root = frame.computation.root
            else:
                break
        raise _UnknownError

    def _callee(self, frame: _Frame, call: HloInstruction) -> _Frame:
        names = call.computations(_CALLEE[call.opcode])
        if len(names) != 1:
            raise _UnknownError
        operands = (frame.computation[name] for name in call.operands)
        return _Frame(self.module[names[0]], tuple((frame, operand) for operand in operands))

    def _value(
        self, frame: _Frame, instruction: HloInstruction, path: _Path, depth: int = 0
    ) -> int:
        """The integer that an instruction (or an element of the tuple it makes) holds."""
        self.steps += 1
        if self.steps > _MAX_STEPS or depth > _MAX_DEPTH:
            raise _UnknownError
        opcode = instruction.opcode

        def operand(i: int, path: _Path = ()) -> int:
            return self._value(frame, frame.computation.operand(instruction, i), path, depth + 1)

        if opcode == "get-tuple-element":
            index = instruction.integers("index")
            return operand(0, (*index, *path))
        if opcode == "tuple" and path:
            return operand(path[0], path[1:])
        if opcode == "parameter":
            return self._parameter(frame, instruction, path, depth)
        if opcode in _CALLEE:
            inside = self._callee(frame, instruction)
            return self._value(inside, inside.computation.root, path, depth + 1)
        if opcode in _SAME_VALUE:
            return operand(0, path)
        if path:
            raise _UnknownError
        if opcode == "constant":
            return _constant(instruction.operand_text)
        if opcode in _BINARY:
            return _BINARY[opcode](operand(0), operand(1))
        if opcode == "negate":
            return -operand(0)
        if opcode == "select":
            return operand(1) if operand(0) else operand(2)
        if opcode == "compare" and instruction.attributes.get("direction") in _COMPARE:
            return _COMPARE[instruction.attributes["direction"]](operand(0), operand(1))
        raise _UnknownError

    def _parameter(
        self, frame: _Frame, instruction: HloInstruction, path: _Path, depth: int
    ) -> int:
        if frame.arguments is not None:
            text = instruction.operand_text
            if not text.isdecimal() or int(text) >= len(frame.arguments):
                raise _UnknownError
            return self._value(*frame.arguments[int(text)], path, depth + 1)
        if frame.state is not None and len(path) == 1:
            self.needed.add(path[0])
            if path[0] in frame.state:
                return frame.state[path[0]]
        if frame.loop is not None and frame.loop[0] is not None and len(path) == 1:
            outer, loop = frame.loop
            if _unchanged(frame.computation, path[0]):
                start = outer.computation.operand(loop, 0)
                return self._value(outer, start, path, depth + 1)
        raise _UnknownError


def _unchanged(body: HloComputation, index: int) -> bool:
    """Whether a loop's body hands element `index` of its state on as it was."""
    instruction = body.root
    if instruction.opcode != "tuple" or index >= len(instruction.operands):
        return False
    instruction = body.operand(instruction, index)
    for _ in range(_MAX_DEPTH):
        if instruction.opcode == "get-tuple-element":
            source = body.operand(instruction, 0)
            return source.opcode == "parameter" and instruction.integers("index") == (index,)
        if instruction.opcode not in ("copy", "bitcast", "copy-start", "copy-done"):
            return False
        instruction = body.operand(instruction, 0)
    return False


def _constant(text: str) -> int:
    text = text.strip().strip("{} ")
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return int(text)
    except ValueError:
        raise _UnknownError from None


def _evenly_spaced(values: list[int]) -> bool:
    return len({b - a for a, b in zip(values, values[1:], strict=False)}) == 1


def _closed_form(first: int, step: int, direction: str) -> int:
    """The first k at which ``first + k·step DIRECTION 0`` does not hold."""
    if direction in ("GT", "GE"):
        first, step, direction = -first, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        first, direction = first - 1, "LT"
    if direction == "LT" and step > 0:
        return -(first // step)
    if direction == "NE" and step and first % step == 0 and -first // step >= 0:
        return -first // step
    raise _UnknownError  # it never ends, or not by this comparison
