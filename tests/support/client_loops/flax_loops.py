"""Loops of Flax: Linen with a `TrainState`, NNX with an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from tests.support.client import Bare, Client
from tests.support.client_loops.plain import (
    HIDDEN,
    INPUTS,
    MLP,
    OUTPUTS,
    ROWS,
    batches,
    matmul,
)


class LinenMlp(nn.Module):
    """[rows, INPUTS] → [rows, OUTPUTS]."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = jnp.tanh(nn.Dense(HIDDEN)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(OUTPUTS)(x)


def linen_state(model: nn.Module) -> TrainState:
    params = model.init(jax.random.key(0), jnp.ones((ROWS, INPUTS)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


def linen_train_state(observer: Bare) -> Iterator[Any]:
    """A `TrainState`, and a dropout key folded in with its step."""
    root = jax.random.key(3)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, x: jax.Array) -> Any:
        key = jax.random.fold_in(root, state.step)

        def loss_fn(params: Any) -> jax.Array:
            y = state.apply_fn({"params": params}, x, train=True, rngs={"dropout": key})
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    train_step = observer.wrap(train_step)
    state = linen_state(LinenMlp(dropout=0.1))
    for x in batches():
        state, metrics = train_step(state, x)
        yield state.params, metrics


def dynamic_scale(observer: Bare) -> Iterator[Any]:
    """`DynamicScale`: float16 losses are scaled; a step with overflows is undone."""

    @jax.jit
    def train_step(state: TrainState, scale: DynamicScale, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            params = jax.tree.map(lambda w: w.astype(jnp.float16), params)
            y = state.apply_fn({"params": params}, x.astype(jnp.float16))
            return jnp.mean(y.astype(jnp.float32) ** 2)

        scale, is_finite, loss, grads = scale.value_and_grad(loss_fn)(state.params)
        updated = state.apply_gradients(grads=grads)
        kept = jax.tree.map(functools.partial(jnp.where, is_finite), updated, state)
        return kept, scale, {"loss": loss, "scale": scale.scale}

    train_step = observer.wrap(train_step)
    state, scale = linen_state(LinenMlp()), DynamicScale()
    for x in batches():
        state, scale, metrics = train_step(state, scale, x)
        yield state.params, metrics


class NnxMlp(nnx.Module):
    """[rows, INPUTS] → [rows, OUTPUTS]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def nnx_optimizer(observer: Bare) -> Iterator[Any]:
    """`nnx.Optimizer`: model and optimizer are changed in place."""
    model = NnxMlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: NnxMlp, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    train_step = observer.wrap(train_step)
    for x in batches():
        loss = train_step(model, optimizer, x)
        yield nnx.to_pure_dict(nnx.state(model)), loss


def nnx_rngs_in_the_step(observer: Bare) -> Iterator[Any]:
    """An NNX model with dropout whose `nnx.Rngs` is made inside the step."""
    model = NnxMlp(nnx.Rngs(0))

    @nnx.jit
    def train_step(model: NnxMlp, x: jax.Array) -> jax.Array:
        x = nnx.Dropout(0.1, rngs=nnx.Rngs(0))(x)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss

    train_step = observer.wrap(train_step)
    for x in batches():
        loss = train_step(model, x)
        yield nnx.to_pure_dict(nnx.state(model)), loss


VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 2, 8


class BonsaiBlock(nnx.Module):
    """A decoder block as bonsai writes them: a config, `nnx.Einsum`s, functional masks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        head = WIDTH // HEADS
        self.qkv = nnx.Einsum("bsd,dznh->zbsnh", (WIDTH, 3, HEADS, head), rngs=rngs)
        self.out = nnx.Einsum("bsnh,nhd->bsd", (HEADS, head, WIDTH), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self.qkv(x)
        scores = jnp.einsum("bsnh,btnh->bnst", q, k)
        return x + self.out(jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), v))


class BonsaiModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([BonsaiBlock(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.attend(x)


def bonsai(observer: Bare) -> Iterator[Any]:
    """bonsai's way: `nnx.split` outside, `jax.jit` of pure states with a static graph."""
    graph, state = nnx.split(BonsaiModel(nnx.Rngs(0)))
    optimizer = optax.adam(1e-3)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
    def train_step(graph: Any, state: Any, opt_state: Any, tokens: jax.Array) -> Any:
        def loss_fn(state: Any) -> jax.Array:
            logits = nnx.merge(graph, state)(tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        updates, opt_state = optimizer.update(grads, opt_state, state)
        return optax.apply_updates(state, updates), opt_state, loss

    train_step = observer.wrap(train_step)
    opt_state = optimizer.init(state)
    while True:
        tokens = jnp.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % VOCABULARY
        state, opt_state, loss = train_step(graph, state, opt_state, tokens)
        yield nnx.to_pure_dict(state), loss


# Of a token: q, k, v and out; scores and values over all LENGTH keys; the tied head.
_TOKEN = 2 * (4 * matmul(1, WIDTH, WIDTH) + 2 * matmul(1, LENGTH, WIDTH))
BONSAI = 3 * ROWS * LENGTH * (_TOKEN + matmul(1, WIDTH, VOCABULARY))

CLIENTS = (
    Client(name="Flax Linen TrainState", loop=linen_train_state, flops=MLP),
    Client(name="Flax DynamicScale", loop=dynamic_scale, flops=MLP),
    Client(name="nnx.Optimizer", loop=nnx_optimizer, flops=MLP),
    Client(name="nnx.Rngs made in the step", loop=nnx_rngs_in_the_step, flops=MLP),
    Client(name="bonsai", loop=bonsai, flops=BONSAI),
)
