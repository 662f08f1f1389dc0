"""Trip counts of a jaxpr's `while` loops whose condition compares a counter with a bound."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mfu_jax.flops.traced.known_values import (
    ConstantTable,
    Known,
    evaluate,
    is_integer_scalar,
    scalar,
)
from mfu_jax.flops.traced.tracing import inner_jaxprs
from mfu_jax.jax_internals import Literal

_MAX_SIMULATED = 10_000  # iterations of a counter that does not grow by a constant: bounds the time
_MAX_DEPTH = 100
_COMPARE = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "ne", "eq")}
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}


def jaxpr_trip_count(
    condition: Any,
    body: Any,
    known: Sequence[Known],
    cond_consts: int,
    body_consts: int,
    constants: Mapping[Any, Known] | None = None,
) -> Known:
    """Iterations of a `while`: a number, an array (one per program of a grid), or None.

    Follows the few integers that the condition depends on through three iterations, and through all
    of them if they do not grow linearly.

    Args:
        condition: the open jaxpr (constants, carry) → bool.
        body: the open jaxpr (constants, carry) → carry.
        known: values of the condition's constants, the body's constants, the initial carry.
        cond_consts: number of the condition's constants.
        body_consts: number of the body's constants.
        constants: known values of constants inside the two jaxprs.
    """
    loop = _Loop(
        condition=condition,
        body=body,
        cond_fixed=known[:cond_consts],
        body_fixed=known[cond_consts : cond_consts + body_consts],
        start=known[cond_consts + body_consts :],
        constants=constants or {},
    )
    carry = loop.first_carry()
    distances: list[Any] = []
    trips: Any = 0
    runs: Any = True
    for _ in range(_MAX_SIMULATED):
        name, distance = loop.distance(carry)
        if distance is None:
            return None
        distances.append(distance)
        if len(distances) == 4 and _is_even(distances):
            return _closed_form(name, distances[0], distances[1] - distances[0])
        runs = runs & _COMPARE[name](distance, 0)
        if not np.any(runs):
            return trips if np.ndim(trips) else int(trips)
        trips = trips + np.asarray(runs, np.int64)
        carry = loop.next_carry(carry)
    return None


@dataclass(kw_only=True)
class _Loop:
    """The integers that one loop's condition depends on: entries of its carry, by index."""

    condition: Any
    body: Any
    cond_fixed: Sequence[Known]
    body_fixed: Sequence[Known]
    start: Sequence[Known]
    constants: Mapping[Any, Known]
    needed: set[int] = field(default_factory=set)  # indices of the carry that were read

    def first_carry(self) -> dict[int, Known]:
        """Initial values of all entries that the condition depends on, found by trial."""
        carry: dict[int, Known] = {}
        while True:
            self.distance(carry)
            self.next_carry(carry)
            if self.needed <= carry.keys():
                return carry
            carry = {i: self.start[i] for i in self.needed}

    def distance(self, carry: Mapping[int, Known]) -> tuple[str, Known]:
        """The condition's comparison, and left − right."""
        scalars = self._scalars(self.condition, self.cond_fixed, carry)
        return scalars.comparison(self.condition.outvars[0])

    def next_carry(self, carry: Mapping[int, Known]) -> dict[int, Known]:
        """The same entries one iteration later."""
        scalars = self._scalars(self.body, self.body_fixed, carry)
        return {i: scalars.value(self.body.outvars[i]) for i in carry}

    def _scalars(self, jaxpr: Any, fixed: Sequence[Known], carry: Mapping[int, Known]) -> _Scalars:
        def read(index: int) -> Known:
            if index < len(fixed):
                return fixed[index]
            self.needed.add(index - len(fixed))
            return carry.get(index - len(fixed))

        return _Scalars(jaxpr, read, self.constants)


class _Scalars:
    """Evaluates a jaxpr's scalar integers on request."""

    def __init__(
        self,
        jaxpr: Any,
        read: Callable[[int], Known],
        constants: Mapping[Any, Known],
        depth: int = 0,
    ) -> None:
        self.read = read
        self.constants = constants
        self.depth = depth
        self.makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.inputs = {v: i for i, v in enumerate(jaxpr.invars)}

    def value(self, atom: Any) -> Known:
        """The value of a scalar integer, None if it is unknown or not a scalar integer."""
        if isinstance(atom, Literal):
            return scalar(atom.val)
        if not is_integer_scalar(atom.aval) or self.depth > _MAX_DEPTH:
            return None
        if atom in self.inputs:
            found = self.read(self.inputs[atom])
        elif atom not in self.makers:
            found = self.constants.get(atom)
        else:
            eqn = self.makers[atom]
            called = self._called(eqn)
            if called:
                return called[0].value(called[1].outvars[eqn.outvars.index(atom)])
            self.depth += 1
            found = evaluate(eqn, [self.value(operand) for operand in eqn.invars])
            self.depth -= 1
        return None if isinstance(found, ConstantTable | float) else found

    def comparison(self, atom: Any) -> tuple[str, Known]:
        """The comparison that makes a boolean, and left − right."""
        eqn = self.makers.get(atom) if not isinstance(atom, Literal) else None
        if eqn is None or self.depth > _MAX_DEPTH:
            return "", None
        called = self._called(eqn)
        if called:
            return called[0].comparison(called[1].outvars[eqn.outvars.index(atom)])
        if eqn.primitive.name not in _COMPARE:
            return "", None
        left, right = (self.value(operand) for operand in eqn.invars)
        if left is None or right is None or isinstance(left, float) or isinstance(right, float):
            return "", None
        # As integers: numpy does not subtract booleans.
        return eqn.primitive.name, left * 1 - right * 1

    def _called(self, eqn: Any) -> tuple[_Scalars, Any] | None:
        inner = inner_jaxprs(eqn.params) if eqn.primitive.name in _CALLS else {}
        if len(inner) != 1:
            return None
        ((jaxpr, *_),) = inner.values()
        called = _Scalars(
            jaxpr, lambda i: self.value(eqn.invars[i]), self.constants, self.depth + 1
        )
        return called, jaxpr


def _is_even(values: Sequence[Any]) -> bool:
    first, *others = (b - a for a, b in itertools.pairwise(values))
    return all(np.array_equal(first, other) for other in others)


def _closed_form(name: str, distance: Any, change: Any) -> Known:
    """The number of k = 0, 1, 2, … for which ``distance + k·change`` compares with 0 by `name`."""
    if np.ndim(change):
        if not np.all(change == change.flat[0]):
            return None
        change = change.flat[0]
    if name == "ne" and change:
        is_met = (distance % change == 0) & (-distance // change >= 0)
        trips = -distance // change if np.all(is_met) else None
    elif change and name in ("lt", "gt") and (change > 0) == (name == "lt"):
        trips = -(distance // change)
    elif change and name in ("le", "ge") and (change > 0) == (name == "le"):
        trips = -distance // change + 1
    elif not np.any(_COMPARE[name](distance, 0)):
        trips = distance * 0  # it never runs
    else:
        return None  # it never reaches its bound
    if trips is None:
        return None
    trips = np.maximum(trips, 0)
    return trips.astype(np.int64) if np.ndim(trips) else int(trips)
