"""How long a process that is killed has been silent."""

from __future__ import annotations

# A longer silence is a stop by hand or a machine's sleep: it says nothing about the others.
_LONGEST_SECONDS = 0.5


class Silence:
    """Mean time since the last sign of life at a random moment of the process' life.

    Signs of life are late where Python's lock is held or cores are busy, so this is more than half
    of the interval that was asked for. A random moment falls into an interval of length d with a
    chance that grows as d, and lies d/2 after its begin on average: the mean is Σd² / 2Σd.

    Args:
        seconds: between two signs of life, as asked for.
        now: the first sign, on any clock that does not go back.

    >>> silence = Silence(1.0, 0.0)
    >>> [round(silence.heard(now), 3) for now in (0.1, 0.2)]  # and the one that was asked for
    [0.459, 0.425]
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._sum, self._squares = seconds, seconds * seconds
        self._last = now

    def heard(self, now: float) -> float:
        """A sign of life; returns the mean so far, in seconds."""
        passed = min(now - self._last, _LONGEST_SECONDS)
        self._last = now
        self._sum += passed
        self._squares += passed * passed
        return self._squares / (2.0 * self._sum)
