"""Numbers known while tracing: loop counters, bounds, positions in a kernel's grid.

A known value is a number, a NumPy array (with its variable's shape, or, for a scalar inside a
Pallas kernel, one number per program of the grid), or a `ConstantTable`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer

from mfu_jax.util.jax_internals import host_value

Known = Any  # None: unknown

_LARGEST_TABLE = 2**24  # elements


class ConstantTable:
    """A constant array of the traced function, by identity: ints, booleans, or a float mask."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


def constant(value: Any) -> Known:
    """The known value of a constant: a scalar, a `ConstantTable`, or None."""
    value = host_value(value)
    if isinstance(value, Tracer):  # JAX 0.11 leaves tracers among a kernel's constants
        return None
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is None or isinstance(value, np.generic):
        return scalar(value)
    kind = np.dtype(dtype).kind if isinstance(dtype, np.dtype | type) else "V"
    # Floats on a device are parameters; a host array may be a mask added to scores.
    is_readable = kind in "iub" or (kind == "f" and isinstance(value, np.ndarray))
    is_small = is_readable and np.prod(shape, dtype=object) <= _LARGEST_TABLE
    if is_small and getattr(value, "is_fully_addressable", True):
        values = np.asarray(value)
        return ConstantTable(values) if shape else scalar(values)
    return None


def scalar(value: Any) -> int | float | None:
    """A scalar constant as a Python number; None if its value is not available."""
    value = host_value(value)
    if isinstance(value, int | float):
        return value
    if getattr(value, "shape", None) != () or not isinstance(value, np.ndarray | np.generic):
        return None
    item = value.item()
    return item if isinstance(item, int | float) else None


def can_be_known(aval: Any) -> bool:
    """Whether a variable of this type can be: integers, booleans, and float scalars."""
    return _kind(aval) in {"i", "u", "b"} or (is_float(aval) and aval.shape == ())


def is_float(aval: Any) -> bool:
    """Whether a variable's elements are float32 or float64."""
    return _kind(aval) == "f" and aval.dtype.itemsize >= 4


def _kind(aval: Any) -> str:
    return getattr(getattr(aval, "dtype", None), "kind", "")  # typed random keys have none
