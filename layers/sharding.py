"""Which dimension of a weight or an activation is split over which axis of the mesh.

Weights carry the names of their dimensions (`logical_axes`); this table maps names to mesh axes.
"""

from __future__ import annotations

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
    "q_lora": None,
    "kv_lora": None,
    "indexer_heads": None,
    "memory": None,
    "streams": None,
    "layers": None,
    "conv": None,
    "position": None,
    "patch": None,
    "head_dim": None,
    "norm": None,
}


_STAGED = 3


def partition_spec(logical_axes: tuple[str, ...], rank: int) -> PartitionSpec:
    """The spec of a weight.

    Dimensions stacked in front are those of scanned layers, which are not split, or of a pipeline:
    passes, stages, layers of a stage.
    """
    stacked: list[str | None] = [None] * (rank - len(logical_axes))
    if len(stacked) == _STAGED:
        stacked[1] = STAGE_AXIS
    axes = [MESH_AXIS[name] for name in logical_axes]
    if "experts" in logical_axes:  # an axis splits one dimension only
        axes = [
            ("fsdp", "context") if name == "embed" else MESH_AXIS[name] for name in logical_axes
        ]
    return PartitionSpec(*stacked, *axes)


def axis_size(name: str) -> int:
    """Devices along an axis of the mesh; 1 without such an axis."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(name, 1)


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Pins an activation's layout to mesh axes; does nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))
