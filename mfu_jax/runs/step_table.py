"""The steps of a run in 8 bytes a number: a million of them in 100 MB."""

from __future__ import annotations

import array
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

Change = Callable[[Mapping[str, float]], Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """One training step of a file.

    Attributes:
        number: as in the file.
        kind: ``step``, ``compile`` or ``warmup``; None if the file does not say.
        scalars: metric name → value: ``perf/step_time_seconds``, ….
    """

    number: int
    kind: str | None
    scalars: Mapping[str, float]


class StepTable:
    """`LoggedStep`s, put together when they are read."""

    def __init__(self) -> None:
        self._numbers = array.array("q")
        self._values = array.array("d")  # of all steps, one after the other
        self._ends = array.array("q", [0])  # in `_values`; those of step i begin at the i-th
        self._shapes = array.array("L")  # of each step: which of `_known`
        self._known: dict[tuple[str | None, tuple[str, ...]], int] = {}
        self._changes: tuple[Change, ...] = ()

    def append(self, step: LoggedStep) -> None:
        """Adds a step; its number is one of 64 bits."""
        shape = step.kind, tuple(step.scalars)
        self._shapes.append(self._known.setdefault(shape, len(self._known)))
        self._numbers.append(step.number)
        self._values.extend(step.scalars.values())
        self._ends.append(len(self._values))

    def changed(self, change: Change) -> StepTable:
        """The same steps, with `change` applied to the scalars of each."""
        table = copy.copy(self)
        table._changes = (*self._changes, change)
        return table

    @property
    def numbers(self) -> array.array[int]:
        """The steps' numbers."""
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[LoggedStep]:
        shapes = list(self._known)
        bounds = itertools.pairwise(self._ends)
        for number, shape, (begin, end) in zip(self._numbers, self._shapes, bounds, strict=True):
            kind, names = shapes[shape]
            scalars: Mapping[str, float] = dict(zip(names, self._values[begin:end], strict=True))
            for change in self._changes:
                scalars = change(scalars)
            yield LoggedStep(number=number, kind=kind, scalars=scalars)
