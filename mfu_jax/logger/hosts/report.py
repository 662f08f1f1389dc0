"""What one process measures of itself over a window of steps, and reports to the others.

Adding a cause: a field here, a rule in `findings`, and a planted fault in
tests/campaigns/stragglers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from mfu_jax.logger.timing.timed_step import TimedStep

# If the loop waited for the device for less than this fraction of the step, it came back late.
_LATE_FRACTION = 0.02
# A thread may wake up this late without it meaning anything.
_LATE_SECONDS = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """Means over the steps of one window, in seconds per step, as one process saw them.

    Attributes:
        process: process number.
        host: name of its host.
        step: the last step of the window.
        unix_seconds: wall clock when it was written.
        steps: steps in the window; 0: only a sign of life.
        step_time: time of a step.
        slack: how long the loop waited for the device: the host's lead over it.
        data: loop time in declared waits (``logger.waiting("data")``).
        dispatch: loop time in the call of an instrumented step.
        python: the rest of the loop time between two steps.
        late_data: `data` of the steps whose device was idle when the loop came back; 0 if the
            host runs ahead. Likewise `late_dispatch` and `late_python`.
        late_dispatch: see `late_data`.
        late_python: see `late_data`.
        gc: garbage collection, included in the others.
        cpu: CPU time of threads that Python did not start, mostly XLA's, which is the step's own
            work if the CPU is the device; None: not known here.
        starved: time in which these and the main thread could run but had no core; None: not known.
        stopped: time in which the process did not run at all, though it had a core.
    """

    process: int
    host: str = ""
    step: int = -1
    unix_seconds: float = 0.0
    steps: int = 0
    step_time: float = 0.0
    slack: float = 0.0
    data: float = 0.0
    dispatch: float = 0.0
    python: float = 0.0
    late_data: float = 0.0
    late_dispatch: float = 0.0
    late_python: float = 0.0
    gc: float = 0.0
    cpu: float | None = None
    starved: float | None = None
    stopped: float = 0.0

    @property
    def late(self) -> float:
        """How long the device idled because the loop came back late."""
        return self.late_data + self.late_dispatch + self.late_python


class LoopStatistics:
    """Where the loop spends its time per step, by `HostReport`'s names."""

    def __init__(self) -> None:
        self.last_step = -1
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, step: TimedStep, kind: str) -> None:
        """Adds a measured step; others, and those after a pause, only advance `last_step`."""
        self.last_step = step.step
        loop = step.loop
        if kind != "step" or loop is None or not 0 < step.seconds < math.inf:
            return
        python = max(0.0, loop.seconds - loop.wait_seconds - loop.call_seconds)
        parts = {"data": loop.wait_seconds, "dispatch": loop.call_seconds, "python": python}
        if loop.slack_seconds < _LATE_FRACTION * step.seconds:
            parts |= {f"late_{name}": seconds for name, seconds in parts.items()}
        parts |= {"step_time": step.seconds, "slack": loop.slack_seconds, "gc": loop.gc_seconds}
        for name, seconds in parts.items():
            self._sums[name] += seconds
        self._sums["steps"] += 1

    def take(self) -> dict[str, Any]:
        """The means of the window; starts the next one."""
        sums, self._sums = self._sums, defaultdict(float)
        steps = int(sums.pop("steps", 0))
        means = {name: total / steps for name, total in sums.items()}
        return {"steps": steps, "step": self.last_step, **means}


class ThreadStatistics:
    """How the threads of this process got their cores since the last `take`."""

    def __init__(self) -> None:
        self._before = _thread_nanoseconds()
        self._stopped = 0.0

    def woke_late(self, seconds: float) -> None:
        """Notes that a thread woke up so long after its time-out: the process was stopped."""
        if seconds > _LATE_SECONDS:
            self._stopped += seconds

    def take(self, steps: int) -> dict[str, float | None]:
        """`HostReport`'s cpu, starved and stopped, of so many steps; starts the next window."""
        before, self._before = self._before, _thread_nanoseconds()
        cpu, starved = (
            (now - then).total() / 1e9 / steps if now else None
            for now, then in zip(self._before, before, strict=True)
        )
        stopped, self._stopped = self._stopped / steps, 0.0
        return {"cpu": cpu, "starved": starved, "stopped": stopped}


def _thread_nanoseconds() -> tuple[Counter[str], Counter[str]]:
    """For how long each thread ran, and could have run but had no core; empty: not known.

    Threads that Python started do not count, but for the main one's wait for a core: writing
    metrics and loading data are not the step's work. All others are XLA's, mostly unnamed.

    From ``/proc/<pid>/task/<tid>/schedstat`` (Documentation/scheduler/sched-stats.rst).
    """
    ran, waited = Counter[str](), Counter[str]()
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    main = str(threading.main_thread().native_id)
    for path in map(Path, glob.glob("/proc/self/task/*/schedstat")):
        task = path.parent.name
        if task in of_python and task != main:
            continue
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            own, wait, _ = map(int, path.read_text().split())
            ran[task], waited[task] = 0 if task == main else own, wait
    return ran, waited
