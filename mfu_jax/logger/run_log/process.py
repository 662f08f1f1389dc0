"""This process: its start and end, and the boot that its clock counts from."""

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

since_boot: Callable[[], float] = (
    time.monotonic if _BOOT_CLOCK is None else functools.partial(time.clock_gettime, _BOOT_CLOCK)
)
"""Seconds since the machine booted, including its sleep where known; one call into C."""


def began(now: float) -> float:
    """When this process was started, in seconds since boot; `now` if unknown or meaningless.

    It is known only on Linux. In a notebook, and for a second log of a process, the process is
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
