"""Detects losses that jump, or are not finite."""

from __future__ import annotations

import math

from mfu_jax.logger.health.finding import NOTHING, Health
from mfu_jax.logger.health.window import SortedWindow
from mfu_jax.logger.sinks.base import StepRecord
from mfu_jax.util.formatting import loss_text

_WINDOW = 101
_FEWEST = 30
# A spike is above the recent median by this many spreads and by this fraction of the median.
_SPREADS = 10.0
_FRACTION = 0.2
# Most spikes reported; a run with more has other problems.
_TOLD = 20


class LossSpikeWatch:
    """Compares the loss of each step with recent losses.

    If the loss jumps, or is the first that is not finite, the step's record goes to all sinks.
    """

    def __init__(self) -> None:
        self._window = SortedWindow(_WINDOW)
        self._has_broken = False
        self._told = 0

    def judge(self, record: StepRecord) -> Health:
        """The findings about one step's loss."""
        loss = record.scalars.get("learning/loss")
        if loss is None:
            return NOTHING
        if not math.isfinite(loss):
            if self._has_broken:
                return NOTHING
            self._has_broken = True
            return Health(notes=(f"the loss is {loss}, for the first time",))
        health = self._spike(loss) if len(self._window) >= _FEWEST else NOTHING
        self._window.add(loss)
        return health

    def _spike(self, loss: float) -> Health:
        median = self._window.median
        if loss - median <= _FRACTION * abs(median):
            return NOTHING
        spread = self._window.spread
        if loss - median <= _SPREADS * spread:
            return NOTHING
        self._told += 1
        scalars = {"health/loss_spike": loss - median}
        if self._told > _TOLD:
            return Health(scalars=scalars)
        text = (
            f"the loss jumped to {loss_text(loss)}; the median of the last {len(self._window)} "
            f"steps is {loss_text(median)}"
        )
        return Health(scalars=scalars, notes=(text,))
