"""Trip counts and branches that follow integers: the count is what runs on this machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.flops.traced.integers import evaluation

D = 4
ONE = 2 * D**3
X = jnp.eye(D)


def layer(state):
    """One matmul; the state counts them."""
    x, ran = state
    return jnp.tanh(x @ x), ran + 1


def repeat(start, condition, update):
    def fn(state):
        step = lambda c: (update(c[0]), layer(c[1]))  # noqa: E731
        return lax.while_loop(lambda c: condition(c[0]), step, (start, state))[1]

    return fn


def over(xs, body, **options):
    return lambda s: lax.scan(lambda s, x: (body(s, x), None), s, xs, **options)[0]


def branch(index, s):
    return lax.switch(index, [lambda s: s, layer, lambda s: layer(layer(s))], s)


PATTERN = np.array([0, 2, 1, 1, 0, 2])


def doubly_buffered(s):
    def body(carry):
        a, b, s = carry
        return b, a + 2, layer(s)

    return lax.while_loop(lambda c: c[0] < 9, body, (jnp.int32(0), jnp.int32(1), s))[2]


def three_deep(s):
    def chunk(i, s):
        def row(j, s):
            return layers(j, i + 2)(s)

        return lax.fori_loop(0, i + 1, row, s)

    return lax.fori_loop(0, 4, chunk, s)


def batched(s):
    """As long as the longest of three examples."""
    once = lambda n, x: lax.fori_loop(0, n, lambda i, x: layer((x, 0))[0], x)  # noqa: E731
    xs = jax.vmap(once)(jnp.array([2, 5, 3]), jnp.stack([s[0]] * 3))
    return xs[0], s[1] + 3 * 5


def in_sorted_order(s):
    """Sorted, the pattern's places are 0, 4, 2, 3, 1, 5."""
    places = jnp.argsort(jnp.asarray(PATTERN))
    return over(jnp.arange(4), lambda s, i: lax.cond(places[i] < 3, layer, skip, s))(s)


def never_reached(s):
    """An endless loop in one that is not entered takes nothing of what may be evaluated."""
    endless = repeat(0, lambda i: i <= i, lambda i: i + 1)
    for _ in range(6):
        s = lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0], endless(c[1])), (0, s))[1]
    return over(jnp.arange(7), lambda s, i: layers(0, i + 1)(s))(s)


def table_from_a_loop(s):
    """The bounds are the stacked results of an earlier scan."""
    _, bounds = lax.scan(lambda i, _: (i * 2 + 1, i), jnp.int32(0), None, length=4)
    return over(bounds, lambda s, n: layers(0, n)(s))(s)


def layers(low, high):
    return lambda s: lax.fori_loop(low, high, lambda i, s: layer(s), s)


def skip(s):
    return s


# A loop with one matmul, and how often it runs.
LOOPS = {
    "stride grows": (0, lambda i: i < 100, lambda i: jnp.where(i < 10, i + 1, i + 10), 19),
    "stride grows late": (0, lambda i: i < 1000, lambda i: jnp.where(i < 4, i + 1, i + 62), 21),
    "maximum": (
        0,
        lambda i: i < 2048,
        lambda i: jnp.maximum(i + 1, jnp.where(i >= 4, 2 * i, 0)),
        13,
    ),
    "wraps around": (jnp.int8(100), lambda i: i > 0, lambda i: i + jnp.int8(9), 4),
    "unsigned": (jnp.uint8(3), lambda i: i != 250, lambda i: i - jnp.uint8(1), 9),
    "shifts": (1, lambda i: i < 1000, lambda i: i << 2, 5),
    "converted": (jnp.int8(0), lambda i: i.astype("int32") < 90, jax.jit(lambda i: i + 3), 30),
    "billions": (0, lambda i: i < 2**31 - 1, lambda i: i + 1, 2**31 - 1),
    "both": (0, lambda i: (i < 90) & (i * 2 < 30), lambda i: i + 1, 15),
}

# A program, and how often its one matmul runs.
PROGRAMS = {
    **{name: (repeat(*loop), times) for name, (*loop, times) in LOOPS.items()},
    "doubly buffered": (doubly_buffered, 9),
    "causal chunks": (over(jnp.arange(7), lambda s, i: layers(0, i + 1)(s)), 28),
    "counted chunks": (lambda s: lax.fori_loop(0, 7, lambda i, s: layers(0, i + 1)(s), s), 28),
    "three deep": (three_deep, 30),
    "every other": (over(jnp.arange(7), lambda s, i: lax.cond(i % 2 == 0, layer, skip, s)), 4),
    "never reached": (never_reached, 28),
    "sorted": (in_sorted_order, 2),
    "slices": (over(PATTERN, lambda s, kind: branch(kind, s)), 6),
    "table": (over(jnp.arange(6), lambda s, i: branch(jnp.asarray(PATTERN)[i], s)), 6),
    "reversed": (over(jnp.arange(4), lambda s, i: layers(i, 4)(s), reverse=True), 10),
    "remat": (over(PATTERN, jax.checkpoint(lambda s, kind: branch(kind, s))), 6),
    "batched": (batched, 15),
    "table from a loop": (table_from_a_loop, 0 + 1 + 3 + 7),
    "while in scan": (
        over(jnp.array([1, 9, 40]), lambda s, n: repeat(1, lambda i: i < n, lambda i: i * 3)(s)),
        0 + 2 + 4,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_ran_is_counted(name):
    program, times = PROGRAMS[name]
    if times < 1000:
        assert int(jax.jit(program)((X, jnp.int32(0)))[1]) == times
    count = count_model_flops(lambda x: program((x, jnp.int32(0)))[0], X)
    assert (count.forward, count.unaccounted) == (times * ONE, ())


def test_gradients_take_the_same_branches():
    """The transposed scan gets its branches as residuals of the forward scan, stacked."""

    def loss(w, x):
        s = over(
            PATTERN,
            lambda x, kind: lax.switch(
                kind, [lambda x: x, lambda x: jnp.tanh(x @ w), lambda x: jnp.tanh(x @ w @ w)], x
            ),
        )(x)
        return jnp.sum(s)  # fmt: skip

    for fn in (loss, jax.checkpoint(loss)):
        count = count_model_flops(jax.grad(fn, (0, 1)), X, X)
        assert (count.forward, count.backward) == (6 * ONE, 2 * 6 * ONE)
        assert count.unaccounted == ()


def test_a_stacked_residual_bounds_the_backward_loop():
    @jax.custom_vjp
    def chunk(x, w, n):
        return lax.fori_loop(0, n, lambda i, x: x @ w, x)

    def backward(residuals, g):
        w, n = residuals
        return lax.fori_loop(0, n, lambda i, g: g @ w.T, g), jnp.zeros_like(w), None

    chunk.defvjp(lambda x, w, n: (chunk(x, w, n), (w, n)), backward)

    def loss(x, w):
        return jnp.sum(lax.fori_loop(0, 5, lambda i, x: chunk(x, w, i + 1), x))

    count = count_model_flops(jax.value_and_grad(loss), X, X)
    assert (count.forward, count.backward) == (15 * ONE, 15 * ONE)
    assert count.unaccounted == ()


def test_only_what_depends_on_data_is_listed():
    def fn(x, n):
        def body(x, i):
            x = lax.cond(i % 2 == 0, lambda x: x @ x, lambda x: x, x)
            return lax.cond(i < n, lambda x: x @ x @ x, lambda x: x @ x, x), None

        return lax.scan(body, x, jnp.arange(6))[0]

    count = count_model_flops(fn, X, jnp.int32(0))
    assert count.forward == (3 + 6 * 2) * ONE
    (item,) = count.unaccounted
    assert (item.name, item.times) == ("cond", 6)


def test_loops_that_are_too_long_are_listed(monkeypatch):
    monkeypatch.setattr(evaluation, "LONGEST_LOOP", 30)
    turning = lambda i: jnp.where(i < 4, i + 1, i + 2)  # noqa: E731
    evaluated, too_long = (repeat(0, lambda i, end=end: i < end, turning) for end in (56, 57))
    endless = repeat(0, lambda i: i < 10, lambda i: (i + 1) % 5)
    count = count_model_flops(lambda x: evaluated((x, jnp.int32(0)))[0], X)
    assert (count.forward, count.unaccounted) == (30 * ONE, ())
    for program in (too_long, endless):
        count = count_model_flops(lambda x, run=program: run((x, jnp.int32(0)))[0], X)
        assert count.forward == ONE
        assert [item.name for item in count.unaccounted] == ["while"]


def test_a_long_scan_with_branches_is_listed():
    body = lambda s, i: lax.cond(i % 2 == 0, layer, lambda s: s, s)  # noqa: E731
    program = over(jnp.arange(200_000), body)
    count = count_model_flops(lambda x: program((x, jnp.int32(0)))[0], X)
    assert count.forward == 200_000 * ONE
    assert [item.name for item in count.unaccounted] == ["cond"]
