"""Which dimension of a weight or an activation is split over which axis of the mesh.

Weights carry the names of their dimensions (`logical_axes`); this table maps names to mesh axes.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

BATCH_AXES = ("data", "fsdp", "expert")

# The stages of a pipeline. Outside of it, in embedding and head, they split the batch further.
STAGE_AXIS = "pipeline"
EDGE_BATCH_AXES = (*BATCH_AXES, STAGE_AXIS)
# The sequence of tokens, and with it the work of every layer.
SEQUENCE_AXIS = "context"

# fsdp, context and expert split the embedding dimension of every weight, tensor the other one.
MESH_AXIS: dict[str, str | tuple[str, ...] | None] = {
    "embed": ("fsdp", "context", "expert"),
    "vocab": "tensor",
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "experts_routed": None,
    "q_lora": ("fsdp", "context", "expert"),
    "kv_lora": ("fsdp", "context", "expert"),
    "indexer_heads": None,
    "memory": None,
    "streams": None,
    "layers": None,
    "conv": None,
    "position": None,
    "head_dim": None,
    "norm": None,
}


# Split as far as the axes divide them: they are short.
_SHORT = ("q_lora", "kv_lora")
_STAGED = 3


def partition_spec(
    logical_axes: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The spec of a weight.

    Dimensions stacked in front are those of scanned layers, which are not split, or of a pipeline:
    passes, stages, layers of a stage. An axis splits one dimension only: the first that names it.

    Args:
        logical_axes: names of the last dimensions.
        shape: of the weight.
        sizes: of the mesh's axes.
    """
    rank = len(shape) - len(logical_axes)
    split: list[tuple[str, ...]] = [()] * rank
    if rank == _STAGED:
        split[1] = (STAGE_AXIS,)
    for name, size in zip(logical_axes, shape[rank:], strict=True):
        used = [axis for axes in split for axis in axes]
        free = tuple(axis for axis in _axes_of(name) if axis not in used)
        split.append(_dividing(free, size, sizes) if name in _SHORT else free)
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in split))


def _axes_of(name: str) -> tuple[str, ...]:
    axes = MESH_AXIS[name] or ()
    return (axes,) if isinstance(axes, str) else axes


def _dividing(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, without those that no longer divide what those before leave of a dimension."""
    found: list[str] = []
    for axis in axes:
        if size % sizes[axis] == 0:
            found.append(axis)
            size //= sizes[axis]
    return tuple(found)


def axis_size(name: str) -> int:
    """Devices along an axis of the mesh; 1 without such an axis."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Pins an activation's layout to mesh axes; does nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
