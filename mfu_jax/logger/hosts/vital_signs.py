"""What the operating system knows of this process: work, waits for a core, stops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_TASKS = Path("/proc/self/task")
# The threads of XLA's CPU client, which are the device there.
_DEVICE_THREADS = "tf_XLA"
# A thread may wake this much late for reasons that mean nothing.
_LATE_SECONDS = 0.02


class VitalSigns:
    """Counters of this process, as differences since they were last taken.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._names: dict[str, str] = {}
        self._before = self._read()
        self._stopped = 0.0

    def slept(self, planned_seconds: float, began: float) -> None:
        """This thread slept until woken by its time-out; whatever came on top was no sleep.

        Args:
            planned_seconds: how long it meant to sleep.
            began: reading of the clock before.
        """
        late = self._monotonic() - began - planned_seconds
        if late > _LATE_SECONDS:
            self._stopped += late

    def take(self) -> dict[str, float | None]:
        """Seconds since the last call, as `HostReport` has them: cpu, starved, stopped.

        Only the threads that a step waits for count, the device's and the main one: writing
        metrics is no work of the step. None where the system does not tell.
        """
        now, before = self._read(), self._before
        self._before = now
        stopped, self._stopped = self._stopped, 0.0
        cpu = starved = 0.0
        for task, (ran, waited) in now.items():
            ran_before, waited_before = before.get(task, (0.0, 0.0))
            is_device = self._names[task].startswith(_DEVICE_THREADS)
            cpu += (ran - ran_before) if is_device else 0.0
            starved += waited - waited_before
        known = bool(now)
        return {
            "cpu": cpu if known else None,
            "starved": starved if known else None,
            "stopped": stopped,
        }

    def _read(self) -> dict[str, tuple[float, float]]:
        """Seconds that each thread ran, and could have run but had no core.

        From ``/proc/<pid>/task/<tid>/schedstat`` (Documentation/scheduler/sched-stats.rst).
        """
        found = {}
        try:
            for task in os.listdir(_TASKS):
                folder = _TASKS / task
                name = self._names.get(task) or self._name(folder)
                if name.startswith(_DEVICE_THREADS) or task == str(os.getpid()):
                    ran, waited, _ = (folder / "schedstat").read_text().split()
                    found[task] = int(ran) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):  # not Linux, or a thread that has just ended
            return {}
        return found

    def _name(self, folder: Path) -> str:
        name = self._names[folder.name] = (folder / "comm").read_text().strip()
        return name
