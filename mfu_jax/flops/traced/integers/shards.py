"""What devices know inside `shard_map`: their part of a table, and their place in the mesh.

Splash attention over a sharded sequence skips blocks by such a table; a pipeline stage chooses
its branch by its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfu_jax.flops.traced.integers.known_values import Known
from mfu_jax.flops.traced.jaxprs import inner_jaxprs

_MOST_SHARES = 64  # the body is walked for each of them
_MOST_ELEMENTS = 2**26  # the most that are compared

MeshCoordinates = Mapping[str, int]  # mesh coordinates of a device, by axis


class DeviceShare(NamedTuple):
    """Devices that know the same values.

    Attributes:
        values: known values of the body's operands.
        place: their coordinates on the requested axes; if not merged, on every relevant axis.
        places: the coordinates of each of them, on every relevant axis.
        devices: number of devices.
    """

    values: list[Known]
    place: MeshCoordinates
    places: list[MeshCoordinates]
    devices: int


def manual_axes(eqn: Any) -> dict[str, int]:
    """The mesh axes along which each device runs the body, with their sizes."""
    sizes = eqn.params["mesh"].shape
    names = eqn.params[next(name for name in eqn.params if name.endswith("manual_axes"))]
    return {name: size for name, size in sizes.items() if name in names}


def shares(
    eqn: Any, known: Sequence[Known], asked: Collection[str], *, merged: bool
) -> list[DeviceShare]:
    """The known operands of a `shard_map`'s body, for all devices.

    Args:
        eqn: the `shard_map`.
        known: values of its operands.
        asked: mesh axes on which a device's place decides something.
        merged: whether devices that know the same values form one share.
    """
    sizes = manual_axes(eqn)
    (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]
    is_cut = [
        inner.aval.shape != outer.aval.shape
        for inner, outer in zip(jaxpr.invars, eqn.invars, strict=True)
    ]
    splits: list[Sequence[tuple[str, ...]] | None] = [
        _axes(spec) if cut and isinstance(value, np.ndarray) else None
        for spec, cut, value in zip(eqn.params["in_specs"], is_cut, known, strict=True)
    ]
    split_by = {axis for split in splits if split for axes in split for axis in axes}
    matter = {axis: size for axis, size in sizes.items() if axis in split_by or axis in asked}
    elements = sum(v.size for v, split in zip(known, splits, strict=True) if split)
    others = math.prod(sizes.values()) // math.prod(matter.values())
    if math.prod(matter.values()) * max(1, elements) > _MOST_ELEMENTS:
        matter, splits, others = {}, [None] * len(splits), math.prod(sizes.values())
    found: dict[Any, DeviceShare] = {}
    for place in all_places(matter):
        values: list[Known] = [
            value[_block(value.shape, split, place, sizes)] if split else None if cut else value
            for value, split, cut in zip(known, splits, is_cut, strict=True)
        ]
        chosen = {axis: place[axis] for axis in matter if axis in asked or not merged}
        parts = (v.tobytes() for v, split in zip(values, splits, strict=True) if split)
        key = (*chosen.values(), *parts)
        places = found[key].places if key in found else []
        places.append(place)
        found[key] = DeviceShare(values, chosen, places, others * len(places))
    if len(found) > _MOST_SHARES:
        values = [None if cut else value for value, cut in zip(known, is_cut, strict=True)]
        return [DeviceShare(values, {}, [{}], math.prod(sizes.values()))]
    return list(found.values())


def all_places(sizes: Mapping[str, int]) -> Iterator[MeshCoordinates]:
    """All places of a mesh with these axes."""
    for place in itertools.product(*map(range, sizes.values())):
        yield dict(zip(sizes, place, strict=True))


def joined(eqn: Any, result: int, parts: Sequence[tuple[DeviceShare, Known]]) -> Known:
    """A result of a `shard_map`, assembled from the part that each device computes.

    Args:
        eqn: the `shard_map`.
        result: index of the result.
        parts: the parts of all devices.
    """
    sizes, aval = manual_axes(eqn), eqn.outvars[result].aval
    devices, elements = math.prod(sizes.values()), math.prod(aval.shape)
    if any(part is None for _, part in parts) or devices * elements > _MOST_ELEMENTS:
        return None
    by_place = {tuple(place.values()): v for share, v in parts for place in share.places}
    matter = parts[0][0].places[0].keys()
    split = _axes(eqn.params["out_specs"][result])
    whole: Any = np.zeros(aval.shape, aval.dtype)
    for place in all_places(sizes):
        part = by_place[tuple([place[axis] for axis in matter])]
        whole[_block(whole.shape, split, place, sizes)] = part
    return whole[()]


def _axes(spec: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each dimension."""
    return [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]


def _block(
    shape: Sequence[int],
    split: Sequence[tuple[str, ...]],
    at: MeshCoordinates,
    sizes: Mapping[str, int],
) -> tuple[slice, ...]:
    """The slices of an array that a device holds."""
    block = []
    for length, axes in zip(shape, split, strict=False):
        number = 0
        for axis in axes:
            number = number * sizes[axis] + at[axis]
        part = length // math.prod(sizes[axis] for axis in axes)
        block.append(slice(number * part, (number + 1) * part))
    return tuple(block)
