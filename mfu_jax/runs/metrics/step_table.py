"""The steps of a run in 8 bytes per number: a million of them in 100 MB."""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

STEP_SECONDS = "perf/step_time_seconds"


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepSegment:
    """Consecutive steps of one kind and with the same scalars.

    Attributes:
        kind: as in `LoggedStep`.
        numbers: of the steps.
        columns: metric name → its value in each step.
    """

    kind: str | None
    numbers: array.array[int]
    columns: Mapping[str, array.array[float]]

    def part(self, begin: int, end: int) -> StepSegment:
        """A part of the steps."""
        columns = {name: column[begin:end] for name, column in self.columns.items()}
        return StepSegment(kind=self.kind, numbers=self.numbers[begin:end], columns=columns)


class StepTable:
    """A sequence of `LoggedStep`s, assembled when read."""

    def __init__(self) -> None:
        self._numbers = array.array("q")
        self._values = array.array("d")  # of all steps, concatenated
        self._ends = array.array("q", [0])  # in `_values`; step i begins at the i-th entry
        self._shapes = array.array("L")  # of each step: index into `_known`
        self._known: dict[tuple[str | None, tuple[str, ...]], int] = {}

    def append(self, step: LoggedStep) -> None:
        """Adds a step; its number must fit in 64 bits."""
        shape = step.kind, tuple(step.scalars)
        self._shapes.append(self._known.setdefault(shape, len(self._known)))
        self._numbers.append(step.number)
        self._values.extend(step.scalars.values())
        self._ends.append(len(self._values))

    def segments(self) -> Iterator[StepSegment]:
        """The steps in order, in runs of one kind and the same scalars."""
        shapes, begin = list(self._known), 0
        for shape, group in itertools.groupby(self._shapes):
            kind, names = shapes[shape]
            end = begin + sum(1 for _ in group)
            values, width = self._values[self._ends[begin] : self._ends[end]], len(names)
            columns = {name: values[place::width] for place, name in enumerate(names)}
            yield StepSegment(kind=kind, numbers=self._numbers[begin:end], columns=columns)
            begin = end

    @property
    def longest(self) -> LoggedStep:
        """The step that took longest: in a log, rounding matters least in it."""
        found = max(self.segments(), key=lambda segment: max(segment.columns[STEP_SECONDS]))
        seconds = found.columns[STEP_SECONDS]
        place = seconds.index(max(seconds))
        scalars = {name: column[place] for name, column in found.columns.items()}
        return LoggedStep(number=found.numbers[place], kind=found.kind, scalars=scalars)

    @property
    def tells_kinds(self) -> bool:
        """Whether every step has a kind."""
        return all(kind is not None for kind, _ in self._known)

    def has(self, name: str) -> bool:
        """Whether any step has this scalar."""
        return any(name in names for _, names in self._known)

    def changed(self, change: Callable[[Mapping[str, float]], Mapping[str, float]]) -> StepTable:
        """The same steps, with `change` applied to the scalars of each."""
        table = StepTable()
        for step in self:
            table.append(dataclasses.replace(step, scalars=change(step.scalars)))
        return table

    @property
    def numbers(self) -> array.array[int]:
        """The steps' numbers."""
        return self._numbers

    @property
    def last_number(self) -> int:
        """Number of the last step; -1 if there is none."""
        return self._numbers[-1] if self._numbers else -1

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[LoggedStep]:
        shapes = list(self._known)
        bounds = itertools.pairwise(self._ends)
        for number, shape, (begin, end) in zip(self._numbers, self._shapes, bounds, strict=True):
            kind, names = shapes[shape]
            scalars = dict(zip(names, self._values[begin:end], strict=True))
            yield LoggedStep(number=number, kind=kind, scalars=scalars)
