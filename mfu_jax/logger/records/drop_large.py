"""Which metrics are small enough to keep until they are written: scalars and short vectors.

A metric is held until its step is done, so it outlives the step. Sizes are judged by shape, before
anything is kept. NumPy arrays are copied: a loop may reuse the same buffer in the next step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_log = logging.getLogger("mfu_jax")

MOST_NUMBERS = 16
"""Longest vector that is a metric; anything larger is left out."""

_PLAIN = (bool, int, float, str, type(None))


class MetricFilter:
    """Filters a logger's input: what is too large is left out, and named once.

    Args:
        on_function: called when a metric is a function, which may keep arrays of any size.
    """

    def __init__(self, on_function: Callable[[], object]) -> None:
        self._on_function = on_function
        self._left_out: set[str] = set()
        # The last abstract value or class of each small metric: outputs of one program share their
        # abstract values, so an identity check shows that nothing has changed.
        self._small: dict[Any, Any] = {}

    def of(self, metrics: Mapping[Any, Any]) -> dict[Any, Any]:
        """The metrics that are small enough to keep."""
        known = self._small
        for name, value in metrics.items():
            if getattr(value, "aval", value.__class__) is not known.get(name, self):
                return self._filtered(metrics)
        return dict(metrics)

    def _filtered(self, metrics: Mapping[Any, Any]) -> dict[Any, Any]:
        kept, left_out = drop_large(metrics)
        self._small = {
            name: getattr(value, "aval", value.__class__)
            for name, value in kept.items()
            if hasattr(value, "aval") or value.__class__ in _PLAIN
        }
        if left_out and (new := [text for text in left_out if text not in self._left_out]):
            self._left_out.update(new)
            _log.warning("metrics left out: %s", describe_dropped(new))
        if _has_function(kept):
            self._on_function()
        return kept


def drop_large(metrics: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    """The small metrics, and the names and shapes of those left out.

    >>> import numpy as np
    >>> drop_large({"loss": 1.5, "grads": {"w": np.ones((64, 64)), "norm": np.float32(2)}})[1]
    ['grads/w [64,64]']
    """
    kept: dict[Any, Any] = {}
    left_out: list[str] = []
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            kept[name], inner = drop_large(value)
            left_out += [f"{name}/{text}" for text in inner]
        elif size_of(value) <= MOST_NUMBERS:
            kept[name] = value.copy() if isinstance(value, np.ndarray) else value
        else:
            left_out.append(f"{name} {size_text(value)}")
    return kept, left_out


def _has_function(metrics: Mapping[Any, Any]) -> bool:
    return any(
        _has_function(value) if isinstance(value, Mapping) else callable(value)
        for value in metrics.values()
    )


def size_of(value: Any) -> int:
    """How many numbers a value holds; 1 for anything that is not an array or container."""
    if isinstance(value, _PLAIN):
        return 1
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return math.prod(shape)
    leaves = jax.tree.leaves(value)
    return 1 if len(leaves) == 1 and leaves[0] is value else sum(map(size_of, leaves))


def size_text(value: Any) -> str:
    """``[64,64]`` for an array, ``(3 arrays)`` for a container."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"[{','.join(map(str, shape))}]"
    return f"({len(jax.tree.leaves(value))} arrays)"


def describe_dropped(left_out: Sequence[str], most: int = 4) -> str:
    """What was left out and why, on one line."""
    names = ", ".join(left_out[:most])
    more = f" and {len(left_out) - most} more" if len(left_out) > most else ""
    return f"{names}{more}: a metric is a scalar or a vector of at most {MOST_NUMBERS} numbers"
