"""This process: its signs of life, its start and end, and the boot that its clock counts from."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
_taken = False

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 0.5
_PART_OF_AGE = 1 / 800
# In intervals. A longer silence is a garbage collection, an import or a machine's sleep, and says
# nothing about future ones.
_LONGEST_SILENCE = 2.0
_KEEPS = 0.95  # weight of earlier signs, for each new one

since_boot: Callable[[], float] = (
    time.monotonic if _BOOT_CLOCK is None else functools.partial(time.clock_gettime, _BOOT_CLOCK)
)
"""Seconds since the machine booted, including its sleep where known; one call into C."""


def began(now: float) -> float:
    """When this process was started, in seconds since boot; `now` if unknown or meaningless.

    It is known only on Linux. In a notebook, and for a second journal of a process, the process is
    older than the run.
    """
    global _taken
    if _taken or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    _taken = True
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        return min(now, (ticks + 0.5) / os.sysconf("SC_CLK_TCK"))  # ticks are rounded down
    return now


def asleep_seconds() -> float:
    """How long the machine has slept since boot, which the monotonic clock does not count."""
    return 0.0 if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK) - time.monotonic()


def boot_id() -> str:
    """An id shared by all processes with the same monotonic clock; empty if not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def host() -> str:
    """The machine's name."""
    return socket.gethostname()


def uncaught() -> str:
    """The exception that ends this process, as ``exception: KeyError``; empty without one."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return "" if error is None or hasattr(sys, "ps1") else f"exception: {type(error).__name__}"


class Liveness:
    """Times the signs of life of a process.

    Twenty per second give the time of a kill to 0.015 s, for a process that lived for seconds. The
    same fraction of its life is enough for one that lives for hours, and wakes a thread less often.

    Signs are late when the GIL is held or cores are busy, so a random moment is on average more
    than half the interval after the last one. It falls into an interval of length d with
    probability proportional to d, on average d/2 after its start: the mean is Σd² / 2Σd.

    Args:
        now: time of the first sign, in seconds on any clock that does not go back.

    Attributes:
        interval_seconds: until the next sign is due.
        seconds: mean age of the last sign at a random moment.

    >>> liveness = Liveness(0.0)
    >>> liveness.interval_seconds, liveness.seconds
    (0.05, 0.025)
    >>> liveness.on_sign(0.1)  # late
    >>> round(liveness.seconds, 3)  # of 0.05 and 0.1
    0.042
    """

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self.interval_seconds = _SHORTEST_SECONDS
        self.seconds = _SHORTEST_SECONDS / 2
        # In units of the requested interval.
        self._sum = self._squares = 1.0

    def on_sign(self, now: float) -> None:
        """Notes a sign of life."""
        passed = min((now - self._last) / self.interval_seconds, _LONGEST_SILENCE)
        self._sum = _KEEPS * self._sum + passed
        self._squares = _KEEPS * self._squares + passed * passed
        self._last = now
        age = now - self._began
        self.interval_seconds = min(max(_SHORTEST_SECONDS, _PART_OF_AGE * age), _LONGEST_SECONDS)
        self.seconds = self.interval_seconds * self._squares / (2.0 * self._sum)
