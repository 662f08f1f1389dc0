"""``remat_policy=auto``: the policy that recomputes least among those that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import row_shapes
from mfu_jax.trainer.step.losses import images_of
from mfu_jax.trainer.step.mesh import micro_batch_size
from mfu_jax.trainer.step.trainable import trained_and_frozen

# What recomputes least first. Without a policy, scanned layers stack float32 intermediates, too:
# that takes longer than recomputing them (scripts/results/reference_step.json).
_Policy = Literal["none", "minimal_with_context", "save_dot_with_context_except_mlp", "full"]
_SCANNED: tuple[_Policy, ...] = ("minimal_with_context", "save_dot_with_context_except_mlp", "full")
_UNROLLED: tuple[_Policy, ...] = ("none", *_SCANNED)


def chosen_policy(
    config: Config, mesh: Mesh, free_bytes: float, split: Callable[[Config], tuple[Any, Any]]
) -> _Policy:
    """The policy that stands for ``auto``.

    Args:
        config: with its attention resolved.
        mesh: the devices, attached or not.
        free_bytes: memory of one device without weights, optimizer state and gradients.
        split: from a config to its model's structure and the shapes of its weights.
    """
    room = free_bytes - _logits_bytes(config)
    *candidates, last = _SCANNED if config.scan_layers else _UNROLLED
    for policy in candidates:
        candidate = config.replace(remat_policy=policy)
        if saved_bytes(candidate, mesh, *split(candidate)) / mesh.size <= room:
            return policy
    return last


def saved_bytes(config: Config, mesh: Mesh, graph: Any, params: Any) -> int:
    """Bytes that the layers of a micro-batch keep for the backward pass, on all devices together.

    Args:
        config: with a policy.
        mesh: the devices.
        graph, params: the model's structure, and the shapes of its weights.
    """
    rows = micro_batch_size(config, mesh.size)
    batch = {
        key: jax.ShapeDtypeStruct((rows, *row.shape), row.dtype)
        for key, row in row_shapes(config).items()
    }

    def kept(trained: Any, frozen: Any, batch: Any) -> Any:
        def hidden(trained: Any) -> jax.Array:
            model = nnx.merge(graph, trained, frozen)
            text = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
            result: jax.Array = model.outputs(*text, images_of(batch)).hidden
            return result

        given = {*map(id, jax.tree.leaves((trained, frozen, batch)))}  # in memory in any case
        return [x for x in jax.tree.leaves(jax.vjp(hidden, trained)[1]) if id(x) not in given]

    with jax.set_mesh(mesh):
        leaves = jax.tree.leaves(jax.eval_shape(kept, *trained_and_frozen(config, params), batch))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _logits_bytes(config: Config) -> float:
    """Logits and their gradient on one device."""
    tokens = config.per_device_batch_size * config.max_target_length / config.num_vocab_tiling
    return 2 * tokens * config.vocab_size * jnp.dtype(config.dtype).itemsize
