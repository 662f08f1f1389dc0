"""Steps that take much longer than the others, and why; losses that jump; MFU that sinks."""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator

from mfu_jax.host_work import HostWork
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor, annotated
from mfu_jax.logger.timing.timed_step import LoopTimes, TimedStep
from mfu_jax.util.failsafe import Once
from mfu_jax.util.formatting import counted, loss_text, percent, readable

WINDOW = 101
# An outlier is this many spreads above the median: of a million log-normal steps with a deviation
# of 20%, fewer than one is. It is also above it by a fraction of the median.
_SPREADS = 10.0
_STEP_FRACTION, _LOSS_FRACTION = 1.0, 0.2
# With fewer values before it, none is an outlier.
_FEWEST_STEPS, _FEWEST_LOSSES = 20, 30
# A cause explains a step if it took more than this fraction of the step's excess time.
_EXPLAINS = 0.5
# Number of steps after a checkpoint that its writing may still slow down.
_STEPS_AFTER_CHECKPOINT = 5
# For each cause this many are reported, then only each power of ten.
_MAX_REPORTS = 3
# A run with more spikes of its loss has other problems.
_MAX_SPIKES = 20
# Ratio of the standard deviation of normal values to their median absolute deviation.
NORMAL = 1.4826

# For causes that are not measured as work of the host's.
_WORDS = {
    "clock": "the machine slept, or a clock jumped",
    "checkpoint": "a checkpoint was saved up to {0} before",
    "device": "the device took it; usually another process is slow, or the device is",
    "unknown": "no cause was seen",
}
_DRIFT_WINDOW = 100
# So many windows in a row must be slower by this fraction, and by this many standard errors.
_TOLD_AFTER = 2
_DRIFT_FRACTION = 0.10
_ERRORS = 6.0
# The standard error of the median of n normal values is 1.2533 × σ / √n.
_MEDIAN_ERROR = 1.2533
_MFU, _TIME = "perf/mfu", "perf/step_time_seconds"


def middle_of(values: Collection[float]) -> float:
    """The middle value; for an even number, the upper one."""
    return sorted(values)[len(values) // 2]


def spread_of(values: Collection[float]) -> float:
    """A robust standard deviation, not affected by outliers.

    >>> spread_of([5.0, 1.0, 2.0]) == NORMAL * 1.0
    True
    """
    middle = middle_of(values)
    return NORMAL * middle_of([abs(value - middle) for value in values])


class SortedWindow:
    """The most recent values of a series, kept sorted.

    Args:
        size: number of values.

    >>> window = SortedWindow(3)
    >>> for value in (5.0, 1.0, 2.0, 9.0):
    ...     window.add(value)
    >>> len(window), window.median
    (3, 2.0)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Adds a finite value; drops the oldest if there are too many."""
        self._values.append(value)
        bisect.insort(self._ordered, value)
        if len(self._values) > self._size:
            del self._ordered[bisect.bisect_left(self._ordered, self._values.popleft())]

    @property
    def median(self) -> float:
        """The middle value; for an even number, the upper one."""
        return self._ordered[len(self._ordered) // 2]

    def excess(self, value: float, fraction: float, fewest: int) -> float:
        """How far an outlier is above the median; 0 for all other values."""
        if len(self._values) < fewest:
            return 0.0
        median = self.median
        excess = value - median
        is_above = excess > fraction * abs(median) and excess > _SPREADS * spread_of(self._values)
        return excess if is_above else 0.0


class OutlierWatch(Monitor):
    """Compares each step's time, including its wait for data, with the recent median."""

    def __init__(self) -> None:
        self._window = SortedWindow(WINDOW)
        self._since_checkpoint = _STEPS_AFTER_CHECKPOINT
        self._reported: Counter[str] = Counter()

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Adds a slow step's excess time, and its cause."""
        is_saved = "checkpoint" in step.spans
        self._since_checkpoint = 0 if is_saved else self._since_checkpoint + 1
        waits = step.wait_seconds
        seconds, window = step.seconds + waits, self._window
        if record.kind != "step" or not 0 < seconds < float("inf"):
            return record
        if excess := window.excess(seconds, _STEP_FRACTION, _FEWEST_STEPS):
            record = self._explained(step, record, excess, waits)
        window.add(seconds)
        return record

    def _explained(
        self, step: TimedStep, record: StepRecord, excess: float, waits: float
    ) -> StepRecord:
        cause, own = next(
            (cause, own) for cause, own in self._causes(step, waits) if own > _EXPLAINS * excess
        )
        scalars = {"health/outlier_seconds": excess, f"health/outlier_{cause}_seconds": excess}
        self._reported[cause] += 1
        times = self._reported[cause]
        is_rare = times <= _MAX_REPORTS
        if not is_rare and str(times).strip("0") != "1":
            return annotated(record, scalars)
        if isinstance(cause, HostWork):
            why = f"{cause.phrase} took {readable(own)} s"
        else:
            why = _WORDS[cause].format(counted(self._since_checkpoint, "step"))
        seconds = readable(step.seconds + waits)
        text = (
            f"the step took {seconds} s, the median is {readable(self._window.median)} s: {why}"
            f"{'' if is_rare else f' (time {times} in this run)'}"
        )
        return annotated(record, scalars, [text])

    def _causes(self, step: TimedStep, waits: float) -> Iterator[tuple[str, float]]:
        """Possible causes with the seconds that each took, the most certain first."""
        loop = None if step.loop is None else LoopTimes._make(step.loop)
        yield HostWork.DATA, waits
        if step.clock_jump_seconds is not None:
            yield "clock", step.seconds
        yield HostWork.COMPILE, sum(event.own_seconds for event in step.compile_events)
        if loop is not None:
            yield HostWork.GC, loop.gc_seconds
            yield HostWork.DISPATCH, loop.call_seconds
            yield HostWork.PYTHON, loop.seconds - loop.wait_seconds - loop.call_seconds
        if 0 < self._since_checkpoint <= _STEPS_AFTER_CHECKPOINT:
            yield "checkpoint", float("inf")
        if loop is not None:
            yield "device", loop.slack_seconds
        yield "unknown", float("inf")


class LossSpikeWatch(Monitor):
    """Compares the loss of each step with recent losses; a jump, or the first NaN, is noted."""

    def __init__(self) -> None:
        self._window = SortedWindow(WINDOW)
        self._is_first = Once()
        self._spikes = 0

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Adds how far the loss is above the recent ones, if it jumped."""
        loss, window = record.scalars.get("learning/loss"), self._window
        if loss is None:
            return record
        if not math.isfinite(loss):
            notes = [f"the loss is {loss}, for the first time"]
            return annotated(record, {}, notes) if self._is_first() else record
        if jump := window.excess(loss, _LOSS_FRACTION, _FEWEST_LOSSES):
            self._spikes += 1
            text = (
                f"the loss jumped to {loss_text(loss)}; the median of the last {len(window)} "
                f"steps is {loss_text(window.median)}"
            )
            notes = [text] if self._spikes <= _MAX_SPIKES else []
            record = annotated(record, {"health/loss_spike": jump}, notes)
        window.add(loss)
        return record


class DriftWatch(Monitor):
    """Compares windows of measured steps with the run's best; by speed if MFU is unknown."""

    def __init__(self) -> None:
        self._name = ""
        self._best = 0.0
        self._best_step = -1
        self._values: list[float] = []
        self._slow_windows = 0  # in a row, up to the last one

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Adds, at the end of a window, its fraction of the best one."""
        if record.kind != "step":
            return record
        name = _MFU if _MFU in record.scalars else _TIME
        if name != self._name:  # another program may lack a FLOP count
            self._name, self._best, self._values = name, 0.0, []
        value = record.scalars.get(name, 0.0)
        if 0 < value < float("inf"):
            self._values.append(value if name == _MFU else 1 / value)
        if len(self._values) < _DRIFT_WINDOW:
            return record
        median, spread = middle_of(self._values), spread_of(self._values)
        self._values = []
        if median > self._best:
            self._best, self._best_step = median, record.step
        share = median / self._best
        noise = _ERRORS * _MEDIAN_ERROR * spread / _DRIFT_WINDOW**0.5 / self._best
        is_slow = share < 1 - max(_DRIFT_FRACTION, noise)
        return annotated(record, {"health/mfu_of_best": share}, self._notes(median, is_slow))

    def _notes(self, median: float, is_slow: bool) -> list[str]:
        before = self._slow_windows
        self._slow_windows = before + 1 if is_slow else 0
        if before >= _TOLD_AFTER and not is_slow:
            return ["the run is as fast as at its best again"]
        if self._slow_windows != _TOLD_AFTER:
            return []
        return [
            f"the last {_DRIFT_WINDOW} steps had {self._text(median)}, "
            f"{1 - median / self._best:.0%} below the {self._text(self._best)} of the steps up to "
            f"{self._best_step}; usually a device that throttles, a slow host, or longer waits for "
            f"memory or network"
        ]

    def _text(self, value: float) -> str:
        return f"MFU {percent(value)}" if self._name == _MFU else f"{readable(1 / value)} s"
