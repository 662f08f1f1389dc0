"""Loops and branches written in unusual ways, counted in the jaxpr and in the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.traced.counting import count_model_flops

B, D = 3, 8
ONE = 2 * B * D * D
X, W = jax.ShapeDtypeStruct((B, D), jnp.float32), jax.ShapeDtypeStruct((D, D), jnp.float32)


def loop(condition, step, start=0):
    def fn(w, x):
        def body(carry):
            return step(carry[0]), jnp.tanh(carry[1] @ w)

        return jax.lax.while_loop(lambda carry: condition(carry[0]), body, (start, x))[1]

    return fn


BOUND = np.array(7)
BOUND_ON_DEVICE = jnp.array(7)

# A loop, and how often it runs.
LOOPS = {
    "not equal": (loop(lambda i: i != 6, lambda i: i + 2), 3),
    "doubled": (loop(lambda i: i < 100, lambda i: i * 2, 1), 7),
    "halved": (loop(lambda i: i > 0, lambda i: i // 2, 100), 7),
    "jitted": (loop(jax.jit(lambda i: i < 6), jax.jit(lambda i: i + 2)), 3),
    "bound is an array": (loop(lambda i: i < BOUND, lambda i: i + 1), 7),
    "bound is on a device": (loop(lambda i: i < BOUND_ON_DEVICE, lambda i: i + 1), 7),
    "bound is computed": (loop(lambda i: i < jnp.minimum(jnp.int32(9), 7), lambda i: i + 1), 7),
    "other side": (loop(lambda i: jnp.int32(10) >= i, lambda i: i + 5), 3),
    "downwards": (loop(lambda i: i >= 2, lambda i: i - 3, 9), 3),
    "a float": (loop(lambda t: t < 2.0, lambda t: t + 0.25, 0.0), 8),
    "halved until it is small": (loop(lambda t: t > 0.1, lambda t: t * 0.5, 8.0), 7),
    "never": (loop(lambda i: i < 0, lambda i: i + 1), 0),
    "very often": (loop(lambda i: i < 10**9, lambda i: i + 1), 10**9),
}


@pytest.mark.parametrize("name", LOOPS)
def test_while_loops(name):
    fn, times = LOOPS[name]
    count = count_model_flops(fn, W, X)
    assert count.total == times * ONE
    assert count.unaccounted == ()
    executed = executed_flops(jax.jit(fn).lower(W, X).compile())
    assert executed.total == times * ONE
    assert executed.unaccounted == ()


def test_a_counter_that_is_a_float_is_listed():
    count = count_model_flops(loop(lambda i: i < 1.0, lambda i: i + 0.1, 0.0), W, X)
    assert count.total == ONE
    assert [item.name for item in count.unaccounted] == ["while"]


def test_a_matmul_in_the_condition_runs_once_more_than_the_body():
    def fn(w, x):
        def condition(carry):
            return (carry[0] < 4) & (jnp.sum(carry[1] @ w) < 1e9)

        return jax.lax.while_loop(condition, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]

    for count in (
        count_model_flops(fn, W, X),
        executed_flops(jax.jit(fn).lower(W, X).as_text("hlo")),
    ):
        assert count.total == 2 * ONE  # the body is counted once: the condition twice
        assert [item.name for item in count.unaccounted] == ["while"]


def test_what_is_not_known_in_a_cheaper_branch_is_listed():
    def fn(index, w, x):
        unknown = lambda: jax.pure_callback(np.asarray, X, x)  # noqa: E731
        return jax.lax.switch(index, [unknown, lambda: x @ w, lambda: x @ w @ w])

    count = count_model_flops(fn, jax.ShapeDtypeStruct((), jnp.int32), W, X)
    assert count.total == 2 * ONE
    assert sorted(item.name for item in count.unaccounted) == ["cond", "pure_callback"]


def test_linear_calls_are_calls():
    def product(w, x):
        return jax.custom_derivatives.linear_call(
            lambda w, x: x @ w, lambda w, cotangent: cotangent @ w.T, w, x
        )

    def loss(x, w):
        return jnp.sum(product(w, x) ** 2)

    count = count_model_flops(jax.grad(loss), X, W)
    assert (count.forward, count.backward) == (ONE, ONE)
    assert count.unaccounted == ()
