"""What the operating system knows of this process: processor time, waits for a core, stops."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

_TASKS = Path("/proc/self/task")
# A thread may wake this much late for reasons that mean nothing.
_LATE_SECONDS = 0.02


class VitalSigns:
    """Counters of this process, as differences since they were last taken.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._cpu = time.process_time()
        self._starved = starved_seconds()
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
        """Seconds since the last call: ``cpu``, ``starved``, ``stopped``."""
        cpu, starved = time.process_time(), starved_seconds()
        result = {
            "cpu": cpu - self._cpu,
            "starved": _difference(starved, self._starved),
            "stopped": self._stopped,
        }
        self._cpu, self._starved, self._stopped = cpu, starved, 0.0
        return result


def starved_seconds() -> dict[str, float] | None:
    """Seconds in which each thread of this process could run but had no core; None: not known.

    The second number of ``/proc/<pid>/task/<tid>/schedstat`` (Documentation/scheduler/sched-stats).
    """
    waits: dict[str, float] = {}
    try:
        tasks = os.listdir(_TASKS)
    except OSError:
        return None
    for task in tasks:
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            waits[task] = int((_TASKS / task / "schedstat").read_text().split()[1]) / 1e9
    return waits or None


def _difference(now: dict[str, float] | None, before: dict[str, float] | None) -> float | None:
    if now is None or before is None:
        return None
    return sum(seconds - before.get(task, 0.0) for task, seconds in now.items())
