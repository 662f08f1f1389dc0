"""Tensor-core instructions in Pallas kernels for GPUs (Mosaic); operands are references."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mfu_jax.flops.traced.jaxprs import short_dtype

# Instructions on references, whose parameters say which part of each operand they read.
_ON_REFERENCES = ("wgmma", "wgmma_ref", "tcgen05_mma")
INSTRUCTIONS = frozenset({*_ON_REFERENCES, "mma"})


def instruction_flops(eqn: Any) -> tuple[str, int]:
    """Operand dtype and 2·m·n·k of one instruction: accumulator [m, n] += a [m, k] · b [k, n]."""
    dtype = eqn.invars[1].aval.dtype
    accumulator, a = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if eqn.primitive.name in _ON_REFERENCES:
        parts = list(_transforms(eqn))
        accumulator, a = (_read_shape(s, t) for s, t in zip((accumulator, a), parts, strict=False))
        dtype = read_dtype(dtype, parts[1])
    n = accumulator[-1]
    # The accumulator and `a` have m rows each; how `a` is tiled does not change its size.
    return short_dtype(dtype), 2 * n * math.prod(a)


def _transforms(eqn: Any) -> Iterator[Sequence[Any]]:
    """The transforms of the accumulator and of `a`, from the end of the operands."""
    trees = [tree for key, tree in eqn.params.items() if key.endswith("transforms_tree")]
    leaves = list(eqn.invars)
    first = len(leaves) - sum(tree.num_leaves for tree in trees if tree is not None)
    for key in ("acc_transforms_tree", "a_transforms_tree"):
        tree = eqn.params[key]
        size = tree.num_leaves if tree is not None else 0
        yield tree.unflatten(leaves[first : first + size]) if tree is not None else ()
        first += size


def _read_shape(shape: Sequence[int], transforms: Sequence[Any]) -> tuple[int, ...]:
    """The shape read from a reference: that of the last index, or the whole without one."""
    for transform in transforms:
        if hasattr(transform, "get_indexer_shape"):
            shape = transform.get_indexer_shape()
    return tuple(shape)


def read_dtype(dtype: Any, transforms: Sequence[Any]) -> Any:
    """The dtype read from a reference; shared memory is bytes if several arrays share it."""
    for transform in transforms:
        dtype = getattr(transform, "dtype", dtype)
    return dtype


def meshes(params: Mapping[str, Any]) -> list[Mapping[str, int]]:
    """Axes and sizes of the meshes on which a kernel's bodies run."""
    found = params["meshes"] if "meshes" in params else (params["mesh"],)
    return [mesh.shape for mesh in found]
