"""Instructions that lay out or reduce the elements of small arrays."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.integers.values import Compute, Value, elements_of, make_value, wrap_of


def _index(dims: tuple[int, ...]) -> np.ndarray:
    """An array of these dimensions, of its elements' flat positions."""
    return np.arange(math.prod(dims)).reshape(dims)


def _first_block(index: np.ndarray, sizes: tuple[int, ...]) -> list[int]:
    """Flat positions of a block at the start of an array; others are at a constant distance."""
    positions: list[int] = index[tuple(map(slice, sizes))].ravel().tolist()
    return positions


def _taken(index: np.ndarray) -> Compute:
    """Picks the elements at fixed positions of the only operand."""
    positions = index.ravel().tolist()

    def compute(values: Sequence[Value]) -> Value:
        elements = elements_of(values[0])
        return make_value([elements[p] for p in positions]) if elements else None

    return compute


def _broadcast(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    dims = i.integers("dimensions")
    index = _index(computation.operand(i, 0).shape.dims).transpose(np.argsort(dims))
    others = [dim for dim in range(len(shape.dims)) if dim not in dims]
    return _taken(np.broadcast_to(np.expand_dims(index, others), shape.dims))


def _transpose(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    index = _index(computation.operand(i, 0).shape.dims)
    return _taken(index.transpose(i.integers("dimensions")))


def _reverse(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    return _taken(np.flip(_index(shape.dims), i.integers("dimensions")))


def _slice(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    kept = tuple(slice(r.start, r.stop, r.step) for r in i.kept_ranges())
    return _taken(_index(computation.operand(i, 0).shape.dims)[kept])


def _iota(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    dim = i.one_integer("iota_dimension", below=len(shape.dims))
    value = make_value(np.indices(shape.dims)[dim].ravel().tolist())
    return lambda values: value


def _starts(
    values: Sequence[Value], dims: tuple[int, ...], sizes: tuple[int, ...]
) -> list[int] | None:
    """Start indices, clamped so that the slice is inside the array."""
    starts = []
    for value, dim, size in zip(values, dims, sizes, strict=True):
        if not isinstance(value, int):
            return None
        starts.append(min(max(value, 0), dim - size))
    return starts


def _dynamic_slice(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    dims = computation.operand(i, 0).shape.dims
    index = _index(dims)
    positions = _first_block(index, shape.dims)

    def compute(values: Sequence[Value]) -> Value:
        elements = elements_of(values[0])
        starts = _starts(values[1:], dims, shape.dims)
        if not elements or starts is None:
            return None
        first = int(index[tuple(starts)])
        return make_value([elements[first + p] for p in positions])

    return compute


def _dynamic_update_slice(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    sizes = computation.operand(i, 1).shape.dims
    index = _index(shape.dims)
    positions = _first_block(index, sizes)

    def compute(values: Sequence[Value]) -> Value:
        elements, update = list(elements_of(values[0])), elements_of(values[1])
        starts = _starts(values[2:], shape.dims, sizes)
        if not elements or not update or starts is None:
            return None
        first = int(index[tuple(starts)])
        for position, element in zip(positions, update, strict=True):
            elements[first + position] = element
        return make_value(elements)

    return compute


def _concatenate(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
    (dim,) = i.integers("dimensions")
    # Elements of each operand that are contiguous in the result.
    runs = [math.prod(s.dims[dim:]) for s in computation.operand_shapes(i)]

    def compute(values: Sequence[Value]) -> Value:
        rows = [elements_of(value) for value in values]
        if not all(rows):
            return None
        return make_value(
            [
                element
                for block in range(math.prod(shape.dims[:dim]))
                for row, run in zip(rows, runs, strict=True)
                for element in row[block * run : (block + 1) * run]
            ]
        )

    return compute


def _pad(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute | None:
    """How TPU programs concatenate: they add arrays that are padded on different sides."""
    padding = [tuple(map(int, part.split("_"))) for part in i.attribute("padding").split("x")]
    dims = computation.operand(i, 0).shape.dims
    # The flat position of each element of the operand; None where negative padding cuts it off.
    ranges = []
    for n, (low, _, *interior) in zip(dims, padding, strict=True):
        ranges.append(range(low, low + n * (apart := 1 + sum(interior)), apart))
    index = _index(shape.dims)
    positions = [
        int(index[at]) if all(0 <= p < n for p, n in zip(at, shape.dims, strict=True)) else None
        for at in itertools.product(*ranges)
    ]

    def compute(values: Sequence[Value]) -> Value:
        elements, filler = elements_of(values[0]), values[1]
        if not elements or not isinstance(filler, int):
            return None
        result = [filler] * shape.size
        for position, element in zip(positions, elements, strict=True):
            if position is not None:
                result[position] = element
        return make_value(result)

    return compute


def _prefix(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute | None:
    """A TPU's ``bitcast`` to fewer elements of one dimension: the first ones of its memory."""
    source = computation.operand(i, 0).shape
    is_prefix = len(shape.dims) == len(source.dims) == 1 and shape.dtype == source.dtype
    return _taken(_index(shape.dims)) if is_prefix and shape.size < source.size else None


def _allocated(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute | None:
    """Memory without values yet, such as a scan's results: no program reads it before writing."""
    if i.attribute_string("custom_call_target") != "AllocateBuffer":
        return None
    return lambda values: make_value([0] * shape.size)


LAYOUTS: dict[str, Callable[[HloComputation, HloInstruction, Shape], Compute | None]] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reverse": _reverse,
    "slice": _slice,
    "iota": _iota,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "bitcast": _prefix,
    "custom-call": _allocated,
}

_REDUCERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
}


def reduction(
    module: HloModule, computation: HloComputation, i: HloInstruction, shape: Shape
) -> Compute | None:
    """A reduction of one array by one binary instruction."""
    function = _REDUCERS.get(module.reducer_opcode(i))
    if function is None or len(i.operands) != 2:
        return None
    index, gone, wrap = (
        _index(computation.operand(i, 0).shape.dims),
        i.integers("dimensions"),
        wrap_of(shape.dtype),
    )
    rows = np.moveaxis(index, gone, range(-len(gone), 0)).reshape(shape.size, -1).tolist()

    def compute(values: Sequence[Value]) -> Value:
        elements, start = elements_of(values[0]), values[1]
        if not elements or not isinstance(start, int):
            return None
        sums = [functools.reduce(function, [elements[p] for p in row], start) for row in rows]
        return make_value([wrap(value) for value in sums])

    return compute


def keeps_order(source: Shape | None, result: Shape) -> bool:
    """Whether a ``bitcast`` keeps all elements, in row-major order."""
    return (
        source is not None
        and source.size == result.size
        and all(
            sum(n > 1 for n in shape.dims) <= 1
            or shape.layout in ("", ",".join(str(d) for d in reversed(range(len(shape.dims)))))
            for shape in (source, result)
        )
    )
