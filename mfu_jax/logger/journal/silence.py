"""When a process says that it lives, and how long one that is killed has been silent."""

from __future__ import annotations

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 0.5
_PART_OF_AGE = 1 / 800
# In intervals. A longer silence is a garbage collection, an import, a machine's sleep: it says
# nothing about those to come.
_LONGEST_SILENCE = 2.0
_KEEPS = 0.95  # of the signs before, with each


class Silence:
    """Times the signs of life of a process.

    Twenty a second tell the moment of a kill to 0.015 s, for a process that lived for seconds. The
    same part of its life is enough for one that lives for hours, and wakes a thread less often.

    They come late where Python's lock is held or cores are busy, so a random moment is more than
    half of the interval after the last one. It falls into an interval of length d with a chance
    that grows as d, and lies d/2 after its begin on average: the mean is Σd² / 2Σd.

    Args:
        now: the first sign, in seconds on any clock that does not go back.

    Attributes:
        interval_seconds: until the next sign is due.
        seconds: how old the last sign is at a random moment, on average.

    >>> silence = Silence(0.0)
    >>> silence.interval_seconds, silence.seconds
    (0.05, 0.025)
    >>> silence.heard(0.1)  # late
    >>> round(silence.seconds, 3)  # of 0.05 and 0.1
    0.042
    """

    def __init__(self, now: float) -> None:
        self._began = self._last = now
        self.interval_seconds = _SHORTEST_SECONDS
        self.seconds = _SHORTEST_SECONDS / 2
        # In units of the interval that was asked for.
        self._sum = self._squares = 1.0

    def heard(self, now: float) -> None:
        """A sign of life."""
        passed = min((now - self._last) / self.interval_seconds, _LONGEST_SILENCE)
        self._sum = _KEEPS * self._sum + passed
        self._squares = _KEEPS * self._squares + passed * passed
        self._last = now
        age = now - self._began
        self.interval_seconds = min(max(_SHORTEST_SECONDS, _PART_OF_AGE * age), _LONGEST_SECONDS)
        self.seconds = self.interval_seconds * self._squares / (2.0 * self._sum)
