"""Actor-critic on CartPole, entirely in JAX, environment included: FLOPs, time, MFU per phase.

    python examples/rl_phases.py [--iterations 60] [--metrics_file rl.jsonl …]

Each iteration is one step of two phases: a rollout that plays (inference, many small matmuls) and
an update that learns (forward and backward over everything played).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mfu_jax
from mfu_jax.flags import add_arguments, from_arguments
from mfu_jax.instrumentation.assembly import logger_of
from mfu_jax.settings import Settings, parse_steps

ENVIRONMENTS = 256
STEPS = 64
WIDTH = 128
DISCOUNT = 0.97

# Barto, Sutton and Anderson (1983), with the constants that Gym's CartPole-v1 uses.
GRAVITY, CART_MASS, POLE_MASS, HALF_POLE, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FARTHEST, STEEPEST, LONGEST = 2.4, 12 * 2 * math.pi / 360, 500

optimizer = optax.adam(3e-3)


class Environments(NamedTuple):
    """observation [N, 4]: position, speed, angle, angular speed; age [N]: steps since the start."""

    observation: jax.Array
    age: jax.Array
    key: jax.Array


class Played(NamedTuple):
    """The result of a rollout, each [T, N, …]; `ended`: a pole fell or time was up."""

    observation: jax.Array
    action: jax.Array
    ended: jax.Array
    last: jax.Array


class Learner(NamedTuple):
    params: Any
    opt_state: Any


def dynamics(observation: jax.Array, action: jax.Array) -> jax.Array:
    """One Euler step of all carts; observation [N, 4], action [N] of 0 (left) or 1 (right)."""
    _, speed, angle, turning = observation.T
    force = jnp.where(action == 1, FORCE, -FORCE)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_POLE * turning**2 * jnp.sin(angle)) / mass
    inertia = HALF_POLE * (4 / 3 - POLE_MASS * jnp.cos(angle) ** 2 / mass)
    turn = (GRAVITY * jnp.sin(angle) - jnp.cos(angle) * push) / inertia
    drive = push - POLE_MASS * HALF_POLE * turn * jnp.cos(angle) / mass
    change = jnp.stack([speed, drive, turning, turn], axis=1)
    return observation + SECONDS * change


def advance(state: Environments, action: jax.Array) -> tuple[Environments, jax.Array]:
    """The environments after `action`; ended ones are restarted."""
    key, fresh = jax.random.split(state.key)
    observation = dynamics(state.observation, action)
    fell = (abs(observation[:, 0]) > FARTHEST) | (abs(observation[:, 2]) > STEEPEST)
    ended = fell | (state.age + 1 >= LONGEST)
    start = jax.random.uniform(fresh, observation.shape, minval=-0.05, maxval=0.05)
    observation = jnp.where(ended[:, None], start, observation)
    return Environments(observation, jnp.where(ended, 0, state.age + 1), key), ended


def network(params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [..., 2] and value [...]."""
    hidden = observation
    for weights in params["hidden"]:
        hidden = jnp.tanh(hidden @ weights)
    return hidden @ params["actor"], (hidden @ params["critic"])[..., 0]


def make_params(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    scaled = [
        jax.random.normal(k, (rows, columns)) / math.sqrt(rows)
        for k, rows, columns in zip(
            keys, (4, WIDTH, WIDTH, WIDTH), (WIDTH, WIDTH, 2, 1), strict=True
        )
    ]
    return {"hidden": scaled[:2], "actor": 0.1 * scaled[2], "critic": scaled[3]}


@functools.partial(jax.jit, donate_argnums=1)
def rollout(params: Any, state: Environments) -> tuple[Environments, Played]:
    def play(state: Environments, _: None) -> tuple[Environments, Any]:
        key, choice = jax.random.split(state.key)
        action = jax.random.categorical(choice, network(params, state.observation)[0])
        after, ended = advance(state._replace(key=key), action)
        return after, (state.observation, action, ended)

    state, (observation, action, ended) = jax.lax.scan(play, state, None, length=STEPS)
    return state, Played(observation, action, ended, state.observation)


@functools.partial(jax.jit, donate_argnums=0)
def update(learner: Learner, played: Played) -> tuple[Learner, dict[str, jax.Array]]:
    def returns(params: Any) -> jax.Array:
        def back(value: jax.Array, ended: jax.Array) -> tuple[jax.Array, jax.Array]:
            value = 1 + DISCOUNT * jnp.where(ended, 0.0, value)
            return value, value

        _, last = network(params, played.last)
        return jax.lax.scan(back, last, played.ended, reverse=True)[1]

    targets = jax.lax.stop_gradient(returns(learner.params))

    def loss(params: Any) -> jax.Array:
        logits, values = network(params, played.observation)
        log_probability = jnp.take_along_axis(
            jax.nn.log_softmax(logits), played.action[..., None], axis=-1
        )[..., 0]
        advantage = targets - values
        scale = advantage.std() + 1e-6
        actor = -(log_probability * jax.lax.stop_gradient(advantage / scale)).mean()
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
        return actor + 0.01 * (advantage**2).mean() - 0.005 * entropy

    value, gradient = jax.value_and_grad(loss)(learner.params)
    updates, opt_state = optimizer.update(gradient, learner.opt_state)
    params = optax.apply_updates(learner.params, updates)
    episode = played.ended.size / jnp.maximum(played.ended.sum(), 1)
    return Learner(params, opt_state), {"loss": value, "episode_steps": episode}


def steps_of(settings: Settings, iterations: int) -> Iterator[int]:
    """Iteration numbers, marked in the trace of those in ``profile_steps``."""
    chosen = settings.profile_steps
    first, last = parse_steps(chosen) if chosen else (iterations, iterations)
    with contextlib.ExitStack() as trace:
        for number in range(iterations):
            if number == first:
                trace.enter_context(mfu_jax.profile(settings.trace_folder))
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                yield number
            if number == last:
                trace.close()


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains; returns the mean number of steps that a pole finally stays up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    settings = from_arguments(options)

    params = make_params(jax.random.key(0))
    learner = Learner(params, optimizer.init(params))
    environments = Environments(
        jnp.zeros((ENVIRONMENTS, 4)), jnp.zeros(ENVIRONMENTS, jnp.int32), jax.random.key(1)
    )
    with logger_of(settings) as logger:
        peak = {key: getattr(settings, key) for key in ("hardware", "peak_tflops_per_device")}
        play = mfu_jax.instrument(rollout, logger=logger, **peak)
        learn = mfu_jax.instrument(update, logger=logger, **peak)
        for _ in steps_of(settings, options.iterations):
            with logger.step():
                with logger.phase("rollout"):
                    environments, played = play(learner.params, environments)
                with logger.phase("update"):
                    learner, metrics = learn(learner, played)
        play.close()
        learn.close()
    return float(metrics["episode_steps"])


if __name__ == "__main__":
    print(f"a pole stands for {main():.0f} steps")
