"""The jitted train and eval steps, lowered and compiled once, ahead of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from mfu_jax.trainer.data import BATCH_KEYS
from mfu_jax.trainer.mesh import batch_sharding, micro_batch_size
from mfu_jax.trainer.pyconfig import Config
from mfu_jax.trainer.state import (
    TrainState,
    learning_rate_schedule,
    make_optimizer,
    model_graph,
)

Batch = dict[str, jax.Array]  # each [accumulation, batch, sequence]
Metrics = dict[str, jax.Array]


def make_train_step(config: Config) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The train step: gradients of all micro-batches, then one AdamW update.

    The loss is the mean over all target tokens of all micro-batches, so accumulation changes only
    memory.
    """
    graph = model_graph(config)
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config)
    gradient = jax.value_and_grad(_summed_loss, has_aux=True)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def accumulate(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
            (loss, weights), grads = gradient(state.params, graph, micro_batch)
            return jax.tree.map(jnp.add, sums, (loss, weights, grads)), None

        if config.gradient_accumulation_steps == 1:
            micro_batch = {key: value[0] for key, value in batch.items()}
            (loss, weights), grads = gradient(state.params, graph, micro_batch)
        else:
            zeros = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            with jax.named_scope("gradient_accumulation"):
                (loss, weights, grads), _ = jax.lax.scan(accumulate, zeros, batch)

        with jax.named_scope("optimizer"):
            tokens = jnp.maximum(weights, 1)
            grads = jax.tree.map(lambda g: g / tokens.astype(g.dtype), grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = {
                "loss": loss / tokens,
                "grad_norm": optax.tree.norm(grads),
                "current_learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
                "total_weights": weights,
            }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def make_eval_step(config: Config) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """The eval step: summed loss and number of target tokens of the first micro-batch."""
    graph = model_graph(config)

    def eval_step(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        micro_batch = {key: value[0] for key, value in batch.items()}
        return _summed_loss(state.params, graph, micro_batch)

    return eval_step


def compile_train_step(
    config: Config, mesh: Mesh, abstract_state: TrainState
) -> jax.stages.Compiled:
    """The train step as an executable that donates its state."""
    return lower_train_step(config, mesh, abstract_state).compile()


def lower_train_step(config: Config, mesh: Mesh, abstract_state: TrainState) -> jax.stages.Lowered:
    """The train step, which donates its state, for the devices of the mesh, attached or not."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    jitted = jax.jit(make_train_step(config), donate_argnums=0, out_shardings=(shardings, None))
    with jax.set_mesh(mesh):
        batch = abstract_batch(config, mesh, config.gradient_accumulation_steps)
        return jitted.lower(abstract_state, batch)


def compile_eval_step(
    config: Config, mesh: Mesh, abstract_state: TrainState
) -> jax.stages.Compiled:
    """The eval step as an executable."""
    with jax.set_mesh(mesh):
        batch = abstract_batch(config, mesh, 1)
        return jax.jit(make_eval_step(config)).lower(abstract_state, batch).compile()


def abstract_batch(config: Config, mesh: Mesh, accumulation: int) -> dict[str, Any]:
    """Shape, dtype and sharding of a step's batch."""
    shape = (accumulation, micro_batch_size(config, mesh.size), config.max_target_length)
    leaf = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    return dict.fromkeys(BATCH_KEYS, leaf)


def _summed_loss(params: Any, graph: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy summed over the target tokens, and their number; batch: [batch, sequence]."""
    model = nnx.merge(graph, params)
    logits = model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    with jax.named_scope("loss"):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        weights = batch["targets_weight"].astype(jnp.float32)
        return (losses * weights).sum(), weights.sum()
