"""Finds which of a step's outputs are metrics, and which one marks the step's end."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.logger.records.values import MOST_NUMBERS, describe_dropped, drop_large, size_text
from mfu_jax.logger.timing.readiness import end_marker

Metrics = dict[str, Any]
Select = Callable[[Any], Any]

_DEEPEST = 3  # ((loss, aux), grads) inside a step's tuple; model states nest deeper


class Selection(NamedTuple):
    """How the metrics of a step are read from its output.

    Attributes:
        read: a function from output to metrics.
        text: which outputs they are, in words.
        left_out: what is not taken as a metric, and why, in words; empty if nothing is.
    """

    read: Callable[[Any], Metrics]
    text: str
    left_out: str = ""


def select_metrics(output: Any, select: Select | None = None, *, steps: int = 1) -> Selection:
    """Chooses the metrics of a step from its first output.

    In this order: a mapping with a key ``loss`` (or an object with such an attribute); scalars in
    the output's tuples, the first floating-point one being the loss; a mapping with a key that
    contains ``loss``. If there is none, the logger waits for a copy of the smallest output. A loss
    that is an array is replaced by its mean, unless it has an entry for each of at most 16 steps.
    Nothing larger than a short vector is kept.

    Args:
        output: what the step returned; only shapes and names are inspected.
        select: the user's choice instead: from the output to a mapping of scalars, or one scalar.
        steps: how many steps the call ran; their metrics may be stacked.

    Raises:
        UserError: `select` failed.
    """
    if select is not None:
        chosen = _checked(select, output, steps)
        if chosen:
            left_out = drop_large(chosen)[1]
            text = "chosen by metrics=…"
            return Selection(
                lambda out: drop_large(_as_metrics(select(out), steps))[0],
                text,
                describe_dropped(left_out) if left_out else "",
            )
    elif 1 < steps <= MOST_NUMBERS:
        with contextlib.suppress(Exception):  # a tree of a class that takes arrays only
            if (found := _find(_of_a_step(output, steps))) is not None:
                return found
    selection = _find(output)
    if selection is not None and select is None:
        return _unreplicated(selection, output)
    return marker_only(_hint(output) if select is None else "")


def _of_a_step(output: Any, steps: int) -> Any:
    """The shapes of an output without the leading dimension that a scan over steps adds.

    A scan adds it to every leaf of its outputs. Where only some leaves have it, it is another
    dimension, as in parameters of that width. They may also all have it, so outputs that are one
    number a step are preferred, then the last output, as a scan's follow its carry.
    """

    def is_part(value: Any) -> bool:
        return not (value is output or _has_loss(value))

    parts, structure = jax.tree.flatten(output, is_leaf=is_part)
    shapes = [{getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(part)} for part in parts]
    stacked = [i for i, own in enumerate(shapes) if {shape[:1] for shape in own} == {(steps,)}]
    numbers = [i for i in stacked if shapes[i] == {(steps,)}]
    shape = jax.ShapeDtypeStruct
    for index in numbers or stacked[-1:]:
        parts[index] = jax.tree.map(lambda leaf: shape(leaf.shape[1:], leaf.dtype), parts[index])
    return jax.tree.unflatten(structure, parts)


def _has_loss(value: Any) -> bool:
    return "loss" in value if isinstance(value, Mapping) else hasattr(value, "loss")


def marker_only(hint: str = "") -> Selection:
    """No metrics: the step is timed on a copy of its smallest output."""
    return Selection(read_marker, f"none; timed on a copy of the smallest output{hint}")


def wait_for(selection: Selection, output: Any) -> None:
    """Waits for a step, because a busy CPU cannot be calibrated."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a device error; the timer hits it too
        jax.block_until_ready(selection.read(output))


def read_marker(output: Any) -> Metrics:
    """The array to wait for, under a hidden name."""
    return {"_end": end_marker(output)}


def _find(output: Any) -> Selection | None:
    places = list(_places(output, (), 0))
    for path, value in places:
        if isinstance(value, Mapping) and "loss" in value:
            return _of_mapping(path, value)
    for path, value in places:
        is_named = hasattr(value, "_fields") or not _is_container(value)
        loss = getattr(value, "loss", None) if is_named else None
        if _is_scalar(loss) or _is_loss(loss):
            return _of_attributes(path, value)
    scalars = [(path, value) for path, value in places if _is_scalar(value)]
    if scalars:
        return _of_scalars(scalars, places)
    for path, value in places:
        if isinstance(value, Mapping) and any("loss" in str(k).lower() for k in value):
            return _of_mapping(path, value)
    return None


def _beside(loss: tuple[Any, ...], places: list[tuple[tuple[Any, ...], Any]]) -> str:
    """The mapping of scalars beside a loss, as in ``(loss, {"accuracy": …})``, if there is one."""
    for path, value in places:
        names = _names_of(value if isinstance(value, Mapping) else {})
        if names.kept and not names.left_out:  # else it is a state
            both = f"{{'loss': {_shown(loss)}, **{_shown(path)}}}"
            return (
                f"{names.text} in {_shown(path)}; to log them, pass metrics=lambda output: {both}"
            )
    return ""


def _hint(output: Any) -> str:
    """What to pass as ``metrics=``, if an output looks like metrics but cannot be read."""
    for path, value in _places(output, (), 0):
        if callable(getattr(value, "compute", None)):  # a collection of clu.metrics
            return f"; to log them, pass metrics=lambda output: {_shown(path)}.compute()"
    for path, value in _places(output, (), 0):
        if _is_loss(value) and len(value.shape) == 1:
            return (
                f"; if {_shown(path)}, {size_text(value)}, holds a loss of each example, pass "
                f"metrics=lambda output: {_shown(path)}"
            )
    for path, value in _places(output, (), 0):
        entries = value if isinstance(value, Mapping) else {}
        if names := [str(k) for k, v in entries.items() if _is_scalar(v)]:
            return (
                f"; if {', '.join(names[:3])} in {_shown(path)} are metrics, pass "
                f"metrics=lambda output: {_shown(path)}"
            )
    return ""


def _places(value: Any, path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    # Named tuples are usually optimizer states, whose counters are not metrics.
    if type(value) in (tuple, list) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from _places(item, (*path, index), depth + 1)


class _Names(NamedTuple):
    """Which entries of a mapping are metrics.

    Attributes:
        kept: key of each metric → None, or the `_Names` of a nested mapping.
        means: keys of arrays whose mean is the metric.
        left_out: names and shapes of the other entries.
    """

    kept: dict[Any, Any]
    means: list[Any]
    left_out: list[str]

    def read(self, found: Mapping[Any, Any]) -> Metrics:
        values = {
            str(key): found[key] if inner is None else inner.read(found[key])
            for key, inner in self.kept.items()
        }
        for key in self.means:
            values[str(key)] = _mean(found[key])
        return values

    @property
    def text(self) -> str:
        names = [f"mean of {key}" if key in self.means else str(key) for key in self.kept]
        return ", ".join(names) or "no scalar"


def _names_of(value: Mapping[Any, Any]) -> _Names:
    names = _Names({}, [], [])
    for key, item in value.items():
        if isinstance(item, Mapping):
            inner = _names_of(item)
            names.left_out.extend(f"{key}/{text}" for text in inner.left_out)
            if inner.kept:
                names.kept[key] = inner
        elif _is_scalar(item):
            names.kept[key] = None
        elif "loss" in str(key).lower() and _is_loss(item):
            names.kept[key] = None
            names.means.append(key)
        elif item is not None:
            names.left_out.append(f"{key} {size_text(item)}")
    return names


def _of_mapping(path: tuple[Any, ...], value: Mapping[Any, Any]) -> Selection:
    names = _names_of(value)
    get = operator.itemgetter(*path) if len(path) == 1 else functools.partial(_at, path=path)
    # This runs in every step, with cold caches: if every entry is a metric, one copy is faster.
    whole = type(value) is dict and list(names.kept) == list(value) == [*map(str, value)]
    whole = whole and not names.means and all(inner is None for inner in names.kept.values())
    rule = (
        f"scalars are found automatically; to log vectors of at most {MOST_NUMBERS} numbers, too, "
        f"pass metrics=lambda output: {_shown(path)}"
    )
    return Selection(
        (lambda out: get(out).copy()) if whole else (lambda out: names.read(get(out))),
        f"{_shown(path)}: {names.text}",
        describe_dropped(names.left_out, rule) if names.left_out else "",
    )


def _of_attributes(path: tuple[Any, ...], value: Any) -> Selection:
    fields = {name: getattr(value, name) for name in _field_names(value)}
    names = _names_of({k: v for k, v in fields.items() if _is_scalar(v) or k == "loss"})

    def read(out: Any) -> Metrics:
        found = _at(out, path)
        return names.read({name: getattr(found, name) for name in names.kept})

    return Selection(read, f"{_shown(path)}: {names.text}")


def _field_names(value: Any) -> list[str]:
    """Field names of a named tuple, a dataclass with or without slots, or any other object."""
    found: Any = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    names = found or getattr(value, "__dict__", ("loss",))
    return [name for name in names if hasattr(value, name)]


def _of_scalars(
    scalars: list[tuple[tuple[Any, ...], Any]], places: list[tuple[tuple[Any, ...], Any]]
) -> Selection:
    floats = [path for path, value in scalars if np.issubdtype(_dtype(value), np.inexact)]
    loss = floats[0] if floats else None
    names = {
        path: "loss" if path == loss else "output_" + "_".join(map(str, path))
        for path, _ in scalars
    }

    def read(out: Any) -> Metrics:
        return {name: _at(out, path) for path, name in names.items()}

    text = ", ".join(f"{_shown(p)} as {name}" for p, name in names.items())
    return Selection(read, text, _beside(loss, places) if loss else "")


def _unreplicated(selection: Selection, output: Any) -> Selection:
    """Reduces values with one entry per device to one number.

    `jax.pmap` adds such an axis to all its outputs; the first entry is taken. Other steps may
    return a loss per example of a batch whose size equals the number of devices.
    """
    found = selection.read(output)
    stacked = {name for name, value in found.items() if _is_stacked(value)}
    if not stacked:
        return selection
    of_examples = set() if _is_pmapped(output) else {k for k in stacked if _is_loss(found[k])}

    def read(out: Any) -> Metrics:
        found = selection.read(out)
        for name in stacked:
            value = found[name]
            found[name] = _mean(value) if name in of_examples else value.addressable_data(0)
        return found

    text = selection.text
    if of_examples:
        text += f"; the mean of {', '.join(sorted(of_examples))}"
    if len(of_examples) < len(stacked):
        text += "; where each device has a value, the first device's"
    return selection._replace(read=read, text=text)


def _is_pmapped(output: Any) -> bool:
    """Whether every array of the output has one entry per device."""
    leaves = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)]
    return all(leaf.ndim and _is_split_by_device(leaf) for leaf in leaves)


def _is_split_by_device(value: Any) -> bool:
    sharding = value.sharding
    is_one_each = value.shape[0] == sharding.num_devices
    return is_one_each and sharding.shard_shape(value.shape)[0] == 1


def _checked(select: Select, output: Any, steps: int) -> Metrics:
    try:
        return _as_metrics(select(output), steps)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"metrics=… failed on the step's output ({type(error).__name__}: {error}); "
            "expected a function from what the step returns to its scalars",
            hint=f"usually the output is nested differently; it is {_shape_of(output)}",
        ) from error


def _as_metrics(chosen: Any, steps: int) -> Metrics:
    if chosen is None:
        return {}
    unchanged = (), (steps,) if 1 < steps <= MOST_NUMBERS else ()
    if isinstance(chosen, Mapping):
        loss = chosen.get("loss")
        is_array = getattr(loss, "shape", ()) not in unchanged and _is_loss(loss)
        return {**chosen, "loss": _mean(loss)} if is_array else dict(chosen)
    if getattr(chosen, "shape", ()) not in unchanged and _is_loss(chosen):
        return {"loss": _mean(chosen)}
    if _is_scalar(chosen) or _is_loss(chosen):
        return {"loss": chosen}
    raise UserError(
        f"metrics=… returned {type(chosen).__name__}; expected a mapping of scalars, or the loss",
        hint="usually the whole output was returned; return its loss",
    )


@jax.jit
def _mean(loss: Any) -> jax.Array:
    return jnp.mean(loss, dtype=jnp.float32)


def _shape_of(output: Any) -> str:
    """``[0]['loss'] (), [1] (8, 4)``: the path and shape of each leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(output)[0]
    text = ", ".join(
        f"{jax.tree_util.keystr(path)} {getattr(leaf, 'shape', leaf)}" for path, leaf in leaves
    )
    return text if len(text) < 200 else f"{text[:200]}…"


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


def _is_loss(value: Any) -> bool:
    """Whether it is a scalar, or an array whose mean this process can compute alone."""
    if _is_scalar(value) and not _is_stacked(value):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, np.inexact):
        return False
    return 0 not in value.shape and getattr(value, "is_fully_addressable", True)


def _is_stacked(value: Any) -> bool:
    """Whether it holds one number per device, as `jax.pmap` returns it."""
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


def _shown(path: tuple[Any, ...]) -> str:
    return "output" + "".join(f"[{index}]" for index in path)
