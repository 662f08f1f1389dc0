"""An alarm that wakes one thread, and resets itself."""

from __future__ import annotations

import threading


class Alarm:
    """Like `threading.Event`, but `wait` resets it, and each of its methods is one call into C.

    An `Event` makes a lock, a deque and several Python calls for every wait. That would be most of
    what a thread costs that wakes up several times a second.

    >>> alarm = Alarm()
    >>> alarm.set(), alarm.wait(0.0), alarm.wait(0.0)
    (None, True, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes the thread that waits, or the next one to do so."""
        try:
            self._lock.release()
        except RuntimeError:  # it is set
            return

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set; False if that took longer than `timeout` seconds."""
        return self._lock.acquire(timeout=-1 if timeout is None else timeout)
