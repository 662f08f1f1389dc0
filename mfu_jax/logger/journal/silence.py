"""When a process writes a sign of life, and how long a killed process has been silent."""

from __future__ import annotations

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 0.5
_PART_OF_AGE = 1 / 800
# In intervals. A longer silence is a garbage collection, an import or a machine's sleep, and says
# nothing about future ones.
_LONGEST_SILENCE = 2.0
_KEEPS = 0.95  # weight of earlier signs, for each new one


class Silence:
    """Times the signs of life of a process.

    Twenty per second give the time of a kill to 0.015 s, for a process that lived for seconds. The
    same fraction of its life is enough for one that lives for hours, and wakes a thread less often.

    Signs are late when the GIL is held or cores are busy, so a random moment is on average more
    than half the interval after the last one. It falls into an interval of length d with
    probability proportional to d, on average d/2 after its start: the mean is Σd² / 2Σd.

    Args:
        now: time of the first sign, in seconds on any clock that does not go back.

    Attributes:
        interval_seconds: until the next sign is due.
        seconds: mean age of the last sign at a random moment.

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
        # In units of the requested interval.
        self._sum = self._squares = 1.0

    def heard(self, now: float) -> None:
        """Notes a sign of life."""
        passed = min((now - self._last) / self.interval_seconds, _LONGEST_SILENCE)
        self._sum = _KEEPS * self._sum + passed
        self._squares = _KEEPS * self._squares + passed * passed
        self._last = now
        age = now - self._began
        self.interval_seconds = min(max(_SHORTEST_SECONDS, _PART_OF_AGE * age), _LONGEST_SECONDS)
        self.seconds = self.interval_seconds * self._squares / (2.0 * self._sum)
