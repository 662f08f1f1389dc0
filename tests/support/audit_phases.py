"""Programs of the audit with evaluations, teachers and optimizers that multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.audit import (
    BACKWARD,
    CHUNKS,
    FORWARD,
    MLP,
    SQUARE,
    B,
    D,
    H,
    X,
    audit,
    loss,
    mlp,
    of,
    sgd,
    square_loss,
)


@audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_after_the_update(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    return w, value, loss(w, y)


@audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_before_the_update(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    return sgd(w, g), value, loss(w, y)


@audit(MLP, MLP, MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_after_adam(w, m, v, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, v, g)
    w = jax.tree.map(lambda w, m, v: w - 0.1 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w), w, m, v)
    return w, m, v, value, loss(w, y)


@audit(MLP, MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_of_averaged_weights(w, mean, x, y):
    w = sgd(w, jax.grad(loss)(w, x))
    mean = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, mean, w)
    return w, mean, loss(mean, y)


@audit(
    MLP, X, of(CHUNKS, B, D),
    forward=(1 + CHUNKS) * FORWARD, backward=BACKWARD, evaluation=CHUNKS * FORWARD,
)  # fmt: skip
def evaluation_in_a_loop(w, x, ys):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    return w, value, lax.scan(lambda total, y: (total + loss(w, y), None), 0.0, ys)[0]


@audit(
    MLP, of(CHUNKS, B, D), X,
    forward=2 * CHUNKS * FORWARD, backward=CHUNKS * BACKWARD, evaluation=CHUNKS * FORWARD,
)  # fmt: skip
def evaluation_after_every_update(w, xs, y):
    def one(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        w = sgd(w, g)
        return w, (value, loss(w, y))

    return lax.scan(one, w, xs)


@audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def learning_rate_from_an_evaluation(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    rate = jnp.where(loss(w, y) > value, 0.1, 0.01)
    return jax.tree.map(lambda a, b: a - rate * b, w, g), value


@audit(
    MLP,
    of(D, D),
    X,
    X,
    forward=2 * FORWARD + SQUARE,
    backward=BACKWARD,
    evaluation=FORWARD + SQUARE,
)
def confusion_matrix(w, counts, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    chosen = jax.nn.one_hot(mlp(w, y).argmax(-1), D)
    return w, value, counts + chosen.T @ y


@audit(MLP, X, forward=FORWARD, backward=BACKWARD)
def layer_named_optimizer(w, x):
    def named(w, x):
        with jax.named_scope("optimizer"):
            h = jnp.tanh(x @ w["up"])
        with jax.named_scope("apply_updates"):
            return jnp.mean((h @ w["down"]) ** 2)

    value, g = jax.value_and_grad(named)(w, x)
    return sgd(w, g), value


@audit(MLP, X, X, forward=2 * FORWARD, backward=BACKWARD, evaluation=FORWARD)
def evaluation_of_a_layer_named_optimizer(w, x, y):
    value, g = jax.value_and_grad(loss)(w, x)
    w = sgd(w, g)
    with jax.named_scope("opt_update"):
        return w, value, loss(w, y)


@audit(MLP, X, forward=FORWARD)
def inference_of_a_layer_named_optimizer(w, x):
    with jax.named_scope("optimizer"):
        return mlp(w, x)


def _orthogonal(g):
    for _ in range(2):
        g = 1.5 * g - 0.5 * (g @ g.T) @ g
    return g


NEWTON_SCHULZ = 2 * 2 * 2 * D**3


@audit(
    of(D, D), of(D, D), X, X,
    forward=2 * SQUARE, backward=SQUARE, optimizer=NEWTON_SCHULZ, evaluation=SQUARE,
)  # fmt: skip
def muon_and_an_evaluation(w, m, x, y):
    value, g = jax.value_and_grad(square_loss)(w, x)
    m = 0.9 * m + g
    w = w * 0.99 - 0.1 * _orthogonal(m)
    return w, m, value, square_loss(w, y)


@audit(of(D, D), of(D, D), X, forward=SQUARE, backward=SQUARE, optimizer=NEWTON_SCHULZ)
def muon_with_weight_decay_in_the_gradient(w, m, x):
    value, g = jax.value_and_grad(square_loss)(w, x)
    m = 0.9 * m + g + 0.1 * w
    return w - 0.1 * _orthogonal(m), m, value


@audit(of(D, D), of(D, D), X, forward=SQUARE, backward=SQUARE, optimizer=3 * 2 * D**3)
def preconditioner_of_the_last_step(w, p, x):
    """Shampoo, with a root of statistics that are one step old: no gradient is in it."""
    value, g = jax.value_and_grad(square_loss)(w, x)
    root = p @ p
    return w - 0.1 * root @ g, 0.9 * p + g @ g.T, value


@audit(
    MLP, MLP, X, forward=2 * FORWARD, backward=BACKWARD,
)  # fmt: skip
def teacher(w, t, x):
    target = mlp(t, x)
    value, g = jax.value_and_grad(lambda w: jnp.mean((mlp(w, x) - target) ** 2))(w)
    return sgd(w, g), value


@audit(MLP, X, forward=2 * FORWARD, backward=BACKWARD, removed=FORWARD)
def rollout(w, x):
    chosen = mlp(w, x).argmax(-1)
    value, g = jax.value_and_grad(
        lambda w: -jnp.take_along_axis(jax.nn.log_softmax(mlp(w, x)), chosen[:, None], 1).mean()
    )(w)
    return sgd(w, g), value


@audit(MLP, X, forward=FORWARD, backward=BACKWARD, optimizer=2 * 2 * D * H, removed=None)
def gradient_norm_by_a_dot(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    norm = jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(g)))
    return jax.tree.map(lambda a, b: a - b / norm, w, g), value
