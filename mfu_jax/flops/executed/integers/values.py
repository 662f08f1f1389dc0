"""Values: small arrays of integers, and the ranges of their dtypes.

A value is an int (any array of one element), an `IntegerTable` (a small array), or None: unknown,
because it depends on data or on an instruction that is not evaluated. If devices exchange integers,
the values of all devices are evaluated together: `ByDevice` holds those that differ.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.text import COMMENT

MAX_ELEMENTS = 1 << 14  # of a table: the pattern of a model's layers is far smaller
_DTYPE = re.compile(r"(s|u)(2|4|8|16|32|64)")


class IntegerTable:
    """A small array of integers in row-major order; compared by identity, which is cheap."""

    __slots__ = ("elements",)

    def __init__(self, elements: Sequence[int]) -> None:
        self.elements = tuple(elements)


class ByDevice(NamedTuple):
    """Each device's value, by its number; None if unknown or if it takes no part."""

    values: tuple[Value, ...]


Value: TypeAlias = "int | IntegerTable | ByDevice | None"
Compute: TypeAlias = Callable[[Sequence[Value]], Value]
Wrap: TypeAlias = Callable[[int], int]


@functools.lru_cache(maxsize=64)
def value_range(dtype: str) -> tuple[int, int] | None:
    """The smallest and largest value of an integer dtype; None for other dtypes.

    >>> value_range("s8"), value_range("f32")
    ((-128, 127), None)
    """
    if dtype == "pred":
        return 0, 1
    match = _DTYPE.fullmatch(dtype)
    if not match:
        return None
    bits = int(match[2])
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if match[1] == "s" else (0, (1 << bits) - 1)


@functools.lru_cache(maxsize=64)
def wrap_of(dtype: str) -> Wrap:
    """Reduces an integer to the values of a dtype, as overflow does."""
    low, high = value_range(dtype) or (0, 0)
    if dtype == "pred":
        return lambda value: int(value != 0)
    count = high - low + 1
    return lambda value: value if low <= value <= high else (value - low) % count + low


def wrapped(dtype: str, value: int) -> int:
    """An integer reduced to the values of a dtype, as overflow does.

    >>> wrapped("s8", 130), wrapped("u8", -1)
    (-126, 255)
    """
    return wrap_of(dtype)(value)


def is_small_integer(shape: Shape, largest: int = MAX_ELEMENTS) -> bool:
    """Whether an array can be a value, of at most `largest` elements."""
    return value_range(shape.dtype) is not None and 0 < shape.size <= largest


def make_value(elements: Sequence[int]) -> Value:
    """The value with the given elements."""
    return elements[0] if len(elements) == 1 else IntegerTable(elements)


def constant_value(text: str, shape: Shape) -> Value:
    """The value of a ``constant``; None if its text is elided or not of integers.

    >>> constant_value("{ /*i0=0*/ { 1, -2 } }", Shape("s32", (1, 2))).elements
    (1, -2)
    """
    words = re.split(r"[\s{},]+", COMMENT.sub("", text).strip("{} \n"))
    try:
        elements = [_BOOLEANS[w] if w in _BOOLEANS else int(w) for w in words]
    except ValueError:
        return None
    wrap = wrap_of(shape.dtype)
    return make_value([wrap(e) for e in elements]) if len(elements) == shape.size else None


_BOOLEANS = {"true": 1, "false": 0}


def elements_of(value: Value) -> tuple[int, ...]:
    if isinstance(value, IntegerTable):
        return value.elements
    return (value,) if isinstance(value, int) else ()


def bits_of(dtype: str) -> int:
    low, high = value_range(dtype) or (0, 1)
    return (high - low).bit_length()
