"""What a search may choose: axes, each with its choices, and the points that they span."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfu_jax.errors import UserError

BATCH = "per_device_batch_size"
Point = tuple[int, ...]  # the index of the choice on each axis

_MOST_VALUES = 4096  # of a range; points that are looked at for a valid one
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
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

    Attributes:
        start: where a search begins.

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
                "nothing to search: every setting has one value; expected some with several",
                hint="list some, such as per_device_batch_size=1,2,4 (of mfu-jax tune, keep fewer)",
            )
        self._labels = [list(axis.choices) for axis in axes]
        self._settings = [list(axis.choices.values()) for axis in axes]

    def begin_where(self, is_valid: Callable[[Point], bool]) -> None:
        """Begins at the first valid point, if one is found."""
        points = itertools.islice(itertools.product(*map(range, self.sizes)), _MOST_VALUES)
        self.start = next(filter(is_valid, points), self.start)

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
        return differences(self.labels(self.start), self.labels(point))

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


def differences(start: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """The labels that differ from the start's, in words."""
    words = [f"{key}={text}" for key, text in labels.items() if text != start.get(key)]
    return ", ".join(words) or "the start"


def moved(point: Point, axis: int, choice: int) -> Point:
    """The point with another choice on one axis."""
    return (*point[:axis], choice, *point[axis + 1 :])


def listed_axes(given: Mapping[str, str]) -> tuple[list[SearchAxis], dict[str, str]]:
    """An axis for each key with several values, and the keys that have one.

    Args:
        given: key → text. ``a,b`` and ``1..16`` are several values; ``[a,b]`` is one.

    Raises:
        UserError: a list of values is empty or wrong.

    >>> axes, fixed = listed_axes({"model_name": "llama3-8b", "fsdp": "4,8", "tensor": "1..2"})
    >>> fixed, [(axis.name, *axis.choices) for axis in axes]
    ({'model_name': 'llama3-8b'}, [('fsdp', '4', '8'), ('tensor', '1', '2')])
    """
    axes = [
        SearchAxis(name=key, choices={value: {key: value} for value in listed(key, text)})
        for key, text in given.items()
        if is_swept(text)
    ]
    return axes, {key: text for key, text in given.items() if not is_swept(text)}


def is_swept(text: str) -> bool:
    """Whether a value stands for several: ``a,b`` or ``1..16``."""
    return bool(_RANGE.fullmatch(text)) or ("," in text and not text.startswith(("[", "(", "{")))


def listed(key: str, text: str) -> list[str]:
    """The values that a swept text stands for.

    Raises:
        UserError: the range is empty, or the batch is not a number.
    """
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + _MOST_VALUES:
            raise UserError(f"{key}={text}: expected FIRST..LAST, a range of whole numbers")
        return [str(number) for number in range(first, last + 1)]
    texts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if key == BATCH and not all(re.fullmatch(r"\d*\.?\d+", part) for part in texts):
        raise UserError(f"{key}={text}: expected numbers, such as 1,2,4 or 1..16")
    return texts


_SECONDS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """Parses a time as the user writes it.

    Raises:
        UserError: the text is not a time.

    >>> seconds_of("20min"), seconds_of("1.5h"), seconds_of("90")
    (1200.0, 5400.0, 90.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _SECONDS:
        raise UserError(
            f"budget={text}: expected a time, such as 20min, 90s or 2h",
            hint="usually another unit: s, min and h are known; without one, it is seconds",
        )
    return float(found[1]) * _SECONDS[found[2]]
