"""Detects steps that take much longer than the others, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mfu_jax.logger.health.finding import NOTHING, Health
from mfu_jax.logger.health.window import SortedWindow
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.util.formatting import readable

WINDOW = 101
_FEWEST = 20
# A step is an outlier if it takes this many times the median and is this many spreads above it:
# of a million log-normal steps with a deviation of 20%, fewer than one is.
_TIMES_MEDIAN = 2.0
_SPREADS = 10.0
# A cause explains a step if it took more than this fraction of the step's excess time.
_EXPLAINS = 0.5
# Number of steps after a checkpoint that its writing may still slow down.
_STEPS_AFTER_CHECKPOINT = 5
# For each cause this many are reported, then only each power of ten.
_MAX_REPORTS = 3

_WORDS = {
    "data": "the wait for data took {0} s",
    "gc": "Python's garbage collector took {0} s",
    "clock": "the machine slept, or a clock jumped",
    "compile": "compiling took {0} s",
    "checkpoint": "a checkpoint was saved up to {0:.0f} steps before",
    "python": "Python between the steps took {0} s",
    "dispatch": "the call of the step took {0} s",
    "device": "the device took it; usually another process is slow, or the device is",
    "unknown": "no cause was seen",
}


class OutlierWatch:
    """Compares each step's time, including its wait for data, with the recent median."""

    def __init__(self) -> None:
        self._window = SortedWindow(WINDOW)
        self._since_checkpoint = 1_000_000
        self._reported: Counter[str] = Counter()

    def check(self, step: TimedStep, record: StepRecord) -> Health:
        """The findings about one step."""
        self._since_checkpoint += 1
        waits = 0.0
        if step.spans:
            waits = sum(s for name, s in step.spans.items() if name.endswith("_wait"))
            if "checkpoint" in step.spans:
                self._since_checkpoint = 0
        seconds = step.seconds + waits
        if record.kind != "step" or not 0 < seconds < float("inf"):
            return NOTHING
        health = NOTHING
        if len(self._window) >= _FEWEST and seconds > _TIMES_MEDIAN * self._window.median:
            limit = self._window.median + _SPREADS * self._window.spread
            if seconds > limit:
                health = self._explain(step, seconds, waits)
        self._window.add(seconds)
        return health

    def _explain(self, step: TimedStep, seconds: float, waits: float) -> Health:
        median = self._window.median
        excess = seconds - median
        cause, own = next(
            ((name, own) for name, own in self._causes(step, waits) if own > _EXPLAINS * excess),
            ("unknown", 0.0),
        )
        if cause == "unknown" and 0 < self._since_checkpoint <= _STEPS_AFTER_CHECKPOINT:
            cause, own = "checkpoint", float(self._since_checkpoint)
        elif cause == "unknown" and step.loop is not None:
            cause = "device" if step.loop.slack_seconds > _EXPLAINS * excess else "unknown"
        scalars = {"health/outlier_seconds": excess, f"health/outlier_{cause}_seconds": excess}
        self._reported[cause] += 1
        times = self._reported[cause]
        if times > _MAX_REPORTS and str(times).strip("0") != "1":
            return Health(scalars=scalars)
        why = _WORDS[cause].format(own if cause == "checkpoint" else readable(own))
        text = (
            f"the step took {readable(seconds)} s, the median is {readable(median)} s: {why}"
            f"{f' (time {times} in this run)' if times > _MAX_REPORTS else ''}"
        )
        return Health(scalars=scalars, notes=(text,))

    def _causes(self, step: TimedStep, waits: float) -> Iterator[tuple[str, float]]:
        """Possible causes with the seconds that each took, the most certain first."""
        yield "data", waits
        if step.clock_jump_seconds is not None:
            yield "clock", max(step.seconds, step.slept_seconds)
        yield "compile", sum(event.own_seconds for event in step.compile_events)
        loop = step.loop
        if loop is not None:
            yield "gc", loop.gc_seconds
            yield "dispatch", loop.call_seconds
            yield "python", loop.seconds - loop.wait_seconds - loop.call_seconds
