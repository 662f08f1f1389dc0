"""Observes the end of a step while the training thread is busy elsewhere."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from mfu_jax.logger.timing.readiness import block_until_ready
from mfu_jax.logger.timing.timed_step import Reading, TimedStep
from mfu_jax.util.failsafe import Boundary

_JOIN_SECONDS = 30.0


class Watcher(Protocol):
    """Stamps `TimedStep.completed` when the step's outputs are ready, off the training thread."""

    def watch(self, step: TimedStep) -> None: ...

    def close(self) -> None: ...


class ThreadWatcher:
    """A `Watcher` on one daemon thread, started when first needed.

    Args:
        read: reads the clocks.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._queue: queue.SimpleQueue[TimedStep | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, step: TimedStep) -> None:
        if self._thread is None:
            self._thread = Boundary().thread(
                "mfu_jax watcher", "the time of a step may contain a wait", self._run
            )
            self._thread.start()
        self._queue.put(step)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            # A thread still waiting for the device at interpreter exit would abort the process.
            self._thread.join(timeout=_JOIN_SECONDS)
            self._thread = None

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                block_until_ready(step.metrics)
            except Exception:  # the training thread hits the same error, where it can be handled
                continue
            step.completed = step.completed or self._read()
            step = None  # keep no device arrays alive while the thread waits
