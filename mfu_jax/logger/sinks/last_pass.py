"""Finds the records of a file from the last pass of a loop that went back and repeated steps."""

from __future__ import annotations

import math
from collections.abc import Sequence


def in_last_pass(steps: Sequence[int], stop: float = math.inf) -> bytearray:
    """Marks the records whose step is below `stop` and all later ones.

    Args:
        steps: steps of the records of a file, in its order.
        stop: the first step that will be written again.

    Returns:
        For each record 1, or 0 if the loop later went back to its step or before it.

    >>> list(in_last_pass([0, 1, 2, 3, 1, 2]))
    [1, 0, 0, 0, 1, 1]
    >>> list(in_last_pass([0, 1, 2, 3, 1, 2], stop=2))
    [1, 0, 0, 0, 1, 0]
    """
    marks, lowest = bytearray(len(steps)), stop
    for place in range(len(steps) - 1, -1, -1):
        if steps[place] < lowest:
            marks[place], lowest = 1, steps[place]
    return marks
