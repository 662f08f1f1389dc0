"""Which of a step's outputs are metrics, and which one shows that the step has ended."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.logger.timing.readiness import end_marker

Metrics = dict[str, Any]
Select = Callable[[Any], Any]

_DEEPEST = 3  # ((loss, aux), grads) inside a step's tuple; model states nest deeper


class Selection(NamedTuple):
    """How the metrics of a step are read from its output.

    Attributes:
        read: from output to metrics.
        text: which outputs they are, in words.
    """

    read: Callable[[Any], Metrics]
    text: str


def select_metrics(output: Any, select: Select | None = None) -> Selection:
    """Chooses the metrics of a step, by its first output.

    In this order: a mapping that holds ``loss`` (or an object that has it as an attribute); scalars
    in the output's tuples, of which the first floating-point one is the loss; a mapping with a name
    that contains ``loss``. If there is none, the logger waits for a copy of the smallest output.

    Args:
        output: what the step returned; only shapes and names are looked at.
        select: the user's choice instead: from the output to a mapping of scalars, or one scalar.

    Raises:
        UserError: `select` failed, or the step was called while JAX traces.
    """
    _refuse_tracers(output)
    if select is not None:
        chosen = _checked(select, output)
        if chosen:
            return Selection(lambda out: _as_metrics(select(out)), "chosen by metrics=…")
    selection = _find(output)
    if selection is not None and select is None:
        return _unreplicated(selection, output)
    return Selection(_read_marker, "none; timed on a copy of the smallest output")


def _find(output: Any) -> Selection | None:
    places = list(_places(output, (), 0))
    for path, value in places:
        if isinstance(value, Mapping) and "loss" in value:
            return _of_mapping(path, value)
    for path, value in places:
        if not _is_container(value) and _is_scalar(getattr(value, "loss", None)):
            return _of_attributes(path, value)
    scalars = [(path, value) for path, value in places if _is_scalar(value)]
    if scalars:
        return _of_scalars(scalars)
    for path, value in places:
        if isinstance(value, Mapping) and any("loss" in str(k).lower() for k in value):
            return _of_mapping(path, value)
    return None


def _places(value: Any, path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    # Named tuples are optimizer states, whose counters are not metrics.
    if type(value) in (tuple, list) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from _places(item, (*path, index), depth + 1)


def _of_mapping(path: tuple[Any, ...], value: Mapping[Any, Any]) -> Selection:
    names = {str(k): k for k, v in value.items() if isinstance(v, Mapping) or _is_scalar(v)}
    get = _getter(path)

    def read(out: Any) -> Metrics:
        found = get(out)
        return {name: found[key] for name, key in names.items()}

    # Read in every step, with cold caches: if all of it is metrics, one copy is faster.
    whole = type(value) is dict and list(names) == list(value)
    text = f"{_shown(path)}: {', '.join(names) or 'no scalar'}"
    if lost := [str(k) for k, v in value.items() if str(k) not in names and "loss" in str(k)]:
        text += (
            f"; {', '.join(lost)} is left out because it is not a scalar: take its mean in the step"
        )
    return Selection((lambda out: get(out).copy()) if whole else read, text)


def _of_attributes(path: tuple[Any, ...], value: Any) -> Selection:
    names = [name for name in vars(value) if _is_scalar(getattr(value, name))]

    def read(out: Any) -> Metrics:
        found = _at(out, path)
        return {name: getattr(found, name) for name in names}

    return Selection(read, f"{_shown(path)}: {', '.join(names)}")


def _of_scalars(scalars: list[tuple[tuple[Any, ...], Any]]) -> Selection:
    floats = [path for path, value in scalars if np.issubdtype(_dtype(value), np.inexact)]
    loss = floats[0] if floats else None
    names = {
        path: "loss" if path == loss else "output_" + "_".join(map(str, path))
        for path, _ in scalars
    }

    def read(out: Any) -> Metrics:
        return {name: _at(out, path) for path, name in names.items()}

    return Selection(read, ", ".join(f"{_shown(p)} as {name}" for p, name in names.items()))


def _unreplicated(selection: Selection, output: Any) -> Selection:
    """Takes the first device's value where pmap returns one for each device."""
    stacked = {k for k, v in selection.read(output).items() if _is_stacked(v)}
    if not stacked:
        return selection

    def read(out: Any) -> Metrics:
        metrics = selection.read(out)
        return {k: v.addressable_data(0) if k in stacked else v for k, v in metrics.items()}

    return Selection(read, f"{selection.text}; where each device has a value, the first device's")


def _read_marker(out: Any) -> Metrics:
    return {"_end": end_marker(out)}


def _checked(select: Select, output: Any) -> Metrics:
    try:
        return _as_metrics(select(output))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"metrics=… failed on the step's output ({type(error).__name__}: {error}); expected a "
            f"function from what the step returns to its scalars; usually the output is nested "
            f"differently; it is {_shape_of(output)}"
        ) from error


def _as_metrics(chosen: Any) -> Metrics:
    if chosen is None:
        return {}
    if isinstance(chosen, Mapping):
        return dict(chosen)
    if _is_scalar(chosen):
        return {"loss": chosen}
    raise UserError(
        f"metrics=… returned {type(chosen).__name__}; expected a mapping of scalars, or the loss; "
        f"usually an array of losses; take its mean inside the step"
    )


def _shape_of(output: Any) -> str:
    text = str(jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), output))
    return text if len(text) < 200 else f"{text[:200]}…"


def _refuse_tracers(output: Any) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(output)):
        raise UserError(
            "an instrumented step was called while JAX traces another function; expected a call "
            "from a Python loop; usually it is called inside jit, scan or grad; instrument the "
            "outermost function that the loop calls"
        )


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | tuple | list) or _is_scalar(value) or hasattr(value, "shape")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return False  # a random key
    return value.shape == () or _is_stacked(value)


def _is_stacked(value: Any) -> bool:
    """One number for each device, as pmap returns it."""
    sharding = getattr(value, "sharding", None)
    if sharding is None or getattr(value, "shape", ()) != (sharding.num_devices,):
        return False
    return value.shape[0] > 1 and sharding.shard_shape(value.shape) == (1,)


def _dtype(value: Any) -> Any:
    return getattr(value, "dtype", type(value))


def _at(out: Any, path: tuple[Any, ...]) -> Any:
    for index in path:
        out = out[index]
    return out


def _getter(path: tuple[Any, ...]) -> Callable[[Any], Any]:
    return operator.itemgetter(path[0]) if len(path) == 1 else functools.partial(_at, path=path)


def _shown(path: tuple[Any, ...]) -> str:
    return "output" + "".join(f"[{index}]" for index in path)
