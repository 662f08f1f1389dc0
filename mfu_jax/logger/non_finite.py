"""NaN and infinite losses: the error, and the exit code of a program that stops on one."""

from __future__ import annotations

import math

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


def is_bad(loss: float | None, *, nan: bool, inf: bool) -> bool:
    """True if `loss` is one of the values to abort on."""
    if loss is None:
        return False
    return (nan and math.isnan(loss)) or (inf and math.isinf(loss))
