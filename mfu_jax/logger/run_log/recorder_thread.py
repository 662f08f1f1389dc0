"""One thread that handles queued items in batches, one period after they arrive.

Waking a thread costs the waking thread tens of microseconds, and the process as much again. So the
thread is not woken while items arrive faster than the periods; it polls. Its periods are short at
first: a whole one would be all but the first step of a run that is killed within it.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mfu_jax.logger.alarm import Alarm
from mfu_jax.util.failsafe import Boundary, Once, failsafe

logger = logging.getLogger("mfu_jax")

# How often the thread looks at its queue while no items arrive.
IDLE_SECONDS = 1.0
# The first period, and the part of its age that a young run loses in a kill.
FIRST_PERIOD_SECONDS = 0.05
_PART_OF_AGE = 0.2
_SHORTEST_SECONDS = 1e-4
# Longest wait for room if items arrive faster than they are handled; then the oldest are dropped.
# This budget recovers at the given fraction of elapsed time: no run is slowed by more.
PATIENCE_SECONDS = 1.0
_REGAINED = 0.01


class RecorderThread:
    """Handles items in order on one daemon thread.

    Args:
        handle: takes a batch of non-callable items; callable items are called instead.
        size: number of items that may wait. If the thread is too slow, `put` waits for one second,
            and from then on for 1% of the time; after that, each new item drops the oldest one.
        period_seconds: how often items are taken while they arrive; 0: each at once. Counted from
            the last time that some were taken, so that slow handling does not add to it.

    Attributes:
        dropped: number of non-callable items that were never handled.
    """

    def __init__(
        self,
        handle: Callable[[Sequence[Any]], None],
        *,
        size: int = 256,
        period_seconds: float = 0.1,
    ) -> None:
        self.dropped = 0
        self._period_seconds = period_seconds
        self._began, self._took_at = math.inf, 0.0  # when items were taken: the first and the last
        self._patience_seconds, self._waited_at = PATIENCE_SECONDS, time.monotonic()
        self._handle = handle
        self._size = size
        self._queue: deque[Any] = deque()
        self._wake = Alarm()
        self._has_moved = threading.Event()
        self._is_asleep = self._is_over = False
        self._is_first = Once()
        self._hurried = 0
        self._most = 0  # items that may wait before `put` calls `_attend`
        boundary = Boundary()
        self._failsafe = failsafe("some metrics were lost", boundary)
        self._thread = boundary.thread("mfu_jax recorder", "no more metrics are written", self._run)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queues one item; wakes the thread only if it is idle or many items wait."""
        queue = self._queue
        queue.append(item)
        if len(queue) > self._most:  # one check, because each costs a step microseconds
            self._attend()

    def flush_soon(self) -> None:
        """Wakes the thread for the step just dispatched, which keeps much memory alive.

        That step is put one step later, after the previous one.
        """
        self._hurried, self._most = 2, 0

    def settle(self, timeout: float) -> bool:
        """Waits until everything put so far has been handled; False on time-out."""
        done = threading.Event()
        self._queue.append(done.set)
        self._wake.set()
        return self._thread.is_alive() and done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Stops the thread; unhandled items count as dropped."""
        self._is_over = True
        self._wake.set()
        self._thread.join(timeout)
        self.dropped += sum(not callable(item) for item in self._take())

    def _attend(self) -> None:
        """Wakes the thread: it is asleep, hurried, or many items wait."""
        if len(self._queue) > self._size:
            self._make_room()
        self._hurried = max(0, self._hurried - 1)
        self._sleeps(False)
        self._wake.set()

    def _sleeps(self, is_asleep: bool) -> None:
        self._is_asleep = is_asleep
        self._most = 0 if is_asleep or self._hurried else (self._size - 1) // 2

    def _make_room(self) -> None:
        begun = time.monotonic()
        regained = _REGAINED * (begun - self._waited_at)
        patience = min(PATIENCE_SECONDS, self._patience_seconds + regained)
        while len(self._queue) > self._size:
            self._has_moved.clear()
            self._wake.set()
            left = begun + patience - time.monotonic()
            if left <= 0 or not self._has_moved.wait(left):
                self._drop_oldest()
                break
        self._waited_at = time.monotonic()
        self._patience_seconds = max(0.0, patience - (self._waited_at - begun))

    def _drop_oldest(self) -> None:
        if self._is_first():
            logger.warning(
                "making records is stuck or too slow: %d steps wait; training goes on, the oldest "
                "steps are left out\n"
                "hint: usually a metric that is a slow function, or an output that "
                "never gets ready",
                self._size,
            )
        try:
            self.dropped += not callable(self._queue.popleft())
        except IndexError:  # the thread moved after all
            return

    def _run(self) -> None:
        waits = False
        while not self._is_over:
            self._sleeps(not waits)
            if waits or not self._queue:
                self._wake.wait(self._due_seconds() if waits else IDLE_SECONDS)
            self._sleeps(False)
            items = self._take()
            # Calls alone, such as a set-up just before the loop, must not delay the first step.
            waits = self._period_seconds > 0 and not all(map(callable, items))
            self._handle_all(items)

    def _due_seconds(self) -> float:
        """Until the next items are to be taken."""
        now = time.monotonic()
        self._began = min(self._began, self._took_at)
        period = period_at(now - self._began, self._period_seconds)
        return max(_SHORTEST_SECONDS, self._took_at + period - now)

    def _take(self) -> list[Any]:
        self._took_at = time.monotonic()
        items: list[Any] = []
        for _ in range(len(self._queue)):
            try:
                items.append(self._queue.popleft())
            except IndexError:  # the oldest were dropped
                break
        self._has_moved.set()
        return items

    def _handle_all(self, items: list[Any]) -> None:
        """Empties `items`, so that during a call nothing keeps the steps before it alive."""
        while items:
            steps = list(itertools.takewhile(lambda item: not callable(item), items))
            del items[: len(steps)]
            with self._failsafe:
                if steps:
                    self._handle(steps)
                else:
                    items.pop(0)()
            del steps


def period_at(age: float, longest: float) -> float:
    """Seconds between two batches, `age` seconds after the first one.

    >>> [period_at(age, 0.5) for age in (0.0, 1.0, 10.0)]
    [0.05, 0.2, 0.5]
    """
    return min(max(FIRST_PERIOD_SECONDS, _PART_OF_AGE * age), longest)
