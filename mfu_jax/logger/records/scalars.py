"""Converts the values that a loop gives as metrics to plain numbers, or gives a reason why not.

After that every value is a Python int or float. NaN and Inf pass: they are news, not mistakes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np

from mfu_jax.logger.records.drop_large import MOST_NUMBERS

# Anything shorter is below clock resolution, anything longer is over 30 years: not a step.
SHORTEST_SECONDS = 1e-9
LONGEST_SECONDS = 1e9

# Classes already known to be JAX arrays: `isinstance` would ask the metaclass each time.
_ARRAY_CLASSES: set[type] = set()
_NUMBER_CLASSES = frozenset((int, float))
_item = operator.methodcaller("item")


def quick_numbers(values: Collection[Any]) -> list[int | float] | None:
    """The numbers of device scalars, as most metrics are; None if a closer look is needed.

    Uses only a few calls into C, because it runs for every step.
    """
    if not _ARRAY_CLASSES.issuperset(map(type, values)):
        return None
    try:
        numbers = [*map(_item, map(np.asarray, values))]
    except Exception:  # one is deleted, not a scalar, or a typed key; a closer look tells which
        return None
    return numbers if _NUMBER_CLASSES.issuperset(map(type, numbers)) else None


def plain_number(value: Any) -> int | float:
    """A scalar of any library as a Python int or float; copies it from the device.

    Raises:
        ValueError: it is not a number, or an integer too large for a float.
        Exception: whatever reading it raises.
    """
    if type(value) is float:
        return value
    if isinstance(value, jax.Array):
        _ARRAY_CLASSES.add(type(value))
        return _of_device(value)
    if isinstance(value, int):
        return _plain_int(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str | bytes):
        raise ValueError("it is text; expected a number; usually a label; use write_text for it")
    return _of_array(np.asarray(value))


def is_vector(value: Any) -> bool:
    """True for a one-dimensional array of two or more numbers, at most `MOST_NUMBERS`."""
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return len(shape) == 1 and 1 < shape[0] <= MOST_NUMBERS


def plain_numbers(vector: Any) -> list[int | float]:
    """The numbers of a vector, each converted by `plain_number`.

    Raises:
        Exception: see `plain_number`.
    """
    return [plain_number(item) for item in np.asarray(vector)]


def is_deleted(value: Any) -> bool:
    """True if `value` is an array whose buffer was donated or deleted."""
    deleted = getattr(value, "is_deleted", None)
    return deleted is not None and bool(deleted())


def plain_seconds(value: Any) -> float | None:
    """A step time given by the caller, as a float; None if it cannot be a step time.

    >>> plain_seconds(np.float32(0.5))
    0.5
    >>> [plain_seconds(value) for value in (float("nan"), -1.0, 0, "1.5", 1e308, True)]
    [None, None, None, None, None, None]
    """
    if isinstance(value, bool | str | bytes):
        return None
    try:
        seconds = float(value)
    except Exception:  # whatever it is, it is not a time
        return None
    return seconds if SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS else None


def start_copies(values: Iterable[Any]) -> None:
    """Starts all copies to the host before anyone waits for the first of them.

    `np.asarray` then finds each value there; on a CPU it reads in place, seven times faster than
    `jax.device_get`.
    """
    if _is_on_cpu():
        return
    for value in values:
        start = getattr(value, "copy_to_host_async", None)
        if start is not None and not is_deleted(value):
            start()


@functools.cache
def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _plain_int(value: int) -> int:
    try:
        float(value)
    except OverflowError:
        raise ValueError(
            "it is an integer that no 64-bit float can hold; expected at most 1.8e308; usually a "
            "count that overflowed; log its logarithm"
        ) from None
    return value


def _of_device(value: jax.Array) -> int | float:
    if value.shape != () and value.size != 1:
        raise ValueError(_wrong_shape(value.shape))
    try:
        array = np.asarray(value)
    except RuntimeError:
        if not is_deleted(value):
            raise
        raise ValueError(
            "it was deleted before it could be read; expected an output that lives for one more "
            "step; usually it is part of the donated state; return a copy of it as a separate "
            "metric"
        ) from None
    return _of_array(array)


def _of_array(array: np.ndarray) -> int | float:
    if array.size != 1:
        raise ValueError(_wrong_shape(array.shape))
    kind = array.dtype.kind
    if kind in "fiu":
        number = array.item()
        return number if type(number) is float else int(number) if kind != "f" else float(number)
    if kind in "cUSMm":
        raise ValueError(
            f"it is of dtype {array.dtype}; expected a real number; usually a label, a time, or an "
            f"eigenvalue; log the part of it that you need"
        )
    number = array.reshape(-1)[0]
    return int(number) if kind == "b" else float(number)


def _wrong_shape(shape: tuple[int, ...]) -> str:
    return (
        f"it has shape {shape}; expected one number; usually a loss per token or per device; take "
        f"its mean inside the step"
    )
