"""Integers that the devices of a `shard_map` exchange: their sums, and what they pass on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfu_jax.flops.traced.known_values import Known
from mfu_jax.flops.traced.shards import Place

_COMBINED = {
    "pmax": np.maximum,
    "pmin": np.minimum,
    "psum": np.add,
    "psum_invariant": np.add,
}


def exchange_axes(eqn: Any) -> set[str]:
    """The axes of the mesh along which an equation exchanges; empty strings for any others."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    axes = (axes,) if isinstance(axes, str) else axes
    return {axis if isinstance(axis, str) else "" for axis in axes}


def received(eqn: Any, place: Place, sent: Sequence[tuple[Place, Known]]) -> Known:
    """What the device at a place receives; None if it is not known.

    Args:
        eqn: the exchange.
        place: of the device.
        sent: what each device sends, by its place on the axes of the exchange.
    """
    if any(value is None for _, value in sent) or eqn.params.get("axis_index_groups"):
        return None
    if eqn.primitive.name in _COMBINED:
        with np.errstate(over="ignore"):
            return functools.reduce(_COMBINED[eqn.primitive.name], [value for _, value in sent])
    if len(sent[0][0]) != 1:
        return None
    ((axis, _),) = sent[0][0].items()
    for source, target in eqn.params["perm"]:
        if target == place[axis]:
            return next(value for there, value in sent if there[axis] == source)
    return np.zeros_like(sent[0][1])
