"""Notes when the outputs of a phase are ready, while the training thread is busy elsewhere."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from mfu_jax.util.failsafe import Boundary

# A thread still waiting for the device at interpreter exit would abort the process; but a hung
# device must not hold up the exit forever.
_JOIN_SECONDS = 30.0


class PhaseEnds:
    """Stamps the ends of phases, in order, on one daemon thread.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()
        self._thread = Boundary().thread(
            "mfu_jax phases", "the times of phases are not known", self._run
        )
        self._thread.start()

    def watch(self, marker: Any) -> Future[float]:
        """A future of the clock reading when `marker` is ready."""
        ended: Future[float] = Future()
        self._queue.put((marker, ended))
        return ended

    def close(self) -> None:
        """Stops the thread; waits at most half a minute for a hung device."""
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            marker, ended = item
            with contextlib.suppress(Exception):  # the training thread hits the same error
                jax.block_until_ready(marker)
            ended.set_result(self._clock())
            item = marker = None  # keep no device arrays alive while the thread waits
