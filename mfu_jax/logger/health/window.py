"""The median and the spread of the most recent values, kept sorted."""

from __future__ import annotations

import bisect
from collections import deque

# Ratio of the standard deviation of normal values to their median absolute deviation.
NORMAL = 1.4826


class SortedWindow:
    """The most recent values of a series.

    Args:
        size: number of values.

    >>> window = SortedWindow(3)
    >>> for value in (5.0, 1.0, 2.0, 9.0):
    ...     window.add(value)
    >>> len(window), window.median, window.spread == NORMAL * 1.0
    (3, 2.0, True)
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Adds a finite value; drops the oldest if there are too many."""
        self._values.append(value)
        bisect.insort(self._ordered, value)
        if len(self._values) > self._size:
            oldest = self._values.popleft()
            del self._ordered[bisect.bisect_left(self._ordered, oldest)]

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()
        self._ordered.clear()

    @property
    def median(self) -> float:
        """The middle value; for an even number, the upper one."""
        return self._ordered[len(self._ordered) // 2]

    @property
    def spread(self) -> float:
        """A robust standard deviation, not affected by outliers."""
        middle = self.median
        deviations = sorted(abs(value - middle) for value in self._values)
        return NORMAL * deviations[len(deviations) // 2]
