"""What devices know of constants that `shard_map` splits: each has its own part of a table.

Splash attention over a split sequence skips blocks by such a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mfu_jax.flops.traced.known_values import ConstantTable, Known
from mfu_jax.flops.traced.tracing import inner_jaxprs

_MOST_PARTS = 64  # the body is walked for each


def known_by_devices(eqn: Any, known: Sequence[Known]) -> Iterator[tuple[list[Known], int]]:
    """The known operands of a `shard_map`'s body, and how many devices have them.

    Args:
        eqn: the `shard_map`.
        known: values of its operands.
    """
    (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]
    sizes = eqn.params["mesh"].shape
    manual = eqn.params[next(name for name in eqn.params if name.endswith("manual_axes"))]
    devices = math.prod(sizes[axis] for axis in manual)
    is_part = [
        inner.aval.shape != outer.aval.shape
        for inner, outer in zip(jaxpr.invars, eqn.invars, strict=True)
    ]
    splits: list[Sequence[tuple[str, ...]] | None] = [
        _axes(spec) if cut and isinstance(value, ConstantTable | np.ndarray) else None
        for spec, cut, value in zip(eqn.params["in_specs"], is_part, known, strict=True)
    ]
    axes = sorted({axis for split in splits if split for axes in split for axis in axes})
    parts = math.prod(sizes[axis] for axis in axes)
    if parts > _MOST_PARTS:
        splits, axes, parts = [None] * len(known), [], 1
    for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
        at = dict(zip(axes, place, strict=True))
        values = [
            _part(value, split, at, sizes) if split else None if cut else value
            for value, split, cut in zip(known, splits, is_part, strict=True)
        ]
        yield values, devices // parts


def _axes(spec: Any) -> list[tuple[str, ...]]:
    """The axes of the mesh that split each dimension."""
    return [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]


def _part(
    value: Known, split: Sequence[tuple[str, ...]], at: Mapping[str, int], sizes: Mapping[str, int]
) -> Known:
    """The part of an array that a device has."""
    array = value.values if isinstance(value, ConstantTable) else value
    for dim, axes in enumerate(split):
        number = 0
        for axis in axes:
            number = number * sizes[axis] + at[axis]
        length = array.shape[dim] // math.prod(sizes[axis] for axis in axes)
        array = array.take(range(number * length, (number + 1) * length), axis=dim)
    return ConstantTable(array) if isinstance(value, ConstantTable) else array
