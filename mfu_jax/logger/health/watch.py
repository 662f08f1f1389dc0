"""All watches of a run, in the order in which their findings are reported."""

from __future__ import annotations

import dataclasses

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.health.drift import DriftWatch
from mfu_jax.logger.health.finding import NOTHING
from mfu_jax.logger.health.losses import LossSpikeWatch
from mfu_jax.logger.health.nvidia import GpuWatch
from mfu_jax.logger.health.outliers import OutlierWatch
from mfu_jax.logger.sinks.base import StepRecord
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.failsafe import Boundary

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

    def adds(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """The record with the findings about its step; usually the record unchanged."""
        judged = (
            self._losses.judge(record),
            self._outliers.judge(step, record),
            self._drift.judge(record),
            self._gpus.judge(record),
        )
        if judged == _ALL_WELL:
            return record
        found = [health for health in judged if health is not NOTHING]
        health = sum(found, NOTHING)
        return dataclasses.replace(
            record,
            scalars={**record.scalars, **health.scalars},
            notes=(*record.notes, *health.notes),
            is_logged=record.is_logged or bool(health.notes),
        )

    def close(self) -> None:
        """Stops the thread that reads the GPUs."""
        self._gpus.close()
