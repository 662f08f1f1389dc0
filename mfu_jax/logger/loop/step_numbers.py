"""The step numbers that a loop passes to `record`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import numpy as np

from mfu_jax.errors import UserError, escaped
from mfu_jax.util.formatting import counted

_log = logging.getLogger("mfu_jax")

# A loop that records each number twice is warned, but not in every step.
_MAX_REPORTS = 3


class StepNumbers:
    """Step numbers, which increase except when the loop goes back.

    Args:
        start_step: number of the first step.

    Attributes:
        last: the last number.
        has_gone_back: it was not above the previous one; reset by whoever passes that on.
    """

    def __init__(self, start_step: int) -> None:
        self.last = start_step - 1
        self.has_gone_back = False
        self._start_step = start_step
        self._times = 0
        self._has_left_out = False

    def go_back(self, step: int, *, steps: int = 1) -> None:
        """The loop repeats `step` and later ones, as after restoring a checkpoint.

        Args:
            step: the first of those that the call ran.
            steps: how many these are.

        Raises:
            UserError: it is the first step, so there is nothing to go back from; or a call of
                several steps began before the first.
        """
        if steps > 1 and step < self._start_step:
            raise UserError(
                f"steps {step} to {step + steps - 1} were recorded; expected none before "
                f"{self._start_step}, the start_step",
                hint="usually the number of the call's first step was given, or of the call; "
                "pass the number of its last step",
            )
        if self.last < self._start_step:
            raise UserError(
                f"step {step} was recorded first; expected {self._start_step}, the start_step, "
                "or a later one",
                hint=f"usually start_step was not set on a resume; pass start_step={step}",
            )
        self.has_gone_back = True
        self._times += 1
        if self._times <= _MAX_REPORTS:
            _log.warning(
                "step %d was recorded after step %d: the loop went back, as after a restored "
                "checkpoint; what came from step %d on counts as lost\nhint: if it did not go "
                "back, record each step once",
                step,
                self.last,
                step,
            )

    def leave_out(self, first: int, *, steps: int = 1) -> None:
        """The loop records only some of its steps, from which their time cannot be told.

        Args:
            first: the step recorded after `last`.
            steps: how many the call ran from there.
        """
        if self.last < self._start_step or self._has_left_out:
            return
        self._has_left_out = True
        _log.warning(
            "step %d was recorded after step %d: the time between counts as that of %s, with no "
            "more FLOPs\nhint: pass steps=%d if that many ran, or record each step",
            *(first + steps - 1, self.last, counted(steps, "step"), first + steps - 1 - self.last),
        )


def after_close(step: int) -> UserError:
    """The error for a step recorded after the logger was closed."""
    return UserError(
        f"step {step} was recorded after close(); expected all steps before",
        hint="usually the `with` block of the logger ends before the loop does; close it after "
        "the loop",
    )


def whole_number(step: Any) -> int:
    """The number of a step, given as an integer of any library.

    Raises:
        UserError: it is not an integer.
    """
    if isinstance(step, jax.Array):
        _say_that_it_waits()
        step = np.asarray(step)  # one copy, without work on the device
    try:
        number = int(step)
        if not isinstance(step, str | bytes | bool) and number == step:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(
        f"step {escaped(repr(step)[:100])} is no whole number; expected 0, 1, 2, …",
        hint="usually the name of a file, or metrics and step were exchanged; pass int(step)",
    )


def number_of_steps(steps: Any) -> int:
    """How many steps a call ran.

    Raises:
        UserError: it is not an integer above 0.
    """
    if (number := whole_number(steps)) < 1:
        raise UserError(
            f"steps={number}: expected at least 1, as many as one call ran",
            hint="leave it out for one",
        )
    return number


@functools.cache
def _say_that_it_waits() -> None:
    _log.warning(
        "record(step) was given an array of the device, such as state.step; reading it waits for "
        "the step just dispatched, so the device idles between the steps\n"
        "hint: pass the loop's own "
        "counter, an int"
    )
