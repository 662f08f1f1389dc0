"""Integers that are known while tracing: loop counters, bounds, positions in a kernel's grid.

A known value is a Python number, a numpy array with one number per program of a kernel's grid, or a
`ConstantTable`. All rules work on numbers and arrays alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from mfu_jax.jax_internals import host_value

Known = Any  # None: unknown

_LARGEST_TABLE = 2**24  # elements


class ConstantTable:
    """A constant array of the traced function, by identity: ints, booleans, or a float mask."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


def constant(value: Any) -> Known:
    """The known value of a constant: a scalar, a `ConstantTable`, or None."""
    value = host_value(value)
    if isinstance(value, Tracer):  # JAX 0.11 leaves some among a kernel's constants
        return None
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is None or isinstance(value, np.generic):
        return scalar(value)
    kind = np.dtype(dtype).kind if isinstance(dtype, np.dtype | type) else "V"
    # Floats on a device are parameters; a host array may be a mask that is added to scores.
    is_readable = kind in "iub" or (kind == "f" and isinstance(value, np.ndarray))
    is_small = is_readable and np.prod(shape, dtype=object) <= _LARGEST_TABLE
    if is_small and getattr(value, "is_fully_addressable", True):
        values = np.asarray(value)
        return ConstantTable(values) if shape else scalar(values)
    return None


def scalar(value: Any) -> int | float | None:
    """A scalar constant as a Python number, None if its value is not available."""
    value = host_value(value)
    if isinstance(value, int | float):
        return value
    if getattr(value, "shape", None) != () or not isinstance(value, np.ndarray | np.generic):
        return None
    item = value.item()
    return item if isinstance(item, int | float) else None


def _divide(a: Any, b: Any) -> Any:
    """Integer division towards zero, as in XLA."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": lambda a, b: a - b * _divide(a, b),
    "max": np.maximum,
    "min": np.minimum,
    "neg": lambda a: -a,
    "sign": np.sign,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": np.logical_not,
    "copy": lambda a: a,
    "multiple_of": lambda a: a,
    "squeeze": lambda a: a,
    "reshape": lambda a: a,
}


def is_integer_scalar(aval: Any) -> bool:
    """Whether values of this type are known; typed random keys have a dtype without a kind."""
    return aval.shape == () and getattr(aval.dtype, "kind", "") in {"i", "u", "b"}


def evaluate(eqn: Any, known: Sequence[Known]) -> Known:
    """The value of an integer scalar computed from known scalars, None if unknown."""
    name = eqn.primitive.name
    if any(v is None or isinstance(v, ConstantTable) for v in known) or len(eqn.outvars) != 1:
        return None
    aval = eqn.outvars[0].aval
    if not is_integer_scalar(aval):
        return None
    if name == "convert_element_type":
        result = np.asarray(known[0]).astype(np.bool_ if aval.dtype.kind == "b" else np.int64)
    elif name == "select_n":
        which, *cases = known
        result = np.choose(np.asarray(which).astype(np.int64), cases)
    elif name == "not" and aval.dtype.kind != "b":
        return None
    elif name in _ARITHMETIC:
        result = _ARITHMETIC[name](*known)
    else:
        return None
    return result if np.ndim(result) else np.asarray(result).item()
