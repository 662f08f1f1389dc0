"""Losses that jump, or are no numbers."""

from __future__ import annotations

import math

from mfu_jax.formatting import loss_text
from mfu_jax.logger.health.finding import NOTHING, Health
from mfu_jax.logger.health.window import SortedWindow
from mfu_jax.logger.sinks.base import StepRecord

_WINDOW = 101
_FEWEST = 30
# A spike lies so many spreads and this part of the median above the last losses.
_SPREADS = 10.0
_FRACTION = 0.2
# Spikes told; a run that has more has other worries.
_TOLD = 20


class LossSpikeWatch:
    """Compares the loss of each step with those of the last ones.

    The record of a step whose loss jumps, or is the first that is not finite, goes to all sinks.
    """

    def __init__(self) -> None:
        self._window = SortedWindow(_WINDOW)
        self._has_broken = False
        self._told = 0

    def judge(self, record: StepRecord) -> Health:
        """What is to be said of the loss of one step."""
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
