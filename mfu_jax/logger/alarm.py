"""An alarm that wakes one thread, and resets itself."""

from __future__ import annotations

import threading


class Alarm:
    """Like `threading.Event`, but `wait` resets it, and each method is one call into C.

    An `Event` needs a lock, a deque and several Python calls for every wait. That would be most of
    the cost of a thread that wakes up several times a second.

    >>> alarm = Alarm()
    >>> alarm.set(), alarm.wait(0.0), alarm.wait(0.0)
    (None, True, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes the waiting thread, or the next one to wait."""
        try:
            self._lock.release()
        except RuntimeError:  # already set
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set; False after a time-out of `timeout` seconds."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)
