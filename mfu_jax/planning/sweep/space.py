"""The points of a sweep: every combination of the values that the user lists."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mfu_jax.errors import UserError

BATCH = "per_device_batch_size"
_MOST_POINTS = 4096
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class SweepPoint:
    """One combination.

    Attributes:
        pairs: key and value text of everything that is swept, in the order given.
    """

    pairs: tuple[tuple[str, str], ...]

    @cached_property
    def values(self) -> dict[str, str]:
        """Key → value text."""
        return dict(self.pairs)

    @cached_property
    def group(self) -> tuple[tuple[str, str], ...]:
        """Everything but the batch: points of one group differ only in their batch."""
        return tuple(pair for pair in self.pairs if pair[0] != BATCH)

    @cached_property
    def batch(self) -> float:
        """Sequences per device; 1 if the batch is not swept."""
        return float(self.values.get(BATCH, 1))

    def __str__(self) -> str:
        return " ".join(f"{key}={text}" for key, text in self.pairs)


def split(values: Mapping[str, str]) -> tuple[dict[str, str], list[SweepPoint]]:
    """The keys with one value, and the points of the keys that are swept.

    Args:
        values: key → text. ``a,b`` and ``1..16`` (whole numbers) are swept; ``[a,b]`` is one value.

    Raises:
        UserError: nothing is swept, a range is empty, the batch is not a number, or there are too
            many points.

    >>> fixed, points = split({"model_name": "llama3-8b", "fsdp": "4,8", "tensor": "1..2"})
    >>> fixed, [str(point) for point in points]
    ({'model_name': 'llama3-8b'}, ['fsdp=4 tensor=1', 'fsdp=4 tensor=2', 'fsdp=8 tensor=1', \
'fsdp=8 tensor=2'])
    """
    swept = {key: listed(key, text) for key, text in values.items() if is_swept(text)}
    if not swept:
        raise UserError(
            "nothing to sweep; expected a list or a range, such as remat_policy=none,minimal,full "
            "per_device_batch_size=1..16"
        )
    count = math.prod(map(len, swept.values()))
    if count > _MOST_POINTS:
        raise UserError(f"the sweep has {count:,} points; expected at most {_MOST_POINTS:,}")
    points = [
        SweepPoint(tuple(zip(swept, texts, strict=True)))
        for texts in itertools.product(*swept.values())
    ]
    fixed = {key: text for key, text in values.items() if key not in swept}
    return fixed, points


def is_swept(text: str) -> bool:
    """Whether a value stands for several: ``a,b`` or ``1..16``."""
    return bool(_RANGE.fullmatch(text)) or ("," in text and not text.startswith(("[", "(", "{")))


def listed(key: str, text: str) -> list[str]:
    """The values that a swept text stands for.

    Raises:
        UserError: the range is empty, or the batch is not a number.
    """
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + _MOST_POINTS:
            raise UserError(f"{key}={text}: expected FIRST..LAST, a range of whole numbers")
        return [str(number) for number in range(first, last + 1)]
    texts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if key == BATCH and not all(re.fullmatch(r"\d*\.?\d+", part) for part in texts):
        raise UserError(f"{key}={text}: expected numbers, such as 1,2,4 or 1..16")
    return texts


_SECONDS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """Parses a time as the user writes it.

    Raises:
        UserError: the text is not a time.

    >>> seconds_of("20min"), seconds_of("1.5h"), seconds_of("90")
    (1200.0, 5400.0, 90.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _SECONDS:
        raise UserError(
            f"budget={text}: expected a time, such as 20min, 90s or 2h",
            hint="usually another unit: s, min and h are known; without one, it is seconds",
        )
    return float(found[1]) * _SECONDS[found[2]]
