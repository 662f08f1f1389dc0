"""Affine values: integers that change by a constant in each iteration of a loop.

What is affine in the iteration can be compared without running the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mfu_jax.flops.executed.integers.values import Value

if TYPE_CHECKING:
    from mfu_jax.flops.executed.control_flow.scalar_programs import RegisterStep, ScalarProgram


class Affine(NamedTuple):
    """``first + t·step`` in iteration t; with `of`, an offset from that value of the state."""

    first: int
    step: int
    of: int | None = None


def as_affine(value: Value | Affine) -> Affine | None:
    if isinstance(value, int):
        return Affine(value, 0)
    return value if isinstance(value, Affine) else None


def propagate(program: ScalarProgram, inputs: Sequence[Value | Affine]) -> list[Value | Affine]:
    """The registers of a program, some of whose inputs are affine."""
    program.evaluation.spend(1 + len(program.steps))
    values: list[Value | Affine] = list(program.initial)
    for register, value in zip(program.inputs.values(), inputs, strict=True):
        values[register] = value
    for step in program.steps:
        operands = [values[i] for i in step.operands]
        plain = [operand for operand in operands if not isinstance(operand, Affine)]
        is_plain = len(plain) == len(operands)
        values[step.register] = step.compute(plain) if is_plain else _of_affine(step, operands)
    return values


def _of_affine(step: RegisterStep, operands: list[Value | Affine]) -> Affine | None:
    affine = [as_affine(operand) for operand in operands]
    rule = LINEAR.get(step.instruction.opcode)
    if rule is None or None in affine:
        return None
    return rule(*affine)


def _add(a: Affine, b: Affine) -> Affine | None:
    if a.of is not None and b.of is not None:
        return None
    return Affine(a.first + b.first, a.step + b.step, b.of if a.of is None else a.of)


def _subtract(a: Affine, b: Affine) -> Affine | None:
    return None if b.of is not None else Affine(a.first - b.first, a.step - b.step, a.of)


def _multiply(a: Affine, b: Affine) -> Affine | None:
    if a.of is not None or b.of is not None or (a.step and b.step):
        return None
    return Affine(a.first * b.first, a.first * b.step + b.first * a.step)


def _negate(a: Affine) -> Affine | None:
    return _subtract(Affine(0, 0), a)


def _convert(a: Affine) -> Affine | None:
    return a if a.of is None else None  # it may overflow; only ranges of whole values are checked


LINEAR: dict[str, Callable[..., Affine | None]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "negate": _negate,
    "convert": _convert,
}
HOLDS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
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
