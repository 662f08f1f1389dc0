"""Device traces of chosen steps, for `mfu-jax profile` and for viewers (TensorBoard, XProf).

A trace is also read during the run, for the run's own metrics, by a separate process of lower
priority: the GIL stays with the training thread, and the time and memory that a trace needs are not
taken from the run's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mfu_jax.errors import UserError
from mfu_jax.hardware.peak import Peak
from mfu_jax.logger.records.non_finite import RERAISED
from mfu_jax.names import PROFILE_POINTS, PROFILE_READER
from mfu_jax.settings import Settings, parse_steps
from mfu_jax.storage.files import unwritable
from mfu_jax.storage.trace_folders import move_to_sessions, own_folder
from mfu_jax.util.child_process import child_environment
from mfu_jax.util.failsafe import Boundary, failsafe

_log = logging.getLogger("mfu_jax")

_NO_MARK = contextlib.nullcontext()

READ_SECONDS = 60.0
"""Longest wait for a trace at the end of a run."""


class StepProfile:
    """Traces the devices from the start of one step to the end of another.

    The trace's numbers go to the record of the step at which it has been read, as ``profile/…``.
    Nothing here fails the run: a missing trace logs one warning.

    Args:
        settings: which steps, and the folder, where the trace goes to ``plugins/profile/``.
        peak: returns one device's peak; called on another thread once there is a trace; may wait.
        boundary: where failures are reported.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        peak: Callable[[], Peak | None],
        boundary: Boundary | None = None,
    ) -> None:
        steps = settings.profile_steps
        self._first, self._last = parse_steps(steps) if steps else (0, -1)
        self._folder = settings.trace_folder
        if steps:
            try:
                os.makedirs(self._folder, exist_ok=True)
            except OSError as error:
                raise unwritable(self._folder, "profile_dir", error) from error
        self._hardware = settings.hardware
        self._peak = peak
        self._boundary = boundary or Boundary()
        self._is_on = False
        self._is_done = not steps
        self._marked = -1
        self._logger: Any = None
        self._reading: TraceReading | None = None

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def concerns(self, number: int) -> bool:
        """Whether `step` has anything to do: start a trace, mark a step in it, or end it."""
        if self._is_on or self._reading is not None:
            return True
        return not self._is_done and self._first <= number <= self._last

    def step(self, number: int, logger: Any) -> contextlib.AbstractContextManager[Any]:
        """Wraps the call of a step to mark it in the trace, which the first step starts.

        A step made of phases is recorded only after its last call, so the next one ends the trace.
        """
        if number > self._last and (self._is_on or self._reading is not None):
            self.after(number, logger)
        if not self._is_on and not self._is_done and self._first <= number <= self._last:
            self._logger = logger
            with self._failsafe("there is no device trace"):
                self._start()
        if not self._is_on:
            return _NO_MARK
        self._marked = number
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def after(self, number: int, logger: Any, *, is_last: bool = False) -> None:
        """Called after a step is recorded; the last step of the range ends the trace.

        Args:
            number: the step's number.
            logger: gets the trace's numbers once they are known.
            is_last: whether it is the run's last step, which waits for the numbers.
        """
        if self._is_on and number >= self._last:
            with self._failsafe("the device trace does not end"), logger.own_pause("profile"):
                self._stop()
        if self._reading is not None and (is_last or self._reading.is_done):
            with self._failsafe("the profile is not in the metrics"), logger.own_pause("profile"):
                self._log_numbers()

    def close(self) -> None:
        """Ends the trace if the run ends before the range does; waits for its numbers.

        Must be closed before the logger.
        """
        if self._is_on:
            with self._failsafe("the device trace does not end"):
                self._after_last_step(self._stop)
        elif not self._is_done:
            _log.warning(
                "profile_steps=%d-%d: the run had none of these steps", self._first, self._last
            )
        if self._reading is not None:
            with self._failsafe("the profile is not in the metrics"):
                self._after_last_step(self._log_numbers)

    def _after_last_step(self, function: Callable[[], None]) -> None:
        """Runs `function` in a pause if possible, so that it is not in any step's time."""
        with contextlib.ExitStack() as stack:
            try:
                # Unchecked: the logger's close reports an aborting loss or a failed device.
                with contextlib.suppress(Exception):
                    stack.enter_context(self._logger.own_pause("profile"))
            finally:
                function()

    def _start(self) -> None:
        self._is_done = True  # attempted only once
        folder = self._folder
        if jax.process_count() > 1:
            folder = str(own_folder(folder, jax.process_index()))
        with self._logger.own_pause("profile"):
            jax.profiler.start_trace(folder)
        self._is_on = True

    def _stop(self) -> None:
        self._is_on = False
        jax.profiler.stop_trace()
        if jax.process_count() > 1:
            move_to_sessions(self._folder, jax.process_index())
        steps = f"steps {self._first} to {self._marked}"
        _log.info("device trace of %s: %s", steps, self._folder)
        if jax.process_index() == 0:  # only this one has sinks
            self._reading = TraceReading(
                self._folder,
                steps,
                peak=self._peak,
                hardware=self._hardware,
                boundary=self._boundary,
            )

    def _log_numbers(self) -> None:
        reading, self._reading = self._reading, None
        assert reading is not None
        reading.wait(READ_SECONDS)
        if reading.numbers:
            self._logger.add_numbers({**reading.numbers, "profile/last_step": self._marked})

    def _failsafe(self, missing: str) -> failsafe:
        return failsafe(missing, self._boundary, passes=RERAISED)


@dataclasses.dataclass(eq=False)
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

    folder: str
    steps: str
    _: dataclasses.KW_ONLY
    peak: Callable[[], Peak | None]
    hardware: str
    boundary: Boundary

    def __post_init__(self) -> None:
        self.numbers: Mapping[str, float] = {}
        self._process: subprocess.Popen[str] | None = None
        self._is_abandoned = False
        missing = f"the profile of {self.steps} is not in the metrics"
        self._thread = self.boundary.thread("mfu_jax trace", missing, self._read)
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
        peak = self.peak()
        if peak is None:
            raise UserError(
                "no peak of the device is known; expected one to divide the time by",
                hint="pass peak_tflops_per_device=N or hardware=NAME",
            )
        # Empty if the table has one for every dtype.
        tflops = "" if peak.kind == "table" else repr(peak.tflops_per_sec)
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", PROFILE_READER, self.folder, tflops, self.hardware],
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
                f"the trace was not read within {READ_SECONDS:.0f} s of the run's end",
                hint=f"mfu-jax profile {self.folder} reads it",
            )
        if process.returncode:
            raise UserError((error.strip().splitlines() or ["no text"])[-1])
        self.numbers = json.loads(output.strip().splitlines()[-1])
        _log.info("profile of %s: %s", self.steps, _headline(self.numbers, self.folder))


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
