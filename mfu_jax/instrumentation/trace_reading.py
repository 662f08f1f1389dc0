"""Reads the numbers of a device trace during the run, for the run's own metrics.

A separate process of lower priority reads the trace: the GIL stays with the training thread, and
the time and memory that a trace needs are not taken from the run's process.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping

from mfu_jax.errors import UserError
from mfu_jax.hardware.peak import Peak
from mfu_jax.names import PROFILE_POINTS, PROFILE_READER
from mfu_jax.util.child_process import child_environment
from mfu_jax.util.failsafe import Boundary

_log = logging.getLogger("mfu_jax")

READ_SECONDS = 60.0
"""Longest wait for a trace at the end of a run."""


class TraceReading:
    """One trace being read.

    Args:
        folder: the trace's folder.
        steps: the traced steps in words, for messages.
        peak: returns one device's peak, None if unknown; called on another thread, so it may wait.
        hardware: the chip, if the user named one.
        boundary: where failures are reported.

    Attributes:
        numbers: what `mfu_jax.profiling.profile.Profile.scalars` returns; empty until it is read,
            and after a failure.
    """

    def __init__(
        self,
        folder: str,
        steps: str,
        *,
        peak: Callable[[], Peak | None],
        hardware: str,
        boundary: Boundary,
    ) -> None:
        self.numbers: Mapping[str, float] = {}
        self._folder = folder
        self._steps = steps
        self._peak = peak
        self._hardware = hardware
        self._process: subprocess.Popen[str] | None = None
        self._is_abandoned = False
        self._thread = boundary.thread(
            "mfu_jax trace", f"the profile of {steps} is not in the metrics", self._read
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the trace is read, or could not be."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Waits for the trace; gives up reading it when the time is up."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._is_abandoned = True
            if self._process is not None:
                self._process.kill()
            self._thread.join(1.0)

    def _read(self) -> None:
        peak = self._peak()
        if peak is None:
            raise UserError(
                "no peak of the device is known; expected one to divide the time by; pass "
                "peak_tflops_per_device=N or hardware=NAME"
            )
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", PROFILE_READER, self._folder, _tflops(peak), self._hardware],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(JAX_PLATFORMS="cpu"),  # no accelerator is touched
            start_new_session=True,  # Ctrl-C is for the run
        )
        output, error = process.communicate()
        if self._is_abandoned:
            raise UserError(
                f"the trace was not read within {READ_SECONDS:.0f} s of the run's end; "
                f"mfu-jax profile {self._folder} reads it"
            )
        if process.returncode:
            raise UserError((error.strip().splitlines() or ["no text"])[-1])
        self.numbers = json.loads(output.strip().splitlines()[-1])
        _log.info("profile of %s: %s", self._steps, _headline(self.numbers, self._folder))


def _tflops(peak: Peak) -> str:
    """The peak as an argument of the reader; empty if the table has one for every dtype."""
    return "" if peak.kind == "table" else repr(peak.tflops_per_sec)


def _headline(numbers: Mapping[str, float], folder: str) -> str:
    """The MFU, and the three largest other bars of the waterfall."""
    start = f"{PROFILE_POINTS}/"
    bars = {name.removeprefix(start): n for name, n in numbers.items() if name.startswith(start)}
    bars.pop("MFU", None)
    largest = sorted(bars, key=lambda name: -bars[name])[:3]
    lost = ", ".join(f"{name} {bars[name]:.1f}" for name in largest)
    return (
        f"MFU {numbers['profile/mfu']:.1%} of {numbers['profile/step_time_seconds']:.4g} s; "
        f"points lost: {lost}; coverage {numbers['profile/coverage']:.1%}; "
        f"mfu-jax profile {folder} shows the rest"
    )
