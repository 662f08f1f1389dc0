"""The record of one step, as every sink and monitor gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Everything known about one step, on the host.

    Attributes:
        step: its number.
        kind: ``step``, or ``compile`` and ``warmup`` for those excluded from every summary.
        unix_seconds: wall clock at its end.
        scalars: metric name -> number; NaN and Inf are unchanged.
        flags: short names of its impossible numbers (`mfu_jax.logger.records.diagnosis`).
        notes: sentences for a human: a diagnosis, a recompile, a clock jump.
        is_logged: it falls on the log period, or must be seen; all others go only to sinks
            that keep every step.
    """

    step: int
    kind: str = "step"
    unix_seconds: float
    scalars: Mapping[str, float]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_logged: bool = True


class RecordError(ValueError):
    """The record can never be written: the logger drops it for this sink and counts it."""
