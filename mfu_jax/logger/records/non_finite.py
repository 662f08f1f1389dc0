"""NaN and infinite losses: the error, and the exit code of a program that stops on one."""

from __future__ import annotations

import logging
import math

import jax

from mfu_jax.errors import UserError
from mfu_jax.util.failsafe import Once

_log = logging.getLogger("mfu_jax")

NON_FINITE_EXIT_CODE = 3
"""Exit code of a training program that ends because its loss is NaN or infinite."""


class NonFiniteLossError(FloatingPointError):
    """The loss of a step is NaN or infinite; everything up to that step has been written.

    Attributes:
        step: the step.
        value: its loss.
    """

    def __init__(self, step: int, value: float) -> None:
        super().__init__(
            f"the loss of step {step} is {value}; expected a finite number; usually the learning "
            f"rate is too high, or a division by zero; resume from the last checkpoint with a "
            f"lower rate, or pass abort_on_nan_loss=False (abort_on_inf_loss=False) to go on"
        )
        self.step = step
        self.value = value


RERAISED = (UserError, NonFiniteLossError, jax.errors.JaxRuntimeError)
"""What the logger may raise in a user's loop: wrong use, the abort that she asked for, or an error
of the device in the outputs of her own step.
"""


class LossWatch:
    """Checks the loss of each step: the first that is not finite is an error or a warning.

    Args:
        abort_on_nan: NaN is an error.
        abort_on_inf: infinities are.
    """

    def __init__(self, *, abort_on_nan: bool, abort_on_inf: bool) -> None:
        self._abort_on_nan = abort_on_nan
        self._abort_on_inf = abort_on_inf
        self._is_first = Once()

    def check(self, step: int, loss: float | None) -> NonFiniteLossError | None:
        """The error to raise for a loss; None if the run continues."""
        if loss is None or math.isfinite(loss):
            return None
        if self._abort_on_nan if math.isnan(loss) else self._abort_on_inf:
            return NonFiniteLossError(step, loss)
        if self._is_first():
            key = "abort_on_nan_loss" if math.isnan(loss) else "abort_on_inf_loss"
            _log.warning(
                "THE LOSS OF STEP %d IS %s; the run goes on, and this is said once\n"
                "hint: usually the "
                "learning rate is too high, or a division by zero; pass %s=True to stop there",
                step,
                loss,
                key,
            )
        return None
