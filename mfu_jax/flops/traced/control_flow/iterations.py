"""Iterations of a loop, grouped by the decisions that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mfu_jax.flops.traced.integers.known_values import Known


class Decided(NamedTuple):
    """The known values that settle the decisions in one jaxpr.

    Attributes:
        key: equal for runs that take the same decisions.
        values: the known values, by variable.
    """

    key: tuple[Any, ...] = ()
    values: Mapping[Any, Known] = {}


class IterationGroup(NamedTuple):
    """Iterations of a loop that take the same decisions.

    Attributes:
        decided: the decisions.
        times: number of these iterations.
        running: whether the loop still runs then; by place if devices leave it at different times.
    """

    decided: Decided
    times: int
    running: Known = True
