"""Whole steps: what is forward, backward, done again, and of the optimizer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import shape

B, D, F = 4, 8, 16
ONE, SQUARE = 2 * B * D * D, 2 * D**3


X, W = shape(B, D), shape(D, D)


def loss(w, x):
    """Two matmuls forward, three backward: the input's gradient is not needed."""
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def phases(count):
    return count.forward, count.backward, count.rematerialized, count.optimizer


def compiled(fn, *args):
    return executed_flops(jax.jit(fn).lower(*args).compile())


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.full
def test_a_plain_step_that_changes_its_model_in_place():
    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model, optimizer, x):
        value, gradient = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, gradient)
        return value

    forward = 2 * 2 * B * D * F
    for fn in (step, nnx.jit(step)):
        count = count_model_flops(fn, model, optimizer, X)
        assert phases(count) == (forward, forward + forward // 2, 0, 0)
    assert isinstance(model.up.kernel[...], jax.Array)  # no tracer is left in it


class Product:
    def __init__(self):
        self.w = jnp.ones((D, D))

    @functools.partial(jax.jit, static_argnums=0)
    def times(self, x):
        return x @ self.w


def test_a_jitted_method():
    assert count_model_flops(Product().times, X).total == ONE


def test_training_loops_whose_rollouts_are_not_differentiated():
    """Reinforcement learning in one function: what plays has the weights of the last update."""

    def train(w, xs):
        def update(w, x):
            played = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

            def epoch(w, _):
                return w - 0.1 * jax.grad(loss)(w, jax.lax.stop_gradient(played)), None

            return jax.lax.scan(epoch, w, None, length=2)[0], None

        return jax.lax.scan(update, w, xs)

    for counted in (count_model_flops, compiled):
        count = counted(train, W, shape(5, B, D))
        assert phases(count) == (5 * (3 + 2 * 2) * ONE, 5 * 2 * 3 * ONE, 0, 0)


def orthogonalised(gradient):
    return jax.lax.fori_loop(0, 5, lambda _, g: 1.5 * g - 0.5 * g @ (g.T @ g), gradient)


def test_orthogonalised_momentum_in_steps_of_a_scan():
    def step(carry, x):
        w, momentum = carry
        momentum = 0.9 * momentum + jax.grad(loss)(w, x)
        return (w - orthogonalised(momentum), momentum), None

    for counted in (count_model_flops, compiled):
        count = counted(lambda c, xs: jax.lax.scan(step, c, xs), (W, W), shape(4, B, D))
        assert phases(count) == (4 * 2 * ONE, 4 * 3 * ONE, 0, 4 * 5 * 2 * SQUARE)


def test_accumulated_gradients_belong_to_the_optimizer():
    def step(w, xs):
        def microbatch(total, x):
            return total + jax.grad(loss)(w, x), None

        total, _ = jax.lax.scan(microbatch, jnp.zeros((D, D)), xs)
        return w - orthogonalised(total)

    for counted in (count_model_flops, compiled):
        count = counted(step, W, shape(3, B, D))
        assert phases(count) == (3 * 2 * ONE, 3 * 3 * ONE, 0, 5 * 2 * SQUARE)


@pytest.mark.full
def test_muon_of_optax():
    """Five steps of three products each, on the smaller side's Gram matrix."""
    weights = {"square": W, "wide": shape(D, F)}
    optimizer = optax.contrib.muon(1e-2)

    def step(weights, state, x):
        gradient = jax.grad(lambda w: jnp.sum((jnp.tanh(x @ w["square"]) @ w["wide"]) ** 2))(
            weights
        )
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    state = jax.eval_shape(optimizer.init, weights)
    wide, of_wide = 2 * B * D * F, 2 * (2 * D * D * F) + SQUARE
    for counted in (count_model_flops, compiled):
        count = counted(step, weights, state, X)
        assert phases(count) == (ONE + wide, ONE + 2 * wide, 0, 5 * (3 * SQUARE + of_wide))


def test_a_state_that_rotates_gradients():
    def step(w, rotation, momentum, x):
        momentum = 0.9 * momentum + jax.grad(loss)(w, x)
        return w - rotation @ (rotation.T @ momentum), momentum

    for counted in (count_model_flops, compiled):
        assert phases(counted(step, W, W, W, X)) == (2 * ONE, 3 * ONE, 0, 2 * SQUARE)


def test_a_kernel_in_a_branch_that_is_not_counted_is_listed():
    def step(index, x, w):
        branches = [lambda: jax.scipy.linalg.solve(w, w), lambda: x.T @ x @ w @ w]
        return jax.lax.switch(index, branches)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(step).lower(index, X, W).compile().as_text()
    count = executed_flops(text.replace("lapack_sgetrf_ffi", "a_kernel"))
    assert count.total == 2 * B * D * D + 2 * SQUARE
    assert [item.name for item in count.unaccounted] == ["a_kernel"]
