"""The values that a loop gives as metrics: which are kept, and what numbers they are.

A metric is held until its step is done, so it outlives the step: only scalars and short vectors
are, judged by shape before anything is kept. NumPy arrays are copied: a loop may reuse the same
buffer in the next step. On the recorder's thread each becomes a Python int or float, or there is a
reason why not. NaN and Inf pass: they are news, not mistakes.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mfu_jax.errors import escaped
from mfu_jax.util.failsafe import Once

_log = logging.getLogger("mfu_jax")

MOST_NUMBERS = 16
"""Longest vector that is a metric; anything larger is left out."""

_PLAIN = (bool, int, float, str, type(None))


# Anything shorter is below clock resolution, anything longer is over 30 years: not a step.
SHORTEST_SECONDS = 1e-9
LONGEST_SECONDS = 1e9

# Classes of JAX arrays that a logger was given: `isinstance` would ask the metaclass each time.
_ARRAY_CLASSES: set[type] = set()
_NUMBER_CLASSES = frozenset((int, float))
_item = operator.methodcaller("item")


class MetricFilter:
    """Filters a logger's input: what is too large is left out, and named once.

    Args:
        on_function: called when a metric is a function, which may keep arrays of any size.
    """

    def __init__(self, on_function: Callable[[], object]) -> None:
        self._on_function = on_function
        self._is_first = Once()
        # The last abstract value or class of each small metric: outputs of one program share their
        # abstract values, so an identity check shows that nothing has changed.
        self._small: dict[Any, Any] = {}

    def of(self, metrics: Mapping[Any, Any], steps: int = 1) -> dict[Any, Any]:
        """The metrics that are small enough to keep.

        Args:
            metrics: of a call.
            steps: how many it ran; a loss of each of too many is replaced by their mean.
        """
        if steps > MOST_NUMBERS and getattr(metrics.get("loss"), "shape", None) == (steps,):
            losses = metrics["loss"]
            losses = losses.copy() if isinstance(losses, np.ndarray) else losses
            rest = self.of({**metrics, "loss": functools.partial(_mean, losses)})
            return {**rest, "_losses": losses}  # waited for, as functions are not
        known = self._small
        for name, value in metrics.items():
            kind = value.__class__
            if (value.aval if kind in _ARRAY_CLASSES else kind) is not known.get(name):
                return self._filtered(metrics)
        return dict(metrics)

    def seconds(self, value: Any) -> float | None:
        """A step time given by the loop; None, said once, if it cannot be one."""
        seconds = plain_seconds(value)
        if seconds is None and self._is_first("step_time_seconds"):
            _log.warning(
                "step_time_seconds=%s is no time of a step; expected seconds above 0\nhint: "
                "usually a clock that failed; the logger's own measure is used",
                escaped(repr(value)[:100]),
            )
        return seconds

    def _filtered(self, metrics: Mapping[Any, Any]) -> dict[Any, Any]:
        kept, left_out = drop_large(metrics)
        _ARRAY_CLASSES.update(type(v) for v in kept.values() if isinstance(v, jax.Array))
        self._small = {
            name: value.aval if type(value) in _ARRAY_CLASSES else type(value)
            for name, value in kept.items()
            if type(value) in _ARRAY_CLASSES or type(value) in _PLAIN
        }
        if new := [*filter(self._is_first, left_out)]:
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


def _mean(losses: Any) -> np.float32:
    return np.mean(np.asarray(losses), dtype=np.float32)


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


_RULE = f"a metric is a scalar or a vector of at most {MOST_NUMBERS} numbers"


def describe_dropped(left_out: Sequence[str], rule: str = _RULE, most: int = 4) -> str:
    """What was left out and why, on one line."""
    names = ", ".join(left_out[:most])
    more = f" and {len(left_out) - most} more" if len(left_out) > most else ""
    return f"{names}{more}: {rule}"


def quick_numbers(values: Collection[Any]) -> list[int | float] | None:
    """The numbers of device scalars, as most metrics are; None if a closer look is needed.

    Uses only a few calls into C, because it runs for every step.
    """
    if not _ARRAY_CLASSES.issuperset(map(type, values)):
        return None
    try:
        numbers = [*map(_item, map(np.asarray, values))]
    except Exception:  # one is deleted, not a scalar, or a typed key; a closer look tells which
        return None
    return numbers if _NUMBER_CLASSES.issuperset(map(type, numbers)) else None


def numbers_of(name: str, value: Any) -> dict[str, int | float]:
    """The plain numbers of a metric: one, or several with an index; a loss also as their mean.

    Args:
        name: its name.
        value: what the loop gave, or a function that returns it, or several by name; None: no
            number.

    Raises:
        Exception: see `plain_number`, or whatever the function raises.
    """
    value = value() if callable(value) else value
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{name}/{key}": plain_number(number) for key, number in value.items()}
    shape: tuple[int, ...] = getattr(value, "shape", ())
    if len(shape) != 1 or not 1 < shape[0] <= MOST_NUMBERS:
        return {name: plain_number(value)}
    numbers = [plain_number(item) for item in np.asarray(value)]
    mean = {name: math.fsum(numbers) / len(numbers)} if name == "learning/loss" else {}
    return mean | {f"{name}/{index}": number for index, number in enumerate(numbers)}


def plain_number(value: Any) -> int | float:
    """A scalar of any library as a Python int or float; copies it from the device.

    Raises:
        ValueError: it is not a number, or an integer too large for a float.
        Exception: whatever reading it raises.
    """
    if type(value) is float:
        return value
    if isinstance(value, str | bytes):
        raise ValueError("it is text; expected a number; usually a label; use write_text for it")
    array = _on_host(value)
    kind = array.dtype.kind
    if kind in "cUSMm":
        raise ValueError(
            f"it is of dtype {array.dtype}; expected a real number; usually a label, a time, or an "
            f"eigenvalue; log the part of it that you need"
        )
    number = array.reshape(-1)[0]
    if kind not in "iub" and not isinstance(number, int):
        return float(number)
    try:
        float(number)
    except OverflowError:
        raise ValueError(
            "it is an integer that no 64-bit float can hold; expected at most 1.8e308; usually a "
            "count that overflowed; log its logarithm"
        ) from None
    return int(number)


def _on_host(value: Any) -> np.ndarray:
    """An array of one number."""
    if isinstance(value, jax.Array):
        _check_shape(value.shape)  # before it is copied
    try:
        array = np.asarray(value)
    except RuntimeError:
        if not is_deleted(value):
            raise
        raise ValueError(
            "it was deleted before it could be read; expected an output that lives for one more "
            "step; usually it is part of the donated state; return a copy of it as a separate "
            "metric"
        ) from None
    _check_shape(array.shape)
    return array


def _check_shape(shape: tuple[int, ...]) -> None:
    if math.prod(shape) != 1:
        raise ValueError(
            f"it has shape {shape}; expected one number; usually a loss per token or per device; "
            f"take its mean inside the step"
        )


def is_deleted(value: Any) -> bool:
    """True if `value` is an array whose buffer was donated or deleted."""
    deleted = getattr(value, "is_deleted", None)
    return deleted is not None and bool(deleted())


def plain_seconds(value: Any) -> float | None:
    """A step time given by the caller, as a float; None if it cannot be a step time.

    >>> plain_seconds(np.float32(0.5))
    0.5
    >>> [plain_seconds(value) for value in (float("nan"), -1.0, 0, "1.5", 1e308, True)]
    [None, None, None, None, None, None]
    """
    if isinstance(value, bool | str | bytes):
        return None
    try:
        seconds = float(value)
    except Exception:  # whatever it is, it is not a time
        return None
    return seconds if SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS else None


def start_copies(metrics: Mapping[Any, Any]) -> None:
    """Starts the copies of all values to the host, before anyone waits for the first of them.

    `np.asarray` then finds each value there; on a CPU it reads in place, seven times faster than
    `jax.device_get`.
    """
    if _is_on_cpu():
        return
    for value in metrics.values():
        if isinstance(value, Mapping):
            start_copies(value)
        elif hasattr(value, "copy_to_host_async") and not is_deleted(value):
            value.copy_to_host_async()


@functools.cache
def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"
