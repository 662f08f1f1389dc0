"""Loops of reinforcement learning."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.support.client import Bare, Client
from tests.support.client_loops.plain import matmul

OBSERVATION, HIDDEN, ACTIONS = 4, 16, 2


def network(params: Any, observation: jax.Array) -> jax.Array:
    """[rows, OBSERVATION] → [rows, ACTIONS]."""
    return jnp.tanh(observation @ params["w1"]) @ params["w2"]


def make_params(outputs: int = ACTIONS) -> Any:
    one, two = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(one, (OBSERVATION, HIDDEN)),
        "w2": jax.random.normal(two, (HIDDEN, outputs)),
    }


def forward(rows: int, outputs: int = ACTIONS) -> int:
    return matmul(rows, OBSERVATION, HIDDEN) + matmul(rows, HIDDEN, outputs)


def trained(rows: int, outputs: int = ACTIONS) -> int:
    """The first layer needs no gradient of its input (2 ×), the second one does (3 ×)."""
    return 2 * matmul(rows, OBSERVATION, HIDDEN) + 3 * matmul(rows, HIDDEN, outputs)


BATCH = 8


def dqn(observer: Bare) -> Iterator[Any]:
    """DQN: a replay buffer on the host, a target network that is replaced now and then."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train_step(params: Any, target: Any, opt_state: Any, batch: Any, step: int) -> Any:
        best = network(target, batch["next"]).max(-1)
        wanted = batch["reward"] + 0.99 * best

        def loss_fn(params: Any) -> jax.Array:
            values = network(params, batch["observation"])
            taken = jnp.take_along_axis(values, batch["action"][:, None], 1)[:, 0]
            return optax.huber_loss(taken, wanted).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, step, 2)
        return params, target, opt_state, {"td_loss": loss}

    train_step = observer.wrap(train_step)
    params, target = make_params(), make_params()
    opt_state = optimizer.init(params)
    random = np.random.default_rng(0)
    step = 0
    while True:
        batch = {
            "observation": random.normal(size=(BATCH, OBSERVATION)).astype("float32"),
            "next": random.normal(size=(BATCH, OBSERVATION)).astype("float32"),
            "action": random.integers(0, ACTIONS, BATCH),
            "reward": random.normal(size=BATCH).astype("float32"),
        }
        params, target, opt_state, metrics = train_step(params, target, opt_state, batch, step)
        step += 1
        yield params, target, metrics


ENVS, TIME, EPOCHS, MINIBATCHES = 4, 6, 3, 2


def ppo(observer: Bare) -> Iterator[Any]:
    """PPO with its environment in JAX: rollouts, epochs and minibatches are nested scans."""
    optimizer = optax.adam(1e-3)

    def act(params: Any, carry: Any) -> Any:
        observation, key = carry
        key, draw = jax.random.split(key)
        logits = network(params["policy"], observation)
        action = jax.random.categorical(draw, logits)
        value = network(params["value"], observation)[:, 0]
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        reward = jnp.where(action == 0, observation[:, 0], -observation[:, 0])
        following = jnp.roll(observation, 1, axis=1) + 0.1 * action[:, None]
        return (following, key), (observation, action, value, log_prob, reward)

    def advantages(values: jax.Array, rewards: jax.Array) -> jax.Array:
        def back(later: jax.Array, now: Any) -> Any:
            value, reward = now
            later = reward - value + 0.95 * later
            return later, later

        return jax.lax.scan(back, jnp.zeros(ENVS), (values, rewards), reverse=True)[1]

    def loss_fn(params: Any, rows: Any) -> jax.Array:
        observation, action, value, log_prob, advantage = rows
        logits = jax.nn.log_softmax(network(params["policy"], observation))
        new = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
        ratio = jnp.exp(new - log_prob)
        clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        error = network(params["value"], observation)[:, 0] - (value + advantage)
        return jnp.mean(error**2) - jnp.mean(clipped)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any) -> Any:
        params, opt_state, carry = state
        carry, rollout = jax.lax.scan(lambda c, _: act(params, c), carry, length=TIME)
        observation, action, value, log_prob, reward = rollout
        data = (observation, action, value, log_prob, advantages(value, reward))
        rows = jax.tree.map(lambda x: x.reshape(MINIBATCHES, -1, *x.shape[2:]), data)

        def minibatch(state: Any, rows: Any) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_fn)(params, rows)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        def epoch(state: Any, _: None) -> Any:
            return jax.lax.scan(minibatch, state, rows)

        (params, opt_state), losses = jax.lax.scan(epoch, (params, opt_state), length=EPOCHS)
        return (params, opt_state, carry), {"loss": losses.mean(), "reward": reward.mean()}

    train_step = observer.wrap(train_step)
    params = {"policy": make_params(), "value": make_params(1)}
    carry = (jax.random.normal(jax.random.key(1), (ENVS, OBSERVATION)), jax.random.key(2))
    state = (params, optimizer.init(params), carry)
    while True:
        state, metrics = train_step(state)
        yield state, metrics


_ROLLOUT = TIME * (forward(ENVS) + forward(ENVS, 1))
_ROWS = TIME * ENVS // MINIBATCHES
PPO = _ROLLOUT + EPOCHS * MINIBATCHES * (trained(_ROWS) + trained(_ROWS, 1))

CLIENTS = (
    Client(name="DQN", loop=dqn, flops=forward(BATCH) + trained(BATCH)),
    Client(name="PPO with nested scans", loop=ppo, flops=PPO),
)
