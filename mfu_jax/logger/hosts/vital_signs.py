"""What the operating system knows about this process: work, waits for a core, stops."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_TASKS = Path("/proc/self/task")
# A thread may wake up this late without it meaning anything.
_LATE_SECONDS = 0.02


class VitalSigns:
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
