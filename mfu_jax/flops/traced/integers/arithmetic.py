"""Integer and boolean primitives of a jaxpr on NumPy values, with XLA's overflow and division.

Float scalars are followed as long as they are exact: a counter that grows by 0.5, not by 0.1.

A value is a NumPy number or array. Inside a Pallas kernel, a scalar may have one value per program
of the grid, so elementwise rules broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mfu_jax.flops.traced.integers.arrays import ARRAYS, IntegerRule
from mfu_jax.flops.traced.integers.known_values import (
    ConstantTable,
    Known,
    can_be_known,
    is_float,
)

# Of floats: primitives with exact results, and those whose results are exact for some operands.
_CHOOSES = frozenset("abs clamp copy eq ge gt le lt max min ne neg select_n".split())
_OF_FLOATS = _CHOOSES | {"add", "sub", "mul", "convert_element_type"}
_LARGEST_RESULT = 2**16  # elements: what controls a loop is small, and evaluated in each iteration


def evaluate(eqn: Any, known: Sequence[Known]) -> Known:
    """The only result of an equation on known integers; None if it is not known."""
    if not _has_rule(eqn) or not _fits(eqn.outvars[0].aval):
        return None
    if any(v is None for v in known):
        return _despite_unknowns(eqn, known)
    operands = [typed(v, atom.aval) for v, atom in zip(known, eqn.invars, strict=True)]
    if any(v is None for v in operands) or not _agree(eqn, operands):
        return None
    rule = _RULES[eqn.primitive.name]
    with np.errstate(over="ignore", invalid="ignore"):
        result = typed(rule(eqn, operands), eqn.outvars[0].aval)
    return result if not _has_floats(eqn) or _is_exact(eqn, operands, result) else None


def _has_floats(eqn: Any) -> bool:
    return any(is_float(atom.aval) for atom in (*eqn.invars, *eqn.outvars))


def _is_exact(eqn: Any, operands: Sequence[Any], result: Any) -> bool:
    """Whether a result of floats is exact, and so the same in any order of operations."""
    name = eqn.primitive.name
    if np.ndim(result) or not np.all(np.isfinite([*operands, result])):
        return False
    numbers = [Fraction(value.item()) for value in operands]
    if name == "convert_element_type":
        return Fraction(result.item()) == numbers[0]
    if name in ("add", "sub", "mul"):
        return Fraction(result.item()) == _FUNCTIONS[name](*numbers)
    return name in _CHOOSES


def is_evaluable(eqn: Any) -> bool:
    """Whether `evaluate` has a rule for this equation."""
    return _has_rule(eqn) and can_be_known(eqn.outvars[0].aval)


def _has_rule(eqn: Any) -> bool:
    """Whether a rule holds for an equation's dtypes: some are of integers only, as `div`."""
    name = eqn.primitive.name
    return name in _RULES and (name in _OF_FLOATS or not _has_floats(eqn))


def typed(value: Known, aval: Any) -> Known:
    """A known value in its variable's dtype; None if that cannot be known."""
    if value is None or not can_be_known(aval):
        return None
    value = value.values if isinstance(value, ConstantTable) else value
    if isinstance(value, float) and not is_float(aval):
        return None
    if isinstance(value, np.generic) and value.dtype == aval.dtype:
        return value
    return np.asarray(value).astype(aval.dtype, copy=False)[()]  # turns 0-d arrays into scalars


def where(runs: Any, new: Known, old: Known) -> Known:
    """The new value where a loop still runs: in some programs of a grid, or examples of a batch."""
    if new is None or np.all(runs):
        return new
    if old is None:
        return None
    dims = max(np.ndim(new), np.ndim(old), np.ndim(runs))
    return np.where(np.reshape(runs, np.shape(runs) + (1,) * (dims - np.ndim(runs))), new, old)


def _fits(aval: Any) -> bool:
    return can_be_known(aval) and 0 < math.prod(aval.shape) <= _LARGEST_RESULT


def _agree(eqn: Any, operands: Sequence[Any]) -> bool:
    """Whether all operands have the shapes of their variables.

    A scalar with one value per program of a grid does not; elementwise rules accept it anyway.
    """
    is_scalar = all(atom.aval.shape == () for atom in (*eqn.invars, eqn.outvars[0]))
    if is_scalar and eqn.primitive.name in _PER_PROGRAM:
        return True
    return all(
        np.shape(v) == atom.aval.shape and np.size(v)
        for v, atom in zip(operands, eqn.invars, strict=True)
    )


def _despite_unknowns(eqn: Any, known: Sequence[Known]) -> Known:
    """`False & unknown`, `True | unknown`, and a select whose chosen case is known."""
    name = eqn.primitive.name
    if name == "select_n":
        which = typed(known[0], eqn.invars[0].aval)
        if which is None or np.ndim(which):
            return None
        return typed(known[1 + int(which)], eqn.outvars[0].aval)
    absorbing = {"and": 0, "or": 1, "mul": 0}.get(name) if not _has_floats(eqn) else None
    is_bool = eqn.outvars[0].aval.dtype == bool
    if absorbing is None or (name == "or" and not is_bool):
        return None
    for value, atom in zip(known, eqn.invars, strict=True):
        value = typed(value, atom.aval)
        if value is not None and np.ndim(value) == 0 and value == absorbing:
            return typed(value, eqn.outvars[0].aval)
    return None


def _divide(a: Any, b: Any) -> Any:
    """Rounds towards zero. In XLA, x / 0 is −1 (all bits set), and the least number / −1 itself."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        return np.where(b == 0, np.iinfo(a.dtype).max, a // safe)
    floor = np.where(safe == -1, -a, a // np.where(safe == -1, 1, safe))
    is_low = (floor * safe != a) & ((a < 0) != (safe < 0)) & (safe != -1)
    return np.where(b == 0, -1, floor + is_low)


def _remainder(a: Any, b: Any) -> Any:
    """Has the sign of the dividend. In XLA, x rem 0 is x."""
    quotient = np.asarray(_divide(a, b)).astype(a.dtype)
    return np.where(b == 0, a, a - quotient * b)


def _shift_left(a: Any, by: Any) -> Any:
    is_inside, by = _shift(a, by)
    return np.where(is_inside, a << by, 0)


def _shift_right_logical(a: Any, by: Any) -> Any:
    is_inside, by = _shift(a, by)
    bits = _unsigned(a)
    return np.where(is_inside, bits >> by.astype(bits.dtype), 0)


def _shift_right_arithmetic(a: Any, by: Any) -> Any:
    is_inside, by = _shift(a, by)
    signed = a.view(f"i{a.dtype.itemsize}")  # XLA also treats unsigned numbers as signed here
    return np.where(is_inside, signed >> by.astype(signed.dtype), np.where(signed < 0, -1, 0))


def _shift(a: Any, by: Any) -> tuple[Any, Any]:
    """Whether a shift is within the width (unsigned, as in XLA), and a safe shift count."""
    bits = 8 * a.dtype.itemsize
    is_inside = (by >= 0) & (by < bits)
    return is_inside, np.where(is_inside, by, 0).astype(a.dtype)


def _unsigned(a: Any) -> Any:
    return np.asarray(a).view(f"u{a.dtype.itemsize}")


def _leading_zeros(a: Any) -> Any:
    lengths = np.frompyfunc(int.bit_length, 1, 1)(_unsigned(a).astype(object))
    return 8 * a.dtype.itemsize - lengths


def _power(base: Any, exponent: Any) -> Any:
    """An integer to the power of an (un)signed integer; None if any exponent is negative.

    Modulo 2⁶⁴, and so modulo any narrower dtype's range.
    """
    if np.any(exponent < 0):
        return None
    whole = (np.asarray(operand).astype(np.uint64) for operand in (base, exponent))
    return np.power(*whole).astype(base.dtype)


def _select(eqn: Any, operands: Sequence[Any]) -> Any:
    which, *cases = operands
    which = np.asarray(which).astype(np.int64)
    if which.ndim == 0:
        return cases[min(max(int(which), 0), len(cases) - 1)]
    result = cases[0]
    for number, case in enumerate(cases[1:], 1):
        result = np.where(which >= number, case, result)
    return result


def _convert(eqn: Any, operands: Sequence[Any]) -> Any:
    return np.asarray(operands[0]).astype(eqn.outvars[0].aval.dtype)


def _on_values(function: Callable[..., Any]) -> IntegerRule:
    return lambda eqn, operands: function(*operands)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
    "add_any": np.add, "sign": np.sign, "max": np.maximum, "min": np.minimum,
    "div": _divide, "rem": _remainder, "pow": _power,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shift_left": _shift_left, "shift_right_logical": _shift_right_logical,
    "shift_right_arithmetic": _shift_right_arithmetic, "square": lambda a: a * a,
    "population_count": lambda a: np.bitwise_count(_unsigned(a)), "clz": _leading_zeros,
}  # fmt: skip
_ELEMENTWISE: dict[str, IntegerRule] = {
    **{name: _on_values(function) for name, function in _FUNCTIONS.items()},
    "select_n": _select,
    "convert_element_type": _convert,
    "integer_pow": lambda eqn, operands: _power(operands[0], np.int64(eqn.params["y"])),
    **dict.fromkeys(
        ["copy", "copy_p", "multiple_of", "name", "pbroadcast", "pvary", "reduced_vary_cast_p",
         "sharding_constraint"],
        lambda eqn, operands: operands[0],
    ),
}  # fmt: skip
_PER_PROGRAM = {*_ELEMENTWISE, "reshape", "squeeze"}
_RULES: dict[str, IntegerRule] = {**ARRAYS, **_ELEMENTWISE}
