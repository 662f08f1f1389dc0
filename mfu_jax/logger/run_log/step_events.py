"""Completed steps as ``steps`` events: many steps of one kind and cost in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mfu_jax.logger.run_log.events import STEPS, Event

if TYPE_CHECKING:  # a log starts before JAX is imported
    from mfu_jax.logger.sinks.base import StepRecord
    from mfu_jax.logger.timing.timed_step import TimedStep

_AT_PEAK = (("perf/mfu", "optimal_s"), ("perf/hfu", "executed_s"))


class StepEvents:
    """Makes the ``steps`` events of one process.

    Args:
        began: start of the log, in seconds since boot.
    """

    def __init__(self, began: float) -> None:
        self._last_number, self._last_end = -1, began
        self._costs: dict[str, float] = {}

    def went_back(self, step: int) -> None:
        """The steps from `step` on are repeated."""
        self._last_number = step - 1

    def of(
        self, steps: Sequence[tuple[TimedStep, StepRecord | None]], asleep_seconds: float
    ) -> Iterator[Event]:
        """The events of steps that were completed in this order.

        Args:
            steps: with their records; None: no record could be made.
            asleep_seconds: what the monotonic clock lacks to the time since boot.
        """
        values: dict[str, Any] = {}
        end = (0.0, 0.0)
        for step, record in steps:
            number, us = int(step.step), round(1e6 * step.seconds)
            if number <= self._last_number:
                continue
            cost = self._cost(step, record)
            if not _continues(values, number, self._last_number, cost):
                if values:
                    yield _event(end, values)
                values = {"first": number, "us": [], "gap_us": [], "data_us": [], **cost}
            elif len(values["us"]) == 1:
                values["by"] = number - self._last_number
            end = step.ended_at, step.ended_monotonic + asleep_seconds
            values["us"].append(us)
            values["gap_us"].append(max(0, round(1e6 * (end[1] - self._last_end)) - us))
            values["data_us"].append(round(1e6 * step.spans.get("data_wait", 0.0)))
            self._last_number, self._last_end = number, end[1]
        if values:
            yield _event(end, values)

    def _cost(self, step: TimedStep, record: StepRecord | None) -> dict[str, Any]:
        """Its kind, unless it is a usual one, and its seconds at the peak, where they are known."""
        if record is None:
            return {}
        cost: dict[str, Any] = {} if record.kind == "step" else {"kind": record.kind}
        for metric, name in _AT_PEAK:
            if (utilization := record.scalars.get(metric)) is not None:
                seconds, last = utilization * step.seconds, self._costs.get(name, -1.0)
                if abs(seconds - last) > 1e-9 * last:  # else only rounding differs
                    self._costs[name] = float(f"{seconds:.9g}")
                cost[name] = self._costs[name]
        return cost


def _continues(values: dict[str, Any], number: int, last: int, cost: dict[str, Any]) -> bool:
    if not values or {k: values[k] for k in values if k in ("kind", "optimal_s", "executed_s")} != (
        cost
    ):
        return False
    return len(values["us"]) == 1 or number - last == values.get("by", 1)


def _event(end: tuple[float, float], values: dict[str, Any]) -> Event:
    """The event, without columns of zeros and a stride of 1."""
    if values.get("by") == 1:
        del values["by"]
    for name in ("gap_us", "data_us"):
        if not any(values[name]):
            del values[name]
    return Event(STEPS, end, values)
