"""The jitted train and eval steps, lowered and compiled once, ahead of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mfu_jax.layers.decoder import with_moved_biases
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import row_shapes
from mfu_jax.trainer.step.losses import Batch, LossParts, objective
from mfu_jax.trainer.step.mesh import batch_sharding, micro_batch_size
from mfu_jax.trainer.step.state import (
    TrainState,
    learning_rate_schedule,
    make_optimizer,
    model_graph,
)
from mfu_jax.trainer.step.trainable import all_are_trained, joined, trained_and_frozen

StepMetrics = dict[str, jax.Array]


def make_train_step(
    config: Config,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The train step: gradients of all micro-batches, then one AdamW update.

    The loss is the mean over all target tokens of all micro-batches, so accumulation changes only
    memory.
    """
    graph = model_graph(config)
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config)

    def rounded(leaf: jax.Array) -> jax.Array:
        return leaf.astype(config.grad_dtype) if leaf.dtype == jnp.float32 else leaf

    def gradient(state: TrainState, micro_batch: Batch) -> tuple[LossParts, Any]:
        differentiate = jax.value_and_grad(objective, has_aux=True)
        trained, frozen = trained_and_frozen(config, state.params)
        (_, parts), grads = differentiate(
            trained, frozen, state.reference, graph, micro_batch, config
        )
        return parts, jax.tree.map(rounded, grads)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        first = {key: value[0] for key, value in batch.items()}
        if config.gradient_accumulation_steps == 1:
            parts, grads = gradient(state, first)
        else:
            parts, grads = _accumulated(lambda micro: gradient(state, micro), batch, first)

        with jax.named_scope("optimizer"):
            tokens = jnp.maximum(parts.weights, 1)
            grads = jax.tree.map(lambda g: g / tokens.astype(g.dtype), grads)
            trained, frozen = trained_and_frozen(config, state.params)
            updates, opt_state = optimizer.update(grads, state.opt_state, trained)
            params = joined(optax.apply_updates(trained, updates), frozen)
            loads = parts.loads if all_are_trained(config) else {}
            params = with_moved_biases(params, state.params, loads, config.routed_bias_update_rate)
            metrics = {
                "loss": parts.loss / tokens,
                "grad_norm": optax.tree.norm(grads),
                "current_learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
                "total_weights": parts.weights,
                **{k: v / tokens for k, v in (parts.further | parts.shown).items()},
            }
        return TrainState(state.step + 1, params, opt_state, state.reference), metrics

    return train_step


def _accumulated(
    gradient: Callable[[Batch], tuple[LossParts, Any]], batch: Batch, first: Batch
) -> tuple[LossParts, Any]:
    """The sums over all micro-batches of `batch`; `first` is one of them."""
    shapes = jax.eval_shape(gradient, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(sums: Any, micro_batch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient(micro_batch)), None

    with jax.named_scope("gradient_accumulation"):
        (parts, grads), _ = jax.lax.scan(add, zeros, batch)
    return parts, grads


def make_eval_step(config: Config) -> Callable[[TrainState, Batch], tuple[jax.Array, jax.Array]]:
    """The eval step: summed loss and number of target tokens of the first micro-batch."""
    graph = model_graph(config)

    def eval_step(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        micro_batch = {key: value[0] for key, value in batch.items()}
        weights = (*trained_and_frozen(config, state.params), state.reference)
        _, parts = objective(*weights, graph, micro_batch, config)
        return parts.loss, parts.weights

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
    batch = (accumulation, micro_batch_size(config, mesh.size))

    def of(row: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (*batch, *row.shape)
        sharding = batch_sharding(mesh, len(shape))
        return jax.ShapeDtypeStruct(shape, row.dtype, sharding=sharding)

    return {key: of(row) for key, row in row_shapes(config).items()}
