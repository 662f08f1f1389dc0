"""What a search may choose: axes, each with its choices, and the points that they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.planning.sweep.space import BATCH

Point = tuple[int, ...]  # the index of the choice on each axis

_MOST_LISTED = 1024  # points; of a larger space only the neighbours of the best


@dataclass(frozen=True, kw_only=True)
class SearchAxis:
    """One thing to choose.

    Attributes:
        name: shown at the head of its column.
        choices: label → the settings that it stands for, key → value; empty settings: the default.
        start: index of the choice to begin with.
    """

    name: str
    choices: Mapping[str, Mapping[str, Any]]
    start: int = 0

    @property
    def positions(self) -> tuple[float, ...] | None:
        """log2 of the choices, if each is one positive number: neighbours are then alike."""
        values = [[*settings.values()] for settings in self.choices.values()]
        try:
            numbers = [float(value[0]) for value in values if len(value) == 1]
        except (TypeError, ValueError):
            return None
        is_numeric = len(numbers) == len(values) > 1 and min(numbers) > 0
        return tuple(map(math.log2, numbers)) if is_numeric else None


class Space:
    """All combinations of the axes' choices.

    Args:
        axes: at least one; those with a single choice are fixed.

    Raises:
        UserError: no axis has two choices.
    """

    def __init__(self, axes: Sequence[SearchAxis]) -> None:
        self.axes = tuple(axes)
        self.start: Point = tuple(axis.start for axis in axes)
        self.sizes = tuple(len(axis.choices) for axis in axes)
        self.size = math.prod(self.sizes)
        if self.size < 2:
            raise UserError(
                "nothing to tune: every setting has one value; expected some with several",
                hint="list values, such as per_device_batch_size=1,2,4, or keep fewer keys",
            )
        self._labels = [list(axis.choices) for axis in axes]
        self._settings = [list(axis.choices.values()) for axis in axes]

    def labels(self, point: Point) -> dict[str, str]:
        """Axis → label."""
        return {
            axis.name: labels[i]
            for axis, labels, i in zip(self.axes, self._labels, point, strict=True)
        }

    def point_of(self, labels: Mapping[str, str]) -> Point | None:
        """The point with these labels; None if there is none."""
        try:
            return tuple(
                known.index(labels[axis.name])
                for axis, known in zip(self.axes, self._labels, strict=True)
            )
        except (KeyError, ValueError):
            return None

    def settings(self, point: Point) -> dict[str, Any]:
        """Key → value of all choices."""
        return {
            key: value
            for settings, i in zip(self._settings, point, strict=True)
            for key, value in settings[i].items()
        }

    def batch(self, point: Point) -> float:
        """Sequences per device; 1 where the batch is no axis."""
        return float(self.settings(point).get(BATCH, 1))

    def changes(self, point: Point) -> str:
        """The labels that differ from the start's, in words."""
        words = [
            f"{axis.name}={labels[i]}"
            for axis, labels, i in zip(self.axes, self._labels, point, strict=True)
            if i != axis.start
        ]
        return " ".join(words) or "the start"

    def candidates(self, best: Iterable[Point]) -> list[Point]:
        """All points; of a large space those within one change of some points."""
        if self.size <= _MOST_LISTED:
            return list(itertools.product(*map(range, self.sizes)))
        return sorted({near for one in best for near in self._near(one)})

    def _near(self, point: Point) -> Iterator[Point]:
        yield point
        for number, (axis, size) in enumerate(zip(self.axes, self.sizes, strict=True)):
            reach = size if axis.positions is None else 1  # the next number, any other word
            for i in range(max(0, point[number] - reach), min(size, point[number] + reach + 1)):
                yield moved(point, number, i)


def moved(point: Point, axis: int, choice: int) -> Point:
    """The point with another choice on one axis."""
    return (*point[:axis], choice, *point[axis + 1 :])
