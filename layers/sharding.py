"""Which dimension of a weight or activation is split over which mesh axis.

Weights name their dimensions (`logical_axes`); this table maps names to mesh axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

BATCH_AXES = ("data", "fsdp", "fsdp_transpose", "expert")

# Pipeline stages. Outside the pipeline, in embedding and head, they split the batch further.
STAGE_AXIS = "pipeline"
EDGE_BATCH_AXES = (*BATCH_AXES, STAGE_AXIS)
# The token sequence, and with it the work of every layer.
SEQUENCE_AXIS = "context"
# Images; the vision tower needs whole ones.
IMAGE_AXES = (*BATCH_AXES, SEQUENCE_AXIS)
# The width of the residual stream between the parts of a layer; each part gathers its input.
WIDTH_AXIS = "tensor"

# These axes split the embedding dimension of every weight, or else the rank of latent attention;
# `tensor` splits the other dimension.
_WEIGHT_AXES = ("fsdp", "fsdp_transpose", "context", "expert")
MESH_AXIS: dict[str, str | tuple[str, ...] | None] = {
    "embed": _WEIGHT_AXES,
    "vocab": "tensor",
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "whole_experts": ("expert", "fsdp", "context"),
    "whole_width": "fsdp_transpose",
    "whole_mlp": ("tensor", "fsdp_transpose"),
    "q_lora": _WEIGHT_AXES,
    "kv_lora": _WEIGHT_AXES,
    "joined_heads": _WEIGHT_AXES,
    **dict.fromkeys(("qkv", "experts_routed", "indexer_heads", "memory", "streams", "layers")),
    **dict.fromkeys(("conv", "position", "patch", "head_dim", "norm")),
}

# Narrow dimensions that no config check covers.
_RANKS = ("q_lora", "kv_lora", "joined_heads")
_STAGED = 3


def partition_spec(
    logical_axes: tuple[str, ...], shape: Sequence[int], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec of a weight: a mesh axis splits the first dimension that it may split.

    Leading stacked dimensions are scanned layers, which are not split, or those of a pipeline:
    passes, stages, layers per stage. Ranks are split only over axes that divide them.

    Args:
        logical_axes: names of the weight's last dimensions.
        shape: all dimensions.
        sizes: of the mesh axes.
    """
    stacked: list[str | tuple[str, ...] | None] = [None] * (len(shape) - len(logical_axes))
    if len(stacked) == _STAGED:
        stacked[1] = STAGE_AXIS
    used: set[str] = set()
    for name, size in zip(logical_axes, shape[len(stacked) :], strict=True):
        axes = MESH_AXIS[name]
        if isinstance(axes, tuple):
            axes = tuple(axis for axis in axes if axis not in used)
            axes = _dividing(axes, size, sizes) if name in _RANKS else axes
        stacked.append(axes or None)
        used.update((axes,) if isinstance(axes, str) else axes or ())
    return PartitionSpec(*stacked)


def _dividing(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes in order, without those that do not divide what remains of a dimension."""
    found: list[str] = []
    for axis in axes:
        if size % sizes[axis] == 0:
            found.append(axis)
            size //= sizes[axis]
    return tuple(found)


def axis_size(name: str) -> int:
    """Devices along a mesh axis; 1 if there is no such axis."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Pins an activation's layout to mesh axes; does nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


class Gathering(NamedTuple):
    """How a weight is stored, and the sharding that a product needs.

    Attributes:
        stored: as `partition_spec` splits it.
        whole: the same without the axes that split weights as fsdp does.
    """

    stored: PartitionSpec
    whole: PartitionSpec


def gathering(logical_axes: tuple[str, ...], shape: Sequence[int]) -> Gathering | None:
    """The gathering of a weight; None: without a mesh, or on this one, nothing is gathered."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    if math.prod(sizes.get(axis, 1) for axis in _WEIGHT_AXES) == 1:
        return None
    stored = partition_spec(logical_axes, shape, sizes)
    kept = ((axes,) if isinstance(axes, str) else axes or () for axes in stored)
    whole = (tuple(axis for axis in axes if axis not in _WEIGHT_AXES) or None for axes in kept)
    return Gathering(stored, PartitionSpec(*whole))
