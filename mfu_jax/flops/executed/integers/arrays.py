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

_ArrayRule = Callable[[HloComputation, HloInstruction, Shape], Compute | None]


def _index(dims: tuple[int, ...], first: int = 0) -> np.ndarray:
    """An array of these dimensions, of its elements' flat positions, counted from `first`."""
    return np.arange(first, first + math.prod(dims)).reshape(dims)


def _first_block(index: np.ndarray, sizes: tuple[int, ...]) -> list[int]:
    """Flat positions of a block at the start of an array; others are at a constant distance."""
    positions: list[int] = index[tuple(map(slice, sizes))].ravel().tolist()
    return positions


def _laid_out(layout: Callable[..., np.ndarray]) -> _ArrayRule:
    """A rule that picks the result's elements from those of all operands.

    Args:
        layout: lays out arrays. It is called once, with the instruction, the result's shape, and
            arrays of numbers in place of the operands: their elements, numbered consecutively.
    """

    def rule(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute:
        shapes = computation.operand_shapes(i)
        firsts = itertools.accumulate((s.size for s in shapes), initial=0)
        indices = [_index(s.dims, first) for s, first in zip(shapes, firsts, strict=False)]
        positions = layout(i, shape, *indices).ravel().tolist()

        def compute(values: Sequence[Value]) -> Value:
            rows = [elements_of(value) for value in values]
            if not all(rows):
                return None
            elements = rows[0] if len(rows) == 1 else [*itertools.chain(*rows)]
            return make_value([elements[p] for p in positions])

        return compute

    return rule


def _broadcast(i: HloInstruction, shape: Shape, index: np.ndarray) -> np.ndarray:
    dims = i.integers("dimensions")
    others = tuple(dim for dim in range(len(shape.dims)) if dim not in dims)
    ordered = np.expand_dims(index.transpose(np.argsort(dims)), others)
    return np.broadcast_to(ordered, shape.dims)


def _slice(i: HloInstruction, shape: Shape, index: np.ndarray) -> np.ndarray:
    return index[tuple(slice(r.start, r.stop, r.step) for r in i.kept_ranges())]


def _concatenate(i: HloInstruction, shape: Shape, *parts: np.ndarray) -> np.ndarray:
    (dim,) = i.integers("dimensions")
    return np.concatenate(parts, dim)


def _pad(i: HloInstruction, shape: Shape, index: np.ndarray, filler: np.ndarray) -> np.ndarray:
    """How TPU programs concatenate: they add arrays that are padded on different sides."""
    result = np.full(shape.dims, filler)
    padding = [tuple(map(int, part.split("_"))) for part in i.attribute("padding").split("x")]
    kept, places = [], []
    for n, size, (low, _, *interior) in zip(index.shape, shape.dims, padding, strict=True):
        at = low + np.arange(n) * (1 + sum(interior))
        is_inside = (at >= 0) & (at < size)  # negative padding cuts elements off
        kept.append(np.flatnonzero(is_inside))
        places.append(at[is_inside])
    result[np.ix_(*places)] = index[np.ix_(*kept)]
    return result


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


def _prefix(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute | None:
    """A TPU's ``bitcast`` to fewer elements of one dimension: the first ones of its memory."""
    source = computation.operand(i, 0).shape
    is_prefix = len(shape.dims) == len(source.dims) == 1 and shape.dtype == source.dtype
    if not is_prefix or shape.size >= source.size:
        return None
    return _laid_out(lambda i, shape, index: index[: shape.size])(computation, i, shape)


def _allocated(computation: HloComputation, i: HloInstruction, shape: Shape) -> Compute | None:
    """Memory without values yet, such as a scan's results: no program reads it before writing."""
    if i.attribute_string("custom_call_target") != "AllocateBuffer":
        return None
    return lambda values: make_value([0] * shape.size)


LAYOUTS: dict[str, _ArrayRule] = {
    "broadcast": _laid_out(_broadcast),
    "transpose": _laid_out(lambda i, _, index: index.transpose(i.integers("dimensions"))),
    "reverse": _laid_out(lambda i, _, index: np.flip(index, i.integers("dimensions"))),
    "slice": _laid_out(_slice),
    "concatenate": _laid_out(_concatenate),
    "pad": _laid_out(_pad),
    "iota": _iota,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
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
