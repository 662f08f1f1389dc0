"""Sums over the steps of one window, in constant memory, on the builder thread."""

from __future__ import annotations

from typing import Any

from mfu_jax.logger.timing.timed_step import TimedStep

# If the loop waited for the device for less than this fraction of the step, it came back late.
_LATE_FRACTION = 0.02


class LoopStatistics:
    """Where this process's loop spends its time per step, between two exchanges."""

    def __init__(self) -> None:
        self.last_step = -1
        self._clear()

    def add(self, step: TimedStep, kind: str) -> None:
        """Adds a measured step; others, and those after a pause, only advance `last_step`."""
        self.last_step = step.step
        loop = step.loop
        if kind != "step" or loop is None or not 0 < step.seconds < float("inf"):
            return
        sums = self._sums
        self.steps += 1
        sums["step_time"] += step.seconds
        sums["slack"] += loop.slack_seconds
        sums["gc"] += loop.gc_seconds
        is_late = loop.slack_seconds < _LATE_FRACTION * step.seconds
        rest = loop.seconds - loop.wait_seconds - loop.call_seconds
        parts = (
            ("data", loop.wait_seconds),
            ("dispatch", loop.call_seconds),
            ("python", max(0.0, rest)),
        )
        for name, seconds in parts:
            sums[name] += seconds
            if is_late:
                sums[f"late_{name}"] += seconds

    def take(self) -> dict[str, Any]:
        """The means of the window, by `HostReport`'s names; starts the next window."""
        steps, sums = self.steps, self._sums
        self._clear()
        means = {name: total / steps for name, total in sums.items()} if steps else {}
        return {"steps": steps, "step": self.last_step, **means}

    def _clear(self) -> None:
        self.steps = 0
        names = ("step_time", "slack", "gc", "data", "dispatch", "python")
        late = ("late_data", "late_dispatch", "late_python")
        self._sums = dict.fromkeys((*names, *late), 0.0)
