"""The record of one step, as text and JSON that every file, terminal and parser accepts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mfu_jax.util.formatting import strict

RECORD_FIELDS = ("step", "kind", "unix_seconds", "flags", "notes")
"""What is beside the metrics in a line or row, so that no metric has one of these names there."""

# Results that come rarely, and so go to every sink whatever the log period.
_SEEN = ("eval/", "profile/")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Everything known about one step, on the host.

    Attributes:
        step: its number.
        kind: ``step``, or ``compile`` and ``warmup`` for those excluded from every summary.
        unix_seconds: wall clock at its end.
        scalars: metric name -> number; NaN and Inf are unchanged.
        flags: short names of its impossible numbers (`mfu_jax.logger.records.step_cost`).
        notes: sentences for a human: a diagnosis, a recompile, a clock jump.
        log_period: every how many steps one goes to all sinks; the run's, not the step's.
    """

    step: int
    kind: str = "step"
    unix_seconds: float
    scalars: Mapping[str, float]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    log_period: int = 1

    @property
    def is_logged(self) -> bool:
        """It falls on the log period, or must be seen: by its kind, notes or rare results.

        All others go only to sinks that keep every step.
        """
        return bool(
            self.step % self.log_period == 0
            or self.kind != "step"
            or self.notes
            or "rolling/steps" in self.scalars
            or any(name.startswith(_SEEN) for name in self.scalars)
        )


class RecordError(ValueError):
    """The record can never be written: the logger drops it for this sink and counts it."""


def as_json(
    record: StepRecord, names_of: Callable[[Iterable[str]], Iterable[str]] = tuple
) -> dict[str, Any]:
    """A record as one flat object that every JSON parser can read.

    Args:
        record: the record.
        names_of: names of metrics → names of their JSON fields.
    """
    values = map(strict, record.scalars.values())
    result: dict[str, Any] = {
        "step": record.step,
        "kind": record.kind,
        "unix_seconds": record.unix_seconds,
        **dict(zip(names_of(record.scalars), values, strict=True)),
    }
    if record.flags:
        result["flags"] = record.flags
    if record.notes:
        result["notes"] = record.notes
    return result


def record_of(values: Mapping[str, Any], log_period: int = 1) -> StepRecord:
    """The record of a line of JSON that `as_json` made; of another one's, what is a number.

    Args:
        values: the parsed line.
        log_period: of the run that wrote it.

    Raises:
        KeyError: there is no step or time in it.

    >>> record_of({"step": 7, "unix_seconds": 1.0, "learning/loss": "NaN"}).scalars
    {'learning/loss': nan}
    """
    numbers = {
        name: _NON_FINITE.get(value) if isinstance(value, str) else value
        for name, value in values.items()
        if name not in RECORD_FIELDS
    }
    return StepRecord(
        step=values["step"],
        kind=kind if isinstance(kind := values.get("kind"), str) else "step",
        unix_seconds=values["unix_seconds"],
        scalars={name: n for name, n in numbers.items() if isinstance(n, int | float)},
        flags=_texts(values.get("flags")),
        notes=_texts(values.get("notes")),
        log_period=log_period,
    )


def _texts(value: Any) -> tuple[str, ...]:
    """The texts of a list, or a single one; () for anything else that another writer put there."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(item for item in items if isinstance(item, str))
