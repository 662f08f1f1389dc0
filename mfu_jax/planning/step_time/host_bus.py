"""One direction of the bus between HBM and host memory.

Several copies are in flight at once. The program's text does not say which one gets the bus first;
here it is the one that the program waits for first. A public profile of Llama-shaped layers with
offloaded activations on a v6e (scripts/results) shows no wait for such copies, which together take
nearly as long as a layer's forward pass: served in start order, they would make most of it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Stretch(NamedTuple):
    """A stretch of time in which the bus carries one copy.

    Attributes:
        cause: the copy's cause.
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
    """The bus, simulated up to a time.

    Attributes:
        now: the time up to which it is known what the bus carried.
        left: unfinished copies by name, with the seconds that each still takes.
    """

    now: float = 0.0
    left: dict[str, _Copy] = field(default_factory=dict)

    def begin(self, name: str, cause: str, seconds: float, waited_for: int) -> None:
        """Begins a copy at `now`; call `serve` first to advance it.

        Args:
            name: the copy's instruction.
            cause: the cause that its time is booked under.
            seconds: its time with nothing else on the bus.
            waited_for: position of the instruction that waits for it.
        """
        self.left[name] = _Copy(waited_for=waited_for, cause=cause, seconds=seconds)

    def serve(self, until: float) -> Iterator[Stretch]:
        """What the bus carries up to a time."""
        while self.left and self.now < until:
            yield self._carry(until - self.now)
        self.now = max(self.now, until)

    def finish(self, name: str) -> Iterator[Stretch]:
        """What the bus carries until a copy is done."""
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
