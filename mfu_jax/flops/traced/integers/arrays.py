"""Primitives that move, look up and reduce elements of small integer arrays, in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

IntegerRule = Callable[[Any, Sequence[Any]], Any]


def _reshape(eqn: Any, operands: Sequence[Any]) -> Any:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return operands[0] if before == after else np.reshape(operands[0], after)


def _broadcast(eqn: Any, operands: Sequence[Any]) -> Any:
    sizes = [1] * len(eqn.outvars[0].aval.shape)
    for dim, size in zip(eqn.params["broadcast_dimensions"], np.shape(operands[0]), strict=True):
        sizes[dim] = size
    return np.broadcast_to(np.reshape(operands[0], sizes), eqn.outvars[0].aval.shape)


def _iota(eqn: Any, operands: Sequence[Any]) -> Any:
    aval, dim = eqn.outvars[0].aval, eqn.params["dimension"]
    sizes = [size if d == dim else 1 for d, size in enumerate(aval.shape)]
    return np.broadcast_to(np.arange(aval.shape[dim]).reshape(sizes), aval.shape)


def _slice(eqn: Any, operands: Sequence[Any]) -> Any:
    params = eqn.params
    strides = params["strides"] or [1] * len(params["start_indices"])
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return operands[0][tuple(slice(*bound) for bound in bounds)]


def _block(array: Any, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    """A block of these sizes, shifted to lie inside the array if it would leave it."""
    inside = (
        min(max(int(start), 0), whole - size)
        for start, size, whole in zip(starts, sizes, np.shape(array), strict=True)
    )
    return tuple(slice(at, at + size) for at, size in zip(inside, sizes, strict=True))


def _dynamic_slice(eqn: Any, operands: Sequence[Any]) -> Any:
    array, *starts = operands
    return array[_block(array, starts, eqn.params["slice_sizes"])]


def _dynamic_update_slice(eqn: Any, operands: Sequence[Any]) -> Any:
    array, update, *starts = operands
    result = np.array(array)
    result[_block(array, starts, np.shape(update))] = update
    return result


def _gather(eqn: Any, operands: Sequence[Any]) -> Any:
    """XLA's gather, one slice per position in `indices`."""
    array, indices = operands
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.outvars[0].aval.shape
    batch_dims = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = tuple(0 if d in dropped else slice(None) for d in range(len(sizes)))
    fills = "fill" in str(eqn.params["mode"]).lower()
    result = np.zeros(shape, array.dtype)
    for position in itertools.product(*(range(n) for n in np.shape(indices)[:-1])):
        starts = [0] * len(sizes)
        for dim, value in zip(numbers.start_index_map, indices[position], strict=True):
            starts[dim] = int(value)
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        for dim, batch_dim in pairs:
            starts[dim] = position[batch_dim]
        block = _block(array, starts, sizes)
        is_inside = [part.start for part in block] == starts
        at: list[Any] = [slice(None)] * len(shape)
        for dim, index in zip(batch_dims, position, strict=True):
            at[dim] = index
        result[tuple(at)] = (
            array[block][kept] if is_inside or not fills else _fill(eqn, array.dtype)
        )
    return result


def _fill(eqn: Any, dtype: Any) -> Any:
    """The value that a gather returns for a slice outside the array."""
    if (value := eqn.params["fill_value"]) is not None:
        return value
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max


def _pad(eqn: Any, operands: Sequence[Any]) -> Any:
    array, value = operands
    result = np.full(eqn.outvars[0].aval.shape, value)
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in config):
        return None
    at = tuple(
        slice(low, low + (n - 1) * (inner + 1) + 1 if n else low, inner + 1)
        for (low, _, inner), n in zip(config, np.shape(array), strict=True)
    )
    result[at] = array
    return result


def _reduce(function: Callable[..., Any]) -> IntegerRule:
    return lambda eqn, operands: function(
        operands[0], axis=tuple(eqn.params["axes"]), dtype=operands[0].dtype
    )


def _position(function: Callable[..., Any]) -> IntegerRule:
    return lambda eqn, operands: function(operands[0], axis=eqn.params["axes"][0])


def _cumulative(function: Any) -> IntegerRule:
    def run(eqn: Any, operands: Sequence[Any]) -> Any:
        axis, array = eqn.params["axis"], operands[0]
        array = np.flip(array, axis) if eqn.params["reverse"] else array
        result = function.accumulate(array, axis=axis, dtype=array.dtype)
        return np.flip(result, axis) if eqn.params["reverse"] else result

    return run


def sorted_together(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Sorts arrays by the first ones, the keys; None for an array that is not known."""
    axis, keys = eqn.params["dimension"], operands[: eqn.params["num_keys"]]
    is_stable = eqn.params["is_stable"] or len(operands) == len(keys) == 1
    if not is_stable or any(key is None for key in keys):
        return [None] * len(operands)
    order = np.lexsort(keys[::-1], axis=axis)
    return [None if v is None else np.take_along_axis(v, order, axis) for v in operands]


def parts_of(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of a primitive with several results, each a part of an operand."""
    if eqn.primitive.name == "optimization_barrier":
        return operands
    array = operands[0]
    if array is None:
        return [None] * len(eqn.outvars)
    if eqn.primitive.name == "sort":
        return sorted_together(eqn, operands)
    axis = eqn.params["axis"]
    if eqn.primitive.name == "unstack":
        return [np.take(array, i, axis) for i in range(len(eqn.outvars))]
    return np.split(array, np.cumsum(eqn.params["sizes"])[:-1], axis)


ARRAYS: dict[str, IntegerRule] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "transpose": lambda eqn, operands: np.transpose(operands[0], eqn.params["permutation"]),
    "rev": lambda eqn, operands: np.flip(operands[0], eqn.params["dimensions"]),
    "concatenate": lambda eqn, operands: np.concatenate(operands, eqn.params["dimension"]),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reduce_sum": _reduce(np.add.reduce),
    "reduce_prod": _reduce(np.multiply.reduce),
    "reduce_max": _reduce(np.maximum.reduce),
    "reduce_min": _reduce(np.minimum.reduce),
    "reduce_or": _reduce(np.bitwise_or.reduce),
    "reduce_and": _reduce(np.bitwise_and.reduce),
    "reduce_xor": _reduce(np.bitwise_xor.reduce),
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "cumsum": _cumulative(np.add),
    "cumprod": _cumulative(np.multiply),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
}
