"""Elementwise instructions, with the exact arithmetic of their dtype.

Division by zero is unknown: HLO leaves its result to the hardware.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.integers.values import (
    Compute,
    IntegerTable,
    Value,
    Wrap,
    wrap_of,
)


def elementwise(function: Callable[..., int | None], wrap: Wrap) -> Compute:
    def compute(values: Sequence[Value]) -> Value:
        if None in values:
            return None
        if IntegerTable not in map(type, values):
            result = function(*values)
            return None if result is None else wrap(result)
        rows = [value.elements for value in values if isinstance(value, IntegerTable)]
        size = len(rows[0])
        columns = [v.elements if isinstance(v, IntegerTable) else (v,) * size for v in values]
        results = [function(*column) for column in zip(*columns, strict=True)]
        known = [wrap(result) for result in results if result is not None]
        return IntegerTable(known) if len(known) == size else None

    return compute


def _divide(a: int, b: int) -> int | None:
    """Division rounded towards zero; None for division by zero, which the hardware decides."""
    if b == 0:
        return None
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int | None:
    """The remainder has the sign of the dividend."""
    quotient = _divide(a, b)
    return None if quotient is None else a - b * quotient


def _power(a: int, b: int) -> int | None:
    """a to the power of b, modulo 2⁶⁴, which the modulus of every narrower dtype divides."""
    return pow(a, b, 1 << 64) if b >= 0 else None


ARITHMETIC: dict[str, Callable[..., int | None]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "divide": _divide,
    "remainder": _remainder,
    "power": _power,
    "minimum": min,
    "maximum": max,
    "xor": operator.xor,
    "negate": operator.neg,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "clamp": lambda low, a, high: min(max(low, a), high),
    "convert": lambda a: a,
}
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def _shift_right_arithmetic(bits: int, a: int, b: int) -> int:
    signed = wrap_of(f"s{bits}")(a) if bits > 1 else a
    return signed >> (b if 0 <= b < bits else bits - 1)


# Functions that depend on the number of bits, which comes first.
BITWISE: dict[str, Callable[..., int]] = {
    "shift-left": lambda bits, a, b: a << b if 0 <= b < bits else 0,
    "shift-right-arithmetic": _shift_right_arithmetic,
    "shift-right-logical": lambda bits, a, b: a % (1 << bits) >> b if 0 <= b < bits else 0,
    "count-leading-zeros": lambda bits, a: bits - (a % (1 << bits)).bit_length(),
    "popcnt": lambda bits, a: (a % (1 << bits)).bit_count(),
    "not": lambda bits, a: ~a if bits > 1 else 1 - a,
}


# Elementwise instructions that may not need all of their operands


_ABSORBED: dict[str, tuple[Callable[[int, int], int], int]] = {
    "and": (operator.and_, 0),
    "multiply": (operator.mul, 0),
    "or": (operator.or_, 1),
}
"""Functions that have a result as soon as one operand of one element has it."""
LAZY = frozenset({*_ABSORBED, "select"})


def lazy(opcode: str, shape: Shape) -> Compute:
    """The function of an instruction of `LAZY`."""
    if opcode == "select":
        return _select(shape)
    function, absorber = _ABSORBED[opcode]
    is_absorbed = shape.size == 1 and (opcode != "or" or shape.dtype == "pred")
    plain = elementwise(function, wrap_of(shape.dtype))

    def compute(values: Sequence[Value]) -> Value:
        if None in values:
            return absorber if is_absorbed and absorber in values else None
        return plain(values)

    return compute


def _select(shape: Shape) -> Compute:
    plain = elementwise(lambda chosen, a, b: a if chosen else b, wrap_of(shape.dtype))

    def compute(values: Sequence[Value]) -> Value:
        chosen, on_true, on_false = values
        if isinstance(chosen, int):
            return on_true if chosen else on_false
        return plain(values)

    return compute
