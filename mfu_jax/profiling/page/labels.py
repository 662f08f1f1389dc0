"""Places names beside the marks of a chart so that no two names overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mfu_jax.pages.markup import Markup
from mfu_jax.pages.svg import text

# Letter size of the charts' font, 11 units high; the mean width of a letter in wide fonts.
_LETTER, _ABOVE, _BELOW = 6.6, 9.0, 3.0
_GAP = 5


class Box(NamedTuple):
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether they share any area."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def is_within(self, other: Box) -> bool:
        """Whether it lies entirely within the other box."""
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


class Label(NamedTuple):
    """Words at a point on their baseline; `anchor` is ``start``, ``middle`` or ``end``.

    >>> Label(100, 50, "dot", "end").box.right
    100.0
    """

    x: float
    y: float
    words: str
    anchor: str

    @property
    def box(self) -> Box:
        """The box that it covers in any usual font."""
        width = _LETTER * len(self.words)
        left = self.x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]
        return Box(left, self.y - _ABOVE, left + width, self.y + _BELOW)

    @property
    def mark(self) -> Markup:
        """The label's markup."""
        return text(*self)


class Disc(NamedTuple):
    """A circle, and its name.

    Attributes:
        x: x of the center.
        y: y of the center.
        radius: its radius.
        name: its name.
        is_needed: whether its name may cover other marks if no place is free.
    """

    x: float
    y: float
    radius: float
    name: str
    is_needed: bool = False

    @property
    def box(self) -> Box:
        """The box around the circle."""
        return Box(
            self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius
        )

    @property
    def places(self) -> Iterator[Label]:
        """Places for its name: beside it, above it, below it."""
        away = self.radius + _GAP
        yield Label(self.x + away, self.y + 4, self.name, "start")
        yield Label(self.x - away, self.y + 4, self.name, "end")
        yield Label(self.x, self.y - away, self.name, "middle")
        yield Label(self.x, self.y + away + _ABOVE, self.name, "middle")


def placed(
    discs: Iterable[Disc], *, marks: Sequence[Box], beside: Iterable[Label], within: Box
) -> list[Label]:
    """The names of discs for which there is a free place.

    Args:
        discs: discs to name, most important first.
        marks: boxes of everything drawn, discs included, which names should not cover.
        beside: labels already placed, which names must not cover.
        within: the chart.
    """
    taken = [label.box for label in beside]
    found = []
    for disc in discs:
        free = [
            (sum(map(label.box.overlaps, marks)), label)
            for label in disc.places
            if label.box.is_within(within) and not any(map(label.box.overlaps, taken))
        ]
        covered, label = min(free, key=lambda one: one[0], default=(0, None))
        if label is not None and (disc.is_needed or not covered):
            taken.append(label.box)
            found.append(label)
    return found
