"""How long Python's garbage collector has stopped this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from mfu_jax.util.failsafe import Boundary, failsafe

_OF_PROCESS: list[GcPauses] = []  # one, made on demand; tests would clear a cache


def of_process() -> GcPauses:
    """The instance of all loggers: collections stop the whole process, and callbacks stay."""
    if not _OF_PROCESS:
        _OF_PROCESS.append(GcPauses())
    return _OF_PROCESS[0]


class GcPauses:
    """Adds up the time of all collections from now on, on any thread.

    The collector's callback costs less than a microsecond per collection.

    Args:
        monotonic: clock in seconds.
        boundary: where failures are reported.

    Attributes:
        seconds: the sum so far.

    >>> pauses = GcPauses()
    >>> found = gc.collect()
    >>> pauses.seconds > 0
    True
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, boundary: Boundary | None = None
    ) -> None:
        self.seconds = 0.0
        self._boundary = boundary or Boundary()
        self._monotonic = monotonic
        self._began: float | None = None
        gc.callbacks.append(self._on_collection)

    @failsafe("pauses of the garbage collector are not known")
    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = self._monotonic()
        elif self._began is not None:
            self.seconds += self._monotonic() - self._began
            self._began = None
