"""Detects MFU that sinks below what the same run has achieved before."""

from __future__ import annotations

from mfu_jax.logger.health.finding import NOTHING, Health
from mfu_jax.logger.health.window import SortedWindow
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.util.formatting import percent, readable

WINDOW = 100
# Two consecutive windows must be slower by this fraction, and by this many standard errors.
DRIFT_FRACTION = 0.10
_ERRORS = 6.0
# The standard error of the median of n normal values is 1.2533 × σ / √n.
_MEDIAN_ERROR = 1.2533
_TIME = "perf/step_time_seconds"


class DriftWatch:
    """Compares windows of measured steps with the run's best; by speed if MFU is unknown."""

    def __init__(self) -> None:
        self._window = SortedWindow(WINDOW)
        self._name = ""
        self._best: tuple[float, int] | None = None
        self._slow_windows = 0
        self._is_told = False

    def check(self, record: StepRecord) -> Health:
        """The findings at the end of a window."""
        if record.kind != "step":
            return NOTHING
        name, value = _speed(record)
        if name != self._name:  # another program may lack a FLOP count
            self._name, self._best = name, None
            self._window.clear()
        if value is None:
            return NOTHING
        self._window.add(value)
        if len(self._window) < WINDOW:
            return NOTHING
        median, spread = self._window.median, self._window.spread
        self._window.clear()
        return self._compare(record.step, median, spread)

    def _compare(self, step: int, median: float, spread: float) -> Health:
        if self._best is None or median > self._best[0]:
            self._best = median, step
        best, best_step = self._best
        share = median / best
        noise = _ERRORS * _MEDIAN_ERROR * spread / WINDOW**0.5 / best
        scalars = {"health/mfu_of_best": share}
        is_slow = share < 1 - max(DRIFT_FRACTION, noise)
        self._slow_windows = self._slow_windows + 1 if is_slow else 0
        if self._is_told and not is_slow:
            self._is_told = False
            return Health(scalars=scalars, notes=("the run is as fast as at its best again",))
        if self._slow_windows < 2 or self._is_told:
            return Health(scalars=scalars)
        self._is_told = True
        return Health(
            scalars=scalars,
            notes=(
                f"the last {WINDOW} steps had {self._text(median)}, {1 - share:.0%} below the "
                f"{self._text(best)} of the steps up to {best_step}; usually a device that "
                f"throttles, a slow host, or longer waits for memory or network",
            ),
        )

    def _text(self, value: float) -> str:
        return f"MFU {percent(value)}" if self._name == "perf/mfu" else f"{readable(1 / value)} s"


def _speed(record: StepRecord) -> tuple[str, float | None]:
    """MFU, or steps per second if MFU is not known; None if that is not usable."""
    mfu = record.scalars.get("perf/mfu")
    if mfu is not None:
        return "perf/mfu", mfu if 0 < mfu < float("inf") else None
    seconds = record.scalars.get(_TIME, 0.0)
    return _TIME, 1 / seconds if 0 < seconds < float("inf") else None
