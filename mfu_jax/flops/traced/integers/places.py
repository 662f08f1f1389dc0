"""Known values on all devices of a `shard_map`, evaluated together if these exchange them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mfu_jax.flops.traced.integers.known_values import Known


class ByPlace:
    """A known value or None, for the device at each place."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Known]) -> None:
        self.values = tuple(values)


def together(values: Sequence[Known]) -> Known:
    """The values at all places; a single one if all are equal."""
    first, *others = values
    is_same = first is None and all(v is None for v in others)
    if is_same or all(_is_same(first, other) for other in others):
        return first
    return ByPlace(values)


def at_place(value: Known, number: int | None) -> Known:
    """The value on the device at one place, given the place's number."""
    if isinstance(value, ByPlace):
        return None if number is None else value.values[number]
    return value


def at_each(function: Callable[..., Known], *values: Known) -> Known:
    """Applies a function to the values at each place."""
    count = next((len(v.values) for v in values if isinstance(v, ByPlace)), None)
    if count is None:
        return function(*values)
    return together([function(*(at_place(v, number) for v in values)) for number in range(count)])


def is_known(value: Known) -> bool:
    """Whether a value is known at every place."""
    return all(v is not None for v in _lanes(value))


def any_place(value: Known) -> bool:
    """Whether something holds at any place (of any program of a grid)."""
    return any(np.any(v) for v in _lanes(value))


def equal(a: Known, b: Known) -> bool:
    """Whether two values are known and equal, at every place."""
    if a is b:
        return is_known(a)
    if isinstance(a, ByPlace) and isinstance(b, ByPlace):
        return all(map(equal, a.values, b.values))
    if isinstance(a, ByPlace) or isinstance(b, ByPlace):
        return False
    return a is not None and b is not None and bool(np.array_equal(a, b))


def content(value: Known) -> Any:
    """A hashable form, the same for equal values."""
    return tuple(None if v is None else np.asarray(v).tobytes() for v in _lanes(value))


def _lanes(value: Known) -> tuple[Known, ...]:
    return value.values if isinstance(value, ByPlace) else (value,)


def _is_same(a: Known, b: Known) -> bool:
    return equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
