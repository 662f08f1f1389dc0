"""The median of a million numbers without sorting them."""

from __future__ import annotations

from collections.abc import Sequence

# Size of a sample at equal strides; the median lies between two of its values.
_SAMPLES = 1000
_MARGIN = 0.06


def lower_median(parts: Sequence[Sequence[int]]) -> int:
    """The lower median of whole numbers; 0 if there are none.

    Args:
        parts: the numbers, in lists of any length.

    >>> lower_median([[5, 1], [], [2, 9, 3]]), lower_median([[4, 1], [2, 3]])
    (3, 2)
    """
    count = sum(map(len, parts))
    if not count:
        return 0
    low, high = _bracket(parts, count)
    middle = (count + 1) // 2
    inside: list[int] = []
    for part in parts:
        above = [value for value in part if value >= low]
        middle -= len(part) - len(above)
        inside += [value for value in above if value <= high]
    if not 0 < middle <= len(inside):  # the sample was not representative
        return sorted(value for part in parts for value in part)[(count + 1) // 2 - 1]
    return sorted(inside)[middle - 1]


def _bracket(parts: Sequence[Sequence[int]], count: int) -> tuple[int, int]:
    """Two values that most likely enclose the median, and little else."""
    stride = max(1, count // _SAMPLES)
    sample: list[int] = []
    passed = 0
    for part in parts:
        sample += part[-passed % stride :: stride]
        passed += len(part)
    sample.sort()
    half, margin = len(sample) // 2, int(_MARGIN * len(sample)) + 1
    return sample[max(0, half - margin)], sample[min(len(sample) - 1, half + margin)]
