"""One thread that passes records to sinks over a bounded queue, whatever the sinks do."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mfu_jax.logger.sinks.base import Sink, StepRecord

logger = logging.getLogger("mfu_jax")

# Most records kept for a failing sink before the oldest are dropped.
BACKLOG_RECORDS = 10_000
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0


class GuardedSink:
    """A sink whose failures are reported once and never reach the run; its records are kept.

    Args:
        sink: the sink.
        monotonic: clock in seconds, for the time between two attempts.
    """

    def __init__(self, sink: Sink, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.sink = sink
        self._monotonic = monotonic
        self._backlog: deque[StepRecord] = deque()
        self._lost = 0
        self._retry_seconds = 0.0
        self._retry_at = 0.0

    @property
    def _name(self) -> str:
        return type(self.sink).__name__

    def write(self, record: StepRecord) -> None:
        if not (record.is_logged or self.sink.keeps_every_step):
            return
        self._backlog.append(record)
        if len(self._backlog) > BACKLOG_RECORDS:
            self._backlog.popleft()
            self._lost += 1
        if self._retry_seconds == 0 or self._monotonic() >= self._retry_at:
            self._catch_up()

    def call(self, method: str, *args: Any) -> None:
        """Calls another method of the sink; a failure is reported and not retried."""
        try:
            getattr(self.sink, method)(*args)
        except Exception as error:
            logger.warning("%s.%s failed: %s", self._name, method, _text(error))

    def flush(self) -> None:
        self._catch_up()
        if not self._retry_seconds:
            self.call("flush")

    def close(self) -> None:
        self._catch_up()
        lost = self._lost + len(self._backlog)
        if lost:
            logger.warning("%s: %d records could not be written", self._name, lost)
        self.call("close")

    def _catch_up(self) -> None:
        while self._backlog:
            try:
                self.sink.write(self._backlog[0])
            except Exception as error:
                if not self._retry_seconds:
                    logger.warning(
                        "%s failed at step %d: %s; training goes on, its records are kept and "
                        "tried again",
                        self._name,
                        self._backlog[0].step,
                        _text(error),
                    )
                self._retry_seconds = min(
                    2 * self._retry_seconds or FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
                )
                self._retry_at = self._monotonic() + self._retry_seconds
                return
            self._backlog.popleft()
        if self._retry_seconds:
            self._retry_seconds = 0.0
            logger.warning("%s works again; %d records were lost", self._name, self._lost)


class BackgroundWriter:
    """Runs `handle` on every item, in order, on one daemon thread.

    Args:
        handle: takes each item that is not callable; what it raises is logged.
        size: items that may wait. A full queue blocks `put` for `patience_seconds` once; if nothing
            moves, the writer counts as stuck and items are dropped until it moves again.
        patience_seconds: see `size`.

    Attributes:
        dropped: items lost because the writer was stuck.
    """

    def __init__(
        self, handle: Callable[[Any], None], *, size: int = 256, patience_seconds: float = 10.0
    ) -> None:
        self.dropped = 0
        self._handle = handle
        self._size = size
        self._patience_seconds = patience_seconds
        # Unbounded, but a tenth of the cost of queue.Queue; `put` keeps the bound.
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._has_moved = threading.Event()
        self._is_stuck = False
        self._is_busy = False
        self._thread = threading.Thread(target=self._run, name="mfu_jax writer", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queues one item; costs a few microseconds unless the queue is full."""
        if self._queue.qsize() < self._size or self._wait_for_room():
            self._queue.put(item)

    def is_idle(self) -> bool:
        """True if the next item will be handled immediately."""
        return not self._is_busy and self._queue.empty()

    def flush(self, timeout: float) -> bool:
        """Waits until everything put so far has been handled; False if that took too long."""
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Handles the rest and ends the thread; False if that took too long."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wait_for_room(self) -> bool:
        deadline = time.monotonic() + (0.0 if self._is_stuck else self._patience_seconds)
        while self._queue.qsize() >= self._size:
            self._has_moved.clear()
            left = deadline - time.monotonic()
            if left <= 0 or not self._has_moved.wait(left):
                self.dropped += 1
                if not self._is_stuck:
                    self._is_stuck = True
                    logger.warning(
                        "writing metrics is stuck: %d records wait; training goes on without "
                        "them; usually a disk or network that hangs",
                        self._size,
                    )
                return False
        self._is_stuck = False
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._is_busy = True
            self._has_moved.set()
            try:
                if callable(item):
                    item()
                else:
                    self._handle(item)
            except Exception:
                logger.exception("metrics of one step were lost; please report this")
            self._is_busy = False
            item = None  # keep no device arrays alive while the thread waits


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
