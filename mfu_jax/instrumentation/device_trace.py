"""Device traces of chosen steps of an instrumented step, for TensorBoard's or XProf's viewer."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import jax

from mfu_jax.settings import Settings, parse_steps

_log = logging.getLogger("mfu_jax")


class StepProfile:
    """Traces the devices from the start of one step to the end of another one.

    Args:
        steps: as `Settings.profile_steps` has them; empty: none.
        folder: the trace goes to its ``plugins/profile/``.
    """

    def __init__(self, steps: str, folder: str) -> None:
        self._first, self._last = parse_steps(steps) if steps else (0, -1)
        self._folder = folder
        self._is_on = False
        self._is_done = not steps

    @classmethod
    def of(cls, settings: Settings) -> StepProfile | None:
        """The profile that the settings ask for, if any."""
        if not settings.profile_steps:
            return None
        return cls(settings.profile_steps, settings.trace_folder)

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, number: int, logger: Any) -> contextlib.AbstractContextManager[Any]:
        """Wraps the call of a step: marks it in the trace, which the first step starts."""
        if not self._is_on and not self._is_done and self._first <= number <= self._last:
            with logger.pause("profile"):
                jax.profiler.start_trace(self._folder)
            self._is_on = True
        if not self._is_on:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def after(self, number: int, logger: Any) -> None:
        """Called after a step is recorded: the last step ends the trace."""
        if self._is_on and number >= self._last:
            with logger.pause("profile"):
                self._stop()

    def close(self) -> None:
        """Ends the trace if the run ends before the last step of the range."""
        if self._is_on:
            self._stop()
        elif not self._is_done:
            _log.warning(
                "profile_steps=%d-%d: the run had none of these steps", self._first, self._last
            )

    def _stop(self) -> None:
        self._is_on, self._is_done = False, True
        jax.profiler.stop_trace()
        _log.info("device trace of steps %d to %d: %s", self._first, self._last, self._folder)
