"""Checks every record: its loss here, its time, its drift and the GPUs by watches of their own."""

from __future__ import annotations

import dataclasses
import math

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.health.drift import DriftWatch
from mfu_jax.logger.health.finding import NOTHING, Health
from mfu_jax.logger.health.nvidia import GpuWatch
from mfu_jax.logger.health.outliers import OutlierWatch
from mfu_jax.logger.health.window import SortedWindow
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.failsafe import Boundary
from mfu_jax.util.formatting import loss_text

_WINDOW = 101
_FEWEST = 30
# A spike is above the recent median by this many spreads and by this fraction of the median.
_SPREADS = 10.0
_FRACTION = 0.2
# Most spikes reported; a run with more has other problems.
_MAX_REPORTS = 20

_ALL_WELL = (NOTHING,) * 4  # tuples compare by identity first, which is fastest


class HealthWatch:
    """Checks every record on the builder thread.

    Args:
        config: whether and how often GPUs are read.
        boundary: where failures are reported.
    """

    def __init__(self, config: LoggerConfig, boundary: Boundary) -> None:
        self._outliers = OutlierWatch()
        self._drift = DriftWatch()
        self._losses = LossSpikeWatch()
        self._gpus = GpuWatch(config.gpu_period_seconds, boundary)

    def annotate(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """The record with the findings about its step; usually the record unchanged."""
        checked = (
            self._losses.check(record),
            self._outliers.check(step, record),
            self._drift.check(record),
            self._gpus.check(record),
        )
        if checked == _ALL_WELL:
            return record
        found = [health for health in checked if health is not NOTHING]
        health = sum(found, NOTHING)
        return dataclasses.replace(
            record,
            scalars={**record.scalars, **health.scalars},
            notes=(*record.notes, *health.notes),
        )

    def close(self) -> None:
        """Stops the thread that reads the GPUs."""
        self._gpus.close()


class LossSpikeWatch:
    """Compares the loss of each step with recent losses.

    If the loss jumps, or is the first that is not finite, the step's record goes to all sinks.
    """

    def __init__(self) -> None:
        self._window = SortedWindow(_WINDOW)
        self._has_broken = False
        self._reported = 0

    def check(self, record: StepRecord) -> Health:
        """The findings about one step's loss."""
        loss = record.scalars.get("learning/loss")
        if loss is None:
            return NOTHING
        if not math.isfinite(loss):
            if self._has_broken:
                return NOTHING
            self._has_broken = True
            return Health(notes=(f"the loss is {loss}, for the first time",))
        health = self._spike(loss) if len(self._window) >= _FEWEST else NOTHING
        self._window.add(loss)
        return health

    def _spike(self, loss: float) -> Health:
        median = self._window.median
        if loss - median <= _FRACTION * abs(median):
            return NOTHING
        spread = self._window.spread
        if loss - median <= _SPREADS * spread:
            return NOTHING
        self._reported += 1
        scalars = {"health/loss_spike": loss - median}
        if self._reported > _MAX_REPORTS:
            return Health(scalars=scalars)
        text = (
            f"the loss jumped to {loss_text(loss)}; the median of the last {len(self._window)} "
            f"steps is {loss_text(median)}"
        )
        return Health(scalars=scalars, notes=(text,))
