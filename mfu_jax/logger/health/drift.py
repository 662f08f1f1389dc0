"""Detects MFU that sinks below what the same run has achieved before."""

from __future__ import annotations

from mfu_jax.logger.health.outliers import SortedWindow
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor, annotated
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.formatting import percent, readable

WINDOW = 100
# So many windows in a row must be slower by this fraction, and by this many standard errors.
_TOLD_AFTER = 2
DRIFT_FRACTION = 0.10
_ERRORS = 6.0
# The standard error of the median of n normal values is 1.2533 × σ / √n.
_MEDIAN_ERROR = 1.2533
_MFU, _TIME = "perf/mfu", "perf/step_time_seconds"


class DriftWatch(Monitor):
    """Compares windows of measured steps with the run's best; by speed if MFU is unknown."""

    def __init__(self) -> None:
        self._name = ""
        self._best = 0.0
        self._best_step = -1
        self._window = SortedWindow(WINDOW)
        self._slow_windows = 0  # in a row, up to the last one

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Adds, at the end of a window, its fraction of the best one."""
        if record.kind != "step":
            return record
        name = _MFU if _MFU in record.scalars else _TIME
        if name != self._name:  # another program may lack a FLOP count
            self._name, self._best, self._window = name, 0.0, SortedWindow(WINDOW)
        value = record.scalars.get(name, 0.0)
        if 0 < value < float("inf"):
            self._window.add(value if name == _MFU else 1 / value)
        if len(self._window) < WINDOW:
            return record
        median, spread = self._window.median, self._window.spread
        self._window = SortedWindow(WINDOW)
        if median > self._best:
            self._best, self._best_step = median, record.step
        share = median / self._best
        noise = _ERRORS * _MEDIAN_ERROR * spread / WINDOW**0.5 / self._best
        is_slow = share < 1 - max(DRIFT_FRACTION, noise)
        return annotated(record, {"health/mfu_of_best": share}, self._notes(median, is_slow))

    def _notes(self, median: float, is_slow: bool) -> list[str]:
        before = self._slow_windows
        self._slow_windows = before + 1 if is_slow else 0
        if before >= _TOLD_AFTER and not is_slow:
            return ["the run is as fast as at its best again"]
        if self._slow_windows != _TOLD_AFTER:
            return []
        return [
            f"the last {WINDOW} steps had {self._text(median)}, {1 - median / self._best:.0%} "
            f"below the {self._text(self._best)} of the steps up to {self._best_step}; usually a "
            f"device that throttles, a slow host, or longer waits for memory or network"
        ]

    def _text(self, value: float) -> str:
        return f"MFU {percent(value)}" if self._name == _MFU else f"{readable(1 / value)} s"
