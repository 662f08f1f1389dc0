"""One direction of the bus between HBM and the host's memory.

Several copies are under way at once. Which one gets the bus first is not in the program's text; the
one that the program waits for first does here. A public profile of Llama-shaped layers with
offloaded activations on a v6e (docs/plan.md) shows no wait for such copies, whose sum is nearly as
long as a layer's forward pass: in the order of their starts, most of that pass would be waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Stretch(NamedTuple):
    """A time in which the bus carries one copy.

    Attributes:
        cause: of the copy.
        start: seconds from the computation's start.
        end: the same.
    """

    cause: str
    start: float
    end: float


@dataclass(kw_only=True)
class _Copy:
    waited_for: int
    cause: str
    seconds: float


@dataclass(kw_only=True)
class HostBus:
    """The bus, up to a time.

    Attributes:
        now: until when it is known what it carried.
        left: copies that are not done; seconds that each still takes.
    """

    now: float = 0.0
    left: dict[str, _Copy] = field(default_factory=dict)

    def begin(self, name: str, cause: str, seconds: float, waited_for: int) -> None:
        """A copy begins at `now`, where `serve` brought it.

        Args:
            name: of its instruction.
            cause: of its time.
            seconds: with nothing else on the bus.
            waited_for: place of what waits for it among the instructions.
        """
        self.left[name] = _Copy(waited_for=waited_for, cause=cause, seconds=seconds)

    def serve(self, until: float) -> Iterator[Stretch]:
        """What the bus carries up to a time."""
        while self.left and self.now < until:
            yield self._carry(until - self.now)
        self.now = max(self.now, until)

    def finish(self, name: str) -> Iterator[Stretch]:
        """What the bus carries until one copy is done."""
        while name in self.left:
            yield self._carry(self.left[name].seconds)

    def _carry(self, most: float) -> Stretch:
        name = min(self.left, key=lambda name: self.left[name].waited_for)
        copy, start = self.left[name], self.now
        if copy.seconds <= most:
            del self.left[name]
            self.now += copy.seconds
        else:
            copy.seconds -= most
            self.now += most
        return Stretch(copy.cause, start, self.now)
