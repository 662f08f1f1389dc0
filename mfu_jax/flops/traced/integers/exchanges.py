"""Integers exchanged by the devices of a `shard_map`: reductions, gathers and permutes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mfu_jax.flops.traced.integers.known_values import Known

_COMBINED = {
    "pmax": np.maximum,
    "pmin": np.minimum,
    "psum": np.add,
    "psum_invariant": np.add,
}
_GATHER = frozenset({"all_gather", "all_gather_invariant"})
EXCHANGES = frozenset({"ppermute", *_COMBINED, *_GATHER})


def exchange_axes(eqn: Any) -> list[str]:
    """The mesh axes along which an equation exchanges; an empty string for any other axis."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else axes
    return [axis if isinstance(axis, str) else "" for axis in axes]


def received(eqn: Any, places: Sequence[Mapping[str, int]], sent: Sequence[Known]) -> list[Known]:
    """What the device at each place receives; None if not known.

    Args:
        eqn: the exchange.
        places: mesh coordinates of the devices, on the axes of the exchange and any others.
        sent: what each device sends.
    """
    results: list[Known] = [None] * len(places)
    if eqn.params.get("axis_index_groups"):
        return results
    axes = exchange_axes(eqn)
    groups: dict[Any, list[int]] = defaultdict(list)  # indices of places that exchange
    for number, place in enumerate(places):
        groups[tuple(at for axis, at in place.items() if axis not in axes)].append(number)
    for group in groups.values():
        group.sort(key=lambda number: [places[number][axis] for axis in axes])
        found = _received(eqn, [sent[number] for number in group])
        for number, value in zip(group, found, strict=True):
            results[number] = value
    return results


def _received(eqn: Any, sent: list[Known]) -> list[Known]:
    """What the devices of one group receive, in the order of their places."""
    name = eqn.primitive.name
    if name == "ppermute":
        known = next((value for value in sent if value is not None), None)
        found = [None if known is None else np.zeros_like(known)] * len(sent)
        for source, target in eqn.params["perm"]:
            found[target] = sent[source]
        return found
    if any(value is None for value in sent):
        return [None] * len(sent)
    if name in _GATHER:
        join = np.concatenate if eqn.params["tiled"] else np.stack
        return [join(sent, eqn.params["all_gather_dimension"])] * len(sent)
    with np.errstate(over="ignore"):
        return [functools.reduce(_COMBINED[name], sent)] * len(sent)
