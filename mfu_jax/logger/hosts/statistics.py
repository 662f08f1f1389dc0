"""What a process measures of itself between two exchanges: its loop, and its threads' cores."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfu_jax.logger.timing.timed_step import TimedStep

# If the loop waited for the device for less than this fraction of the step, it came back late.
_LATE_FRACTION = 0.02
_TASKS = Path("/proc/self/task")
# A thread may wake up this late without it meaning anything.
_LATE_SECONDS = 0.02


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


class ProcessStatistics:
    """Counters of this process, as differences since the last `take`.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._before = self._read()
        self._stopped = 0.0

    def slept(self, planned_seconds: float, began: float) -> None:
        """Notes that this thread has slept; time beyond its time-out counts as stopped.

        Args:
            planned_seconds: the longest that it meant to sleep.
            began: clock reading before the sleep.
        """
        late = self._monotonic() - began - planned_seconds
        if late > _LATE_SECONDS:
            self._stopped += late

    def take(self) -> dict[str, float | None]:
        """Seconds since the last call, as `HostReport` has them: cpu, starved, stopped.

        Threads that Python started do not count, but for the main one's wait for a core: writing
        metrics and loading data are not the step's work. All others are XLA's, mostly unnamed.
        None if the system does not tell.
        """
        now, before = self._read(), self._before
        self._before = now
        stopped, self._stopped = self._stopped, 0.0
        main = str(os.getpid())
        cpu = starved = 0.0
        for task, (ran, waited) in now.items():
            ran_before, waited_before = before.get(task, (0.0, 0.0))
            cpu += 0.0 if task == main else ran - ran_before
            starved += waited - waited_before
        known = bool(now)
        return {
            "cpu": cpu if known else None,
            "starved": starved if known else None,
            "stopped": stopped,
        }

    def _read(self) -> dict[str, tuple[float, float]]:
        """Seconds that each thread ran, and seconds that it could have run but had no core.

        From ``/proc/<pid>/task/<tid>/schedstat`` (Documentation/scheduler/sched-stats.rst).
        """
        found = {}
        main = threading.main_thread()
        others = {str(t.native_id) for t in threading.enumerate() if t is not main}
        try:
            tasks = os.listdir(_TASKS)
        except OSError:  # not Linux
            return {}
        for task in tasks:
            if task not in others:
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    ran, waited, _ = (_TASKS / task / "schedstat").read_text().split()
                    found[task] = int(ran) / 1e9, int(waited) / 1e9
        return found
