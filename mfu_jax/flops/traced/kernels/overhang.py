"""How much of a Pallas kernel's blocks lies inside their arrays.

A kernel multiplies whole blocks. Where a block overhangs its array, the elements beyond it are
padding: the kernel runs them, the model does not need them. Every value in a kernel's body is
followed from the blocks that it is read from, dimension by dimension, for all programs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mfu_jax.flops.traced.integers.known_values import ConstantTable, Known
from mfu_jax.flops.traced.jaxprs import equations
from mfu_jax.util.jax_internals import array_of_block

Extent = Any  # elements of a dimension, an int or one per program


@dataclass(frozen=True, eq=False)
class InArrays:
    """A value that is not whole: the elements of each dimension that are from inside the arrays.

    Attributes:
        shape: the value's.
        dims: one per dimension of the value.
        is_bound: whether it may have fewer.
    """

    shape: tuple[int, ...]
    dims: tuple[Extent, ...]
    is_bound: bool = False


FILL = InArrays((), ())
"""A value that no array went into: zeros, positions, masks."""


Slot = tuple[int, ...] | None
"""Positions along the first dimensions of a kernel's memory, as of a double buffer; None: any."""


@dataclass(eq=False)
class Scratch:
    """Memory of a kernel, whose contents are what was last stored; `FILL` at first.

    Attributes:
        is_private: whether each program of the grid has its own, as in `run_scoped`.
        stored: what it holds, but for `slots`.
        slots: what copies left in its slots.
    """

    is_private: bool = False
    stored: Known = FILL
    slots: dict[Slot, Known] = field(default_factory=dict)

    def store(self, value: Known, runs: np.ndarray, whole: Sequence[int] = ()) -> None:
        """Stores a value into all of it, or a part if a shape is given, in programs that run it."""
        if is_fill(value):
            return
        if isinstance(value, InArrays):
            value = _bound(whole) if whole else _seen_later(value, runs)
        self.stored = union([self.stored, value])

    def copy(self, slot: Slot, value: Known, runs: np.ndarray) -> None:
        """Overwrites a slot with a part of an array, in the programs that run it."""
        if not runs.any():
            return
        if isinstance(value, InArrays) and not self.is_private and any(map(np.ptp, value.dims)):
            value = _bound(value.shape)  # another program may read it
        if slot is None or not runs.all():
            value = union([*self.slots.values(), value])
        if slot is None:
            self.slots = dict.fromkeys(self.slots, value)
        self.slots[slot] = value

    def content(self, slot: Slot) -> Known:
        """What a slot holds; None: one of them, it is unknown which one."""
        if slot is not None and slot in self.slots:
            return self.slots[slot]
        return union([*self.slots.values(), self.stored])


def bare(known: Sequence[Known]) -> list[Known]:
    """The known integers and tables among these values."""
    return [None if isinstance(value, InArrays | Scratch) else value for value in known]


def is_fill(value: Known) -> bool:
    """Whether no array went into a value."""
    return value is FILL or not (value is None or isinstance(value, InArrays | ConstantTable))


def union(values: Sequence[Known]) -> Known:
    """A value that is one of these, such as a condition's result: as large as the largest."""
    values = [value for value in values if not is_fill(value)]
    if not values:
        return FILL
    parts = [value for value in values if isinstance(value, InArrays)]
    if not parts:
        return None
    shape, is_bound = parts[0].shape, any(part.is_bound for part in parts)
    if any(part.shape != shape for part in parts):
        return _bound(shape)
    dims: list[Extent] = []
    for size, first, *others in zip(shape, *(part.dims for part in parts), strict=True):
        is_same = len(parts) == len(values) and all(_equal(first, each) for each in others)
        is_bound |= not is_same and not all(_equal(each, size) for each in (first, *others))
        dims.append(first if is_same else size)
    return _made(shape, dims, is_bound)


def is_same(a: Known, b: Known) -> bool:
    """Whether two values that a loop carries are equally far inside the arrays."""
    if not (isinstance(a, InArrays) and isinstance(b, InArrays)) or FILL in (a, b):
        return a is b or (a is None and b is None)
    return a.is_bound == b.is_bound and all(map(_equal, a.dims, b.dims))


def _equal(a: Extent, b: Extent) -> bool:
    return bool(np.all(a == b))


def _seen_later(value: InArrays, runs: np.ndarray) -> InArrays:
    """A stored value as later programs may read it: along axes where some programs do not store."""
    axes = tuple(d for d in range(runs.ndim) if np.ptp(runs, axis=d).any())
    dims = [
        size if _equal(extent, size) else np.where(runs > 0, extent, 0).max(axes, keepdims=True)
        for extent, size in zip(value.dims, value.shape, strict=True)
    ]
    return InArrays(value.shape, tuple(dims), value.is_bound)


def _bound(shape: Sequence[int]) -> InArrays:
    """A value of which it is not known how much is inside the arrays."""
    return InArrays(tuple(shape), tuple(shape), is_bound=True)


def _made(shape: Sequence[int], dims: Sequence[Extent], is_bound: bool = False) -> InArrays | None:
    is_part = is_bound or not all(map(_equal, dims, shape))
    return InArrays(tuple(shape), tuple(dims), is_bound) if is_part else None


def _dims(value: Known, shape: Sequence[int]) -> Sequence[Extent]:
    return value.dims if _is_part(value) else shape


# Blocks ---------------------------------------------------------------------------------------


def may_overhang(block: Any) -> bool:
    """Whether a block of a grid may overhang its array, by their sizes."""
    sizes = array_of_block(block).shape
    return any(_may_overhang(dim, size) for dim, size in zip(block.block_shape, sizes, strict=True))


def _may_overhang(dim: Any, size: int) -> bool:
    """Whether a block may along one dimension; a gather (`Indirect`) reads what is there."""
    if _is_blocked(dim):
        return size % max(1, _length(dim)) != 0
    return type(dim).__name__ != "Indirect"


def block_shape(block: Any) -> list[int]:
    """A block's shape in the kernel, without squeezed dimensions."""
    return [_length(dim) for dim in block.block_shape if not _is_squeezed(dim)]


def block_inside(block: Any, starts: Sequence[Known], shape: Sequence[int]) -> InArrays | None:
    """How much of a block is inside its array.

    Args:
        block: its `BlockMapping`.
        starts: results of its index map, for all programs.
        shape: the shape of the kernel's reference.
    """
    sizes = array_of_block(block).shape
    if len(starts) != len(sizes) or block_shape(block) != list(shape):
        return _bound(shape)
    dims: list[Extent] = []
    is_bound = False
    for dim, start, size in zip(block.block_shape, starts, sizes, strict=True):
        if _is_squeezed(dim):
            continue
        extent: Extent = (length := _length(dim))
        if not _may_overhang(dim, size):
            pass
        elif start is None or not (_is_blocked(dim) or hasattr(dim, "padding")):
            is_bound = True
        else:
            first = np.asarray(start, np.int64)
            first = first * length if _is_blocked(dim) else first - dim.padding[0]
            extent = np.minimum(size, first + length) - np.maximum(first, 0)
        dims.append(np.clip(extent, 0, length))
    return _made(shape, dims, is_bound)


def _is_squeezed(dim: Any) -> bool:
    return dim is None or type(dim).__name__ == "Squeezed"


def _is_blocked(dim: Any) -> bool:
    return isinstance(dim, int) or _is_squeezed(dim) or type(dim).__name__ == "Blocked"


def _length(dim: Any) -> int:
    return 1 if _is_squeezed(dim) else int(getattr(dim, "block_size", dim))


# References -----------------------------------------------------------------------------------


def reads(eqn: Any, known: Sequence[Known]) -> InArrays | None:
    """How much of what a `get` or `masked_load` reads is inside the arrays."""
    if eqn.primitive.name == "get":
        ref, transforms = known[0], jax.tree.unflatten(eqn.params["tree"], bare(known[1:]))
    else:
        ref, transforms, _, _ = eqn.params["args_tree"].unflatten([known[0], *bare(known[1:])])
    read, shape = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    is_indexed = len(transforms) == 1 and hasattr(transforms[0], "indices")
    indices = transforms[0].indices if is_indexed else ()
    if isinstance(ref, Scratch) and ref.slots:  # copies have written to it
        slot, indices = _slot(indices)
        ref = ref.content(slot if is_indexed or not transforms else None)
        if not _is_part(ref):
            return ref
        if is_indexed and len(ref.dims) != len(indices):
            return _bound(read)
        shape = shape[len(shape) - len(indices) :]
    elif isinstance(ref, Scratch):
        ref = ref.stored
    if ref is FILL:
        return FILL
    part: InArrays | None = ref if isinstance(ref, InArrays) else None
    if is_indexed:
        part = _read(ref, indices, shape)
    elif transforms and part:
        part = _bound(read)
    return part if part is None or part.shape == read else _bound(read)


def _slot(indices: Sequence[Any]) -> tuple[Slot, Sequence[Any]]:
    """The positions that come first, if they are known and equal in all programs, and the rest."""
    first = next((d for d, index in enumerate(indices) if _is_slice(index)), len(indices))
    positions = indices[:first]
    if any(position is None or np.ptp(position) for position in positions):
        return None, indices[first:]
    return tuple(int(np.max(position)) for position in positions), indices[first:]


def _is_slice(index: Any) -> bool:
    return hasattr(index, "size") and hasattr(index, "stride")


def copies_parts(jaxpr: Any) -> bool:
    """Whether a body copies parts of arrays whose length depends on where they are."""
    copies = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dma_start")
    return not all(all(_has_fixed_lengths(eqn)) for eqn in copies)


def _has_fixed_lengths(eqn: Any) -> Iterator[bool]:
    """Of each dimension of an array of which a copy reads a slice."""
    source = jax.tree.unflatten(eqn.params["tree"], eqn.invars)[0]
    for transform in getattr(source, "transforms", ()):
        for index in filter(_is_slice, getattr(transform, "indices", ())):
            yield isinstance(index.size, int)


def _indices(end: Any) -> Sequence[Any] | None:
    """The indices of an end of a copy: none for a whole array, None if there are several."""
    transforms = getattr(end, "transforms", ())
    if not transforms:
        return ()
    return getattr(transforms[0], "indices", None) if len(transforms) == 1 else None


def copies(eqn: Any, known: Sequence[Known], runs: np.ndarray) -> None:
    """Follows a copy (DMA) of an array's part into a kernel's memory, as of `emit_pipeline`.

    At an array's end it copies fewer elements, in whole tiles, and the kernel multiplies all.
    """
    pairs = zip(known, bare(known), strict=True)
    leaves = [value if isinstance(value, Scratch) else number for value, number in pairs]
    source, target, *_ = jax.tree.unflatten(eqn.params["tree"], leaves)
    memory = getattr(target, "ref", target)
    if not isinstance(memory, Scratch):
        return
    ends = jax.tree.unflatten(eqn.params["tree"], eqn.invars)[:2]
    of_array, of_memory = (getattr(end, "ref", end).aval.shape for end in ends)
    fixed, read, written = list(_has_fixed_lengths(eqn)), _indices(source), _indices(target)
    slot, places = (None, ()) if written is None else _slot(written)
    slices = [(i, n) for i, n in zip(read or (), of_array, strict=False) if _is_slice(i)]
    sizes = of_memory[len(of_memory) - len(places) :]
    if all(fixed) or len(slices) != len(places) or not all(map(_is_slice, places)):
        memory.copy(slot, None if all(fixed) else _bound(()), runs)
        return
    dims: list[Extent] = []
    is_bound = False
    for (index, whole), is_fixed, place, size in zip(slices, fixed, places, sizes, strict=True):
        is_known = not (index.size is None or index.start is None)
        is_bound |= not is_fixed and not (is_known and place.start == 0)
        inside: Extent = size
        if not is_fixed and is_known:
            inside = np.minimum(index.size, whole - np.asarray(index.start))
        dims.append(np.clip(inside, 0, size))
    memory.copy(slot, _made(sizes, dims, is_bound), runs)


def reads_beyond(eqn: Any, known: Sequence[Known], runs: np.ndarray) -> bool:
    """Whether a `copy_gmem_to_smem` may read elements beyond its array's end: it fills in zeros."""
    tree, shape = eqn.params["src_transforms_treedef"], eqn.invars[0].aval.shape
    first = 2 + eqn.params.get("has_barrier", True)  # after the array and the memory
    for transform in tree.unflatten(bare(known[first : first + tree.num_leaves])):
        if hasattr(transform, "indices"):
            part, shape = _read(None, transform.indices, shape), transform.get_indexer_shape()
            pairs = zip(part.dims, shape, strict=False) if part else ()
            if any(np.any(np.less(extent, size) & (runs > 0)) for extent, size in pairs):
                return True
            if part and part.is_bound:
                return True
    return False


def _read(ref: Known, indices: Sequence[Any], shape: Sequence[int]) -> InArrays | None:
    dims: list[Extent] = []
    lengths: list[int] = []
    is_bound = isinstance(ref, InArrays) and ref.is_bound
    for index, extent, size in zip(indices, _dims(ref, shape), shape, strict=True):
        if not _is_slice(index):
            is_bound |= not _equal(extent, size)  # one element, which may be beyond the array
            continue
        is_fixed = isinstance(index.size, int)
        length = index.size if is_fixed else size
        inside: Extent = length
        if not is_fixed or index.start is None:
            is_bound |= not is_fixed or not _equal(extent, size) or bool(size % length)
        else:
            inside = -(-(extent - np.asarray(index.start, np.int64)) // index.stride)
        lengths.append(length)
        dims.append(np.clip(inside, 0, length))
    return _made(lengths, dims, is_bound)


def stores(eqn: Any, known: Sequence[Known], runs: np.ndarray) -> None:
    """Follows what a `swap`, `masked_swap` or `addupdate` stores into memory of the kernel."""
    if eqn.primitive.name == "masked_swap":
        ref, _, value, _ = eqn.params["args_tree"].unflatten(known)
        _, _, stored, _ = eqn.params["args_tree"].unflatten(eqn.invars)
    else:
        (ref, value, *_), stored = known, eqn.invars[1]
    if isinstance(ref, Scratch):
        shape = eqn.invars[0].aval.shape
        ref.store(value, runs, () if stored.aval.shape == shape else shape)


# Values ---------------------------------------------------------------------------------------


def follow(eqn: Any, known: Sequence[Known]) -> list[Known]:
    """How much of an equation's results is inside the arrays."""
    if all(map(is_fill, known)):
        return [FILL] * len(eqn.outvars)
    if not any(isinstance(value, InArrays) and value is not FILL for value in known):
        return [None] * len(eqn.outvars)
    name = eqn.primitive.name
    rule = _reduction if name.startswith(("reduce_", "argm")) else _RULES.get(name, _elementwise)
    return [rule(eqn, known, variable.aval.shape) for variable in eqn.outvars]


def _elementwise(eqn: Any, known: Sequence[Known], shape: Sequence[int]) -> InArrays | None:
    """What is beyond an operand's array is no part of the result.

    Operands have the result's shape, or 1 element along some of its dimensions, or are scalars.
    """
    dims: Sequence[Extent] = shape
    is_bound = False
    for value, variable in zip(known, eqn.invars, strict=True):
        sizes = variable.aval.shape
        if sizes and len(sizes) != len(shape):
            return _bound(shape)
        if any(size not in (1, wanted) for size, wanted in zip(sizes, shape, strict=False)):
            return _bound(shape)
        if _is_part(value):
            is_bound |= value.is_bound
            dims = list(map(np.minimum, dims, _spread(value, range(len(sizes)), shape)))
    return _made(shape, dims, is_bound)


def _spread(value: InArrays, targets: Sequence[int], shape: Sequence[int]) -> Sequence[Extent]:
    """A value in a larger shape, repeated along the dimensions in which it has 1 element."""
    dims: list[Extent] = list(shape)
    for extent, target, size in zip(value.dims, targets, value.shape, strict=True):
        dims[target] = extent if size == shape[target] else extent * shape[target]
    return dims


def _is_part(value: Known) -> bool:
    return isinstance(value, InArrays) and value is not FILL


def _select(eqn: Any, known: Sequence[Known], shape: Sequence[int]) -> Known:
    """One of the cases; a constant fills up what a mask leaves out."""
    return union(known[1:])


def _broadcast(eqn: Any, known: Sequence[Known], shape: Sequence[int]) -> InArrays | None:
    dims = _spread(known[0], eqn.params["broadcast_dimensions"], shape)
    return _made(shape, dims, known[0].is_bound)


def _transpose(eqn: Any, known: Sequence[Known], shape: Sequence[int]) -> InArrays | None:
    (value,) = known
    return _made(shape, [value.dims[d] for d in eqn.params["permutation"]], value.is_bound)


def _reduction(eqn: Any, known: Sequence[Known], shape: Sequence[int]) -> InArrays | None:
    value, axes = known[0], eqn.params.get("axes")
    if axes is None or not _is_part(value):
        return _bound(shape)
    kept = [extent for d, extent in enumerate(value.dims) if d not in axes]
    return _made(shape, kept, value.is_bound)


def _reshape(eqn: Any, known: Sequence[Known], shape: Sequence[int]) -> InArrays | None:
    """Dimensions that are merged have the product of their elements."""
    value = known[0]
    dims: list[Extent] = list(shape)
    is_bound = value.is_bound
    for before, after in _regrouped(value.shape, shape):
        if all(_equal(value.dims[d], value.shape[d]) for d in before):
            continue
        wide = [d for d in after if shape[d] > 1] or list(after[:1])
        is_bound |= len(wide) != 1
        if len(wide) == 1:
            dims[wide[0]] = math.prod(value.dims[d] for d in before)
    return _made(shape, dims, is_bound)


def _regrouped(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Dimensions before and after a reshape that have the same elements between them.

    >>> list(_regrouped((8, 6, 4), (48, 2, 2)))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    i = j = 0
    while i < len(old) or j < len(new):
        before, after = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (left := math.prod(old[before:i])) != (right := math.prod(new[after:j])):
            i, j = i + (left < right), j + (left > right)
        yield range(before, i), range(after, j)


_ExtentRule = Callable[[Any, Sequence[Known], Sequence[int]], Known]
_RULES: dict[str, _ExtentRule] = {
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    # What is inside the arrays may end up anywhere.
    **dict.fromkeys(
        ("concatenate", "rev", "roll", "slice", "sort"),
        lambda eqn, known, shape: _bound(shape),
    ),
}


# Products -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockProduct:
    """A matmul in a kernel's body.

    Attributes:
        needed: FLOPs on elements inside the arrays in all its runs.
        result: how much of its result is inside the arrays.
        is_bound: whether it may need fewer.
    """

    needed: int
    result: list[Known] = field(default_factory=list)
    is_bound: bool = False


def product(eqn: Any, known: Sequence[Known], flops: int, runs: np.ndarray) -> BlockProduct:
    """The elements inside the arrays that a matmul multiplies.

    Args:
        eqn: the matmul.
        known: its operands.
        flops: FLOPs of one run.
        runs: how often each program runs it.
    """
    is_bound = any(_is_part(value) and value.is_bound for value in known)
    if not any(map(_is_part, known)) or eqn.primitive.name != "dot_general":
        is_bound = any(map(_is_part, known))
        results: list[Known] = [_bound(v.aval.shape) if is_bound else None for v in eqn.outvars]
        return BlockProduct(needed=flops * int(runs.sum()), result=results, is_bound=is_bound)
    lhs, rhs = (
        _dims(value, variable.aval.shape) for value, variable in zip(known, eqn.invars, strict=True)
    )
    (contracted, of_rhs), (batch, batch_of_rhs) = eqn.params["dimension_numbers"]
    of_result = [
        *(np.minimum(lhs[i], rhs[j]) for i, j in zip(batch, batch_of_rhs, strict=True)),
        *(extent for d, extent in enumerate(lhs) if d not in {*contracted, *batch}),
        *(extent for d, extent in enumerate(rhs) if d not in {*of_rhs, *batch_of_rhs}),
    ]
    summed = (np.minimum(lhs[i], rhs[j]) for i, j in zip(contracted, of_rhs, strict=True))
    multiplied = runs * math.prod((*of_result, *summed))
    shape, sizes = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    whole = flops // max(1, math.prod(shape) * math.prod(sizes[i] for i in contracted))
    result = _made(shape, of_result, is_bound)
    return BlockProduct(needed=whole * int(multiplied.sum()), result=[result], is_bound=is_bound)
