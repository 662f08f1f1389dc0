"""What watches a run: slow steps, hosts, GPUs, losses, hangs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.timing.timed_step import TimedStep


class Monitor:
    """Watches one aspect of a run; its methods are called on the recorder's thread, in sequence.

    What a method raises costs the findings of that call, never a record. No event is passed on: the
    only monitor that pauses matter to is the watchdog, which the loop tells itself, because the
    recorder may hang, too.
    """

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Returns the record with this monitor's scalars and notes; unchanged if it has none."""
        return record

    def close(self) -> None:
        """Called once at the end of the run; must not take longer than a second."""


def annotated(
    record: StepRecord, scalars: Mapping[str, float], notes: Sequence[str] = ()
) -> StepRecord:
    """The record with findings about its step; with a note, it goes to all sinks."""
    return dataclasses.replace(
        record,
        scalars={**record.scalars, **scalars},
        notes=(*record.notes, *notes),
    )
