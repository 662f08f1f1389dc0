"""How often the loops of a jaxpr run, and what decides the work of each iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfu_jax.flops.traced.integers.evaluation import Integers, TooLongError, Values
from mfu_jax.flops.traced.integers.needs import Need, Scan, While
from mfu_jax.flops.traced.known_values import Known
from mfu_jax.flops.traced.shards import Place, Share

_LARGEST_KEY = 4096  # elements of an array that is compared by its contents


class Decided(NamedTuple):
    """The known values that settle the decisions inside one jaxpr.

    Attributes:
        key: equal for runs that take the same decisions.
        values: by variable.
    """

    key: tuple[Any, ...] = ()
    values: Mapping[Any, Known] = {}


class Runs(NamedTuple):
    """Iterations of a loop that take the same decisions."""

    decided: Decided
    times: int


class Decisions:
    """What is known of the decisions in one function's jaxprs.

    Args:
        constants: known values of constants inside the jaxprs, by variable.
    """

    def __init__(self, constants: Mapping[Any, Known]) -> None:
        self._integers = Integers(constants)

    @property
    def place(self) -> Place:
        """Of the device that decides, on the axes of meshes that matter."""
        return self._integers.place

    def by_place(
        self, eqn: Any, known: Sequence[Known], run: Callable[[Sequence[Known]], Any]
    ) -> list[tuple[Share, Any]]:
        """What `run` makes of a `shard_map`'s operands, for devices that decide differently."""
        return self._integers.by_place(eqn, known, run)

    def inside(self, jaxpr: Any, known: Sequence[Known]) -> Decided:
        """The decisions of one run of a jaxpr with these inputs."""
        need = self._integers.needs.of(jaxpr, decides=True)
        return self._decided(need, self._integers.run(need, known)) if need.decisive else Decided()

    def of_scan(self, scan: Scan, operands: Sequence[Known]) -> list[Runs]:
        """The iterations of a scan, by what they decide."""
        if not scan.length:
            return []
        need = self._integers.needs.of(scan.body, decides=True)
        if all(i < scan.consts for i in need.inputs):
            return [Runs(self._steady(scan.body, scan.consts, operands, {}), scan.length)]
        try:
            return self._collect(
                lambda visit: self._integers.scan(scan, operands, (), visit),
                self._integers.needs.scan_body(scan, (), decides=True),
            )
        except TooLongError:
            carry = dict(enumerate(operands[scan.consts : scan.consts + scan.carries]))
            return [Runs(self._steady(scan.body, scan.consts, operands, carry), scan.length)]

    def of_while(self, loop: While, operands: Sequence[Known]) -> tuple[int | None, list[Runs]]:
        """How often a while loop runs, None if that depends on data, and by what it decides."""
        _, consts, start = loop.split(operands)
        need = self._integers.needs.of(loop.body, decides=True)
        carry: dict[int, Known] = {}
        if any(i >= loop.body_consts for i in need.inputs):
            try:
                runs = self._collect(
                    lambda visit: self._integers.while_loop(loop, operands, (), visit),
                    self._integers.needs.while_body(loop, (), decides=True),
                )
                return sum(run.times for run in runs), runs
            except TooLongError:
                carry = dict(enumerate(start))
        trips, _ = self._integers.while_loop(loop, operands, ())
        trips = None if trips is None else int(trips)
        if trips == 0:  # what never runs may never end
            return 0, []
        decided = self._steady(loop.body, loop.body_consts, consts, carry)
        return trips, [Runs(decided, 1 if trips is None else trips)]

    def _steady(
        self, body: Any, consts: int, operands: Sequence[Known], carry: dict[int, Known]
    ) -> Decided:
        """What holds in every iteration: constants, and what no iteration changes."""
        fixed, rest = list(operands[:consts]), len(body.invars) - consts - len(carry)
        if carry:
            need = self._integers.needs.loop_body(body, consts, len(carry), (), decides=True)
            carry = self._integers.unchanged(need, fixed, carry, rest)
        return self.inside(body, [*fixed, *carry.values(), *[None] * rest])

    def _collect(self, run: Callable[[Callable[[Values], None]], Any], need: Need) -> list[Runs]:
        found: dict[Any, Runs] = {}

        def visit(values: Values) -> None:
            decided = self._decided(need, values)
            times = found[decided.key].times if decided.key in found else 0
            found[decided.key] = Runs(found.get(decided.key, (decided, 0))[0], times + 1)

        run(visit)
        return list(found.values())

    def _decided(self, need: Need, values: Values) -> Decided:
        known = {v: self._integers.read(values, v) for v in need.decisive}
        return Decided(tuple(map(_key, known.values())), known)


def jaxpr_trip_count(loop: While, operands: Sequence[Known]) -> Known:
    """Iterations of a `while` without constants of its own: a number, an array, or None.

    Args:
        loop: the parts of the loop.
        operands: values of its operands; scalars may have one for each program of a grid.
    """
    trips, _ = Integers().while_loop(loop, operands, ())
    return trips if trips is None or np.ndim(trips) else int(trips)


def _key(value: Known) -> Any:
    if np.ndim(value) == 0:
        return value
    if value.size > _LARGEST_KEY:
        return id(value)  # the key's owner holds it
    return value.shape, value.tobytes()
