"""How often the loops of a jaxpr run, and what decides the work of each iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mfu_jax.flops.traced.integers.evaluation import (
    IntegerEvaluator,
    IntegerValues,
    TooLongError,
    Visit,
)
from mfu_jax.flops.traced.integers.known_values import Known
from mfu_jax.flops.traced.integers.needs import Decided, IterationGroup, Need
from mfu_jax.flops.traced.integers.places import ByPlace, at_each, content
from mfu_jax.flops.traced.jaxprs import Scan, While

_LARGEST_KEY = 4096  # elements; a larger array is compared by identity, not by contents


class Decisions:
    """What is known about the decisions in one function's jaxprs.

    Args:
        constants: known values of constants inside the jaxprs, by variable.

    Attributes:
        devices: the devices that decide.
    """

    def __init__(self, constants: Mapping[Any, Known]) -> None:
        self._integers = IntegerEvaluator(constants)
        self.devices = self._integers.devices
        self._joint: dict[Any, tuple[Sequence[Known], Any]] = {}  # keeps what the keys identify

    def operands(self, eqn: Any, known: Sequence[Known]) -> Sequence[Known]:
        """The values that decisions inside an equation depend on: usually one device's."""
        if not self.devices.places or self._integers.needs.decides_jointly(eqn):
            return known
        return list(map(self.devices.here, known))

    def inside(self, jaxpr: Any, known: Sequence[Known]) -> Decided:
        """The decisions of one run of a jaxpr with these inputs."""
        need = self._integers.needs.of(jaxpr, decides=True)
        return self._of_devices(
            (jaxpr,), need.is_joint, known, lambda values: self._inside(need, values)
        )

    def _inside(self, need: Need, known: Sequence[Known]) -> Decided:
        return self._decided(need, self._integers.run(need, known)) if need.decisive else Decided()

    def _of_devices(
        self,
        what: tuple[Any, ...],
        is_joint: bool,
        known: Sequence[Known],
        decide: Callable[[Sequence[Known]], Any],
    ) -> Any:
        """The decision for one device, or once for all devices if they exchange integers."""
        if not self.devices.places:
            return decide(known)
        if not is_joint:
            with self.devices.alone():
                return decide(list(map(self.devices.here, known)))
        places = tuple(tuple(place.items()) for place in self.devices.places)
        owner = tuple(part if isinstance(part, int) else id(part) for part in what)
        key = owner, places, tuple(map(id, known))
        if key not in self._joint:
            self._joint[key] = (*what, *known), decide(known)
        return self._joint[key][1]

    def of_scan(self, scan: Scan, operands: Sequence[Known]) -> list[IterationGroup]:
        """The iterations of a scan, grouped by their decisions."""
        if not scan.length:
            return []
        need = self._integers.needs.scan_body(scan, (), decides=True)
        return self._of_devices(
            scan, need.is_joint, operands, lambda values: self._of_scan(scan, values)
        )

    def _of_scan(self, scan: Scan, operands: Sequence[Known]) -> list[IterationGroup]:
        need = self._integers.needs.of(scan.body, decides=True)
        carry: dict[int, Known] = {}
        if any(i >= scan.consts for i in need.inputs):
            try:
                return self._collect(
                    lambda visit: self._integers.scan(scan, operands, (), visit),
                    self._integers.needs.scan_body(scan, (), decides=True),
                )
            except TooLongError:
                carry = dict(enumerate(operands[scan.consts : scan.consts + scan.carries]))
        return [IterationGroup(self._steady(scan.body, scan.consts, operands, carry), scan.length)]

    def of_while(
        self, loop: While, operands: Sequence[Known]
    ) -> tuple[int | None, list[IterationGroup]]:
        """Trip count of a while loop (None if data-dependent), and its iterations by decision."""
        needs = self._integers.needs
        body = needs.while_body(loop, (), decides=True)
        is_joint = body.is_joint or needs.of(loop.condition, [0], decides=True).is_joint
        trips, runs = self._of_devices(
            loop, is_joint, operands, lambda values: self._of_while(loop, values)
        )
        here = self.devices.here
        own = [run._replace(times=here(run.times)) for run in runs if here(run.running)]
        return here(trips), own

    def _of_while(
        self, loop: While, operands: Sequence[Known]
    ) -> tuple[Known, list[IterationGroup]]:
        _, consts, start = loop.split(operands)
        need = self._integers.needs.of(loop.body, decides=True)
        carry: dict[int, Known] = {}
        if any(i >= loop.body_consts for i in need.inputs):
            try:
                runs = self._collect(
                    lambda visit: self._integers.while_loop(loop, operands, (), visit),
                    self._integers.needs.while_body(loop, (), decides=True),
                )
                trips: Known = 0
                for run in runs:
                    trips = at_each(lambda n, on, more=run.times: n + more * on, trips, run.running)
                return trips, runs
            except TooLongError:
                carry = dict(enumerate(start))
        trips, _ = self._integers.while_loop(loop, operands, ())
        trips = at_each(lambda n: None if n is None else int(n), trips)
        if trips == 0:  # evaluating a body that never runs might never end
            return 0, []
        decided = self._steady(loop.body, loop.body_consts, consts, carry)
        return trips, [IterationGroup(decided, at_each(lambda n: 1 if n is None else n, trips))]

    def _steady(
        self, body: Any, consts: int, operands: Sequence[Known], carry: dict[int, Known]
    ) -> Decided:
        """The decisions that hold in every iteration: constants, and carries that never change."""
        fixed, rest = list(operands[:consts]), len(body.invars) - consts - len(carry)
        if carry:
            need = self._integers.needs.loop_body(body, consts, len(carry), (), decides=True)
            carry = self._integers.unchanged(need, fixed, carry, rest)
        decides = self._integers.needs.of(body, decides=True)
        return self._inside(decides, [*fixed, *carry.values(), *[None] * rest])

    def _collect(self, run: Callable[[Visit], Any], need: Need) -> list[IterationGroup]:
        found: dict[Any, IterationGroup] = {}

        def visit(values: IntegerValues, running: Known) -> None:
            decided = self._decided(need, values)
            key = decided.key, content(running)
            before = found.get(key, IterationGroup(decided, 0, running))
            found[key] = before._replace(times=before.times + 1)

        run(visit)
        return list(found.values())

    def _decided(self, need: Need, values: IntegerValues) -> Decided:
        known = {v: self._integers.read(values, v) for v in need.decisive}
        return Decided(tuple(map(_key, known.values())), known)


def _key(value: Known) -> Any:
    if isinstance(value, ByPlace):
        return tuple(map(_key, value.values))
    if np.ndim(value) == 0:
        return value
    if value.size > _LARGEST_KEY:
        return id(value)  # the key's owner keeps it alive
    return value.shape, value.tobytes()
