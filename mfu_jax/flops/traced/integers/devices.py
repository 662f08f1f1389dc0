"""The devices whose integers are evaluated: one at its place, or all of a `shard_map` together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mfu_jax.flops.traced.integers.arithmetic import typed
from mfu_jax.flops.traced.integers.exchanges import exchange_axes, received
from mfu_jax.flops.traced.integers.known_values import Known
from mfu_jax.flops.traced.integers.places import at_place, together
from mfu_jax.flops.traced.integers.shards import DeviceShare, MeshCoordinates, manual_axes, shares
from mfu_jax.util.attributes import temporarily


class Devices:
    """The devices that run the code being evaluated.

    Attributes:
        place: mesh coordinates of the device whose integers these are, on the known axes.
        places: those of all devices, if these exchange integers and are evaluated together.
        number: index of `place` among them.
    """

    def __init__(self) -> None:
        self.place: MeshCoordinates = {}
        self.places: tuple[MeshCoordinates, ...] = ()
        self.number: int | None = None
        self._asked: set[str] = set()  # axes on which an unknown coordinate was requested
        self._exchanging: set[str] = set()  # axes along which integers are exchanged

    def key(self) -> Any:
        """A key, equal where the same device takes the same decisions."""
        return tuple(self.place.items()), self.number if self.places else None

    def axis_index(self, eqn: Any) -> Known:
        """The device's coordinate on a mesh axis; None if it is not known."""
        axis = eqn.params["axis_name"]
        if isinstance(axis, str) and axis in self.place:
            return typed(self.place[axis], eqn.outvars[0].aval)
        self._asked |= {axis} if isinstance(axis, str) else set()
        return None

    def exchange(self, eqn: Any, result: int, sent: Known) -> Known:
        """What the devices receive, each at its place, from what they send."""
        if sent is None:
            return None
        axes = set(exchange_axes(eqn))
        if not self.places or not axes <= self.places[0].keys():
            self._asked |= axes
            self._exchanging |= axes
            return None
        values = [at_place(sent, number) for number in range(len(self.places))]
        aval = eqn.outvars[result].aval
        return together([typed(value, aval) for value in received(eqn, self.places, values)])

    def here(self, value: Known) -> Known:
        """The value on the device at `place`."""
        return at_place(value, self.number)

    def each(self) -> Iterator[int]:
        """Visits all places in turn; no device needs another's integers."""
        places = self.places
        with self.alone():
            for number, place in enumerate(places):
                with self._at(place):
                    yield number

    def alone(self) -> AbstractContextManager[None]:
        """A context in which a device's integers do not depend on those of others."""
        return temporarily(self, places=())

    def _at(self, place: MeshCoordinates, **others: Any) -> AbstractContextManager[None]:
        """A context at this place, in addition to what is known of the current one."""
        return temporarily(self, place={**self.place, **place}, **others)

    def by_place(
        self, eqn: Any, known: Sequence[Known], run: Callable[[Sequence[Known]], Any]
    ) -> list[tuple[DeviceShare, Any]]:
        """Results of `run` on a `shard_map`'s operands, for devices that differ.

        Args:
            eqn: the `shard_map`.
            known: values of its operands.
            run: takes the operands of its body: of all devices, if these exchange integers.
        """
        axes = manual_axes(eqn).keys()
        while True:
            asked, exchanging = self._asked & axes, self._exchanging & axes
            each = shares(eqn, known, asked, merged=not exchanging)
            values = [share.values for share in each]
            if exchanging:
                values = [[together(same) for same in zip(*values, strict=True)]] * len(each)
            found = []
            places = tuple(share.place for share in each) if exchanging else ()
            for number, share in enumerate(each):
                own = number if exchanging else None
                with self._at(share.place, places=places, number=own):
                    found.append((share, run(values[number])))
            if (self._asked & axes, self._exchanging & axes) == (asked, exchanging):
                return found
