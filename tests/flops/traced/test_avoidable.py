"""Matmuls whose result the model knows already: by hand, on small functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mfu_jax.flops.traced.counting import count_model_flops

ROWS, WIDTH, TIMES = 8, 16, 5
ONE = 2 * ROWS * WIDTH * WIDTH
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def _twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x @ w) + jnp.cos(x @ w)


def _in_calls(x: jax.Array, w: jax.Array) -> jax.Array:
    @jax.jit
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ w

    return product(x, w) + jnp.tanh(x) @ w


def _of_equal_sums(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x + 1) @ w * ((x + 1) @ w)


def _kept_apart(x: jax.Array, w: jax.Array) -> jax.Array:
    again, _ = lax.optimization_barrier((x, w))
    return x @ w + again @ w


def _different_precision(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w + jnp.matmul(x, w, precision="highest")


def _other_operands(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w + x @ (w + 1)


def _invariant_in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda y, _: (y + x @ w, None), x, None, length=TIMES)[0]


def _invariant_carry(x: jax.Array, w: jax.Array) -> Any:
    return lax.scan(lambda c, _: ((c[0], c[1] + c[0] @ w), None), (x, x), None, length=TIMES)[0]


def _invariant_in_the_inner_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    def outer(y: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.scan(lambda z, _: (z + y @ w, None), y, None, length=3)[0], None

    return lax.scan(outer, x, None, length=TIMES)[0]


def _carried(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=TIMES)[0]


def _over_slices(xs: jax.Array, w: jax.Array) -> Any:
    def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + (x @ w).sum(), x @ w

    return lax.scan(body, 0.0, xs)


def _times_one(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda x: jnp.vdot(x, w[:ROWS]))(x)


def _of_equal_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.tanh(x[:1]), ROWS, axis=0) @ w


def _transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("ab,bc->ca", 2 * jnp.broadcast_to(x[:1], (ROWS, WIDTH)), w)


def _in_another_layout(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("ab,bc->ca", x, w) + (x @ w).T


def _of_transposed_operands(x: jax.Array, w: jax.Array) -> jax.Array:
    return (w.T @ x.T).T + x @ w


def _by_the_other_side_of_a_square(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w + x @ w.T


def _sums_over_equal_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x[:1, :ROWS], (WIDTH, ROWS)).T @ w


def _behind_stop_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w + lax.stop_gradient(x) @ w


def _row_by_row(x: jax.Array, w: jax.Array) -> Any:
    return x @ w, jax.vmap(lambda row: row[None] @ w)(x)


def _square_of_rows(x: jax.Array, w: jax.Array) -> Any:
    return x @ w, jax.vmap(lambda row: jnp.tile(row[None], (ROWS, 1)) @ w)(x)


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (_twice, ONE),
        (_row_by_row, ONE),
        (_square_of_rows, 0),
        (_behind_stop_gradient, ONE),
        (_in_calls, ONE),
        (_of_equal_sums, ONE),
        (_kept_apart, 0),
        (_different_precision, 0),
        (_other_operands, 0),
        (_invariant_in_a_loop, (TIMES - 1) * ONE),
        (_invariant_carry, (TIMES - 1) * ONE),
        (_invariant_in_the_inner_loop, TIMES * (3 - 1) * ONE),
        (_carried, 0),
        (_of_equal_rows, ONE * (ROWS - 1) // ROWS),
        (_transposed, ONE * (ROWS - 1) // ROWS),
        (_in_another_layout, ONE),
        (_of_transposed_operands, ONE),
        (_by_the_other_side_of_a_square, 0),
        (_sums_over_equal_rows, 0),
    ],
)
def test_work_that_equals_other_work(function: Callable[..., Any], known: int) -> None:
    found = count_model_flops(function, X, W).avoidable
    assert found == ({"forward dot_general": known} if known else {})


def test_slices_of_a_loop_are_equal_in_one_iteration() -> None:
    xs = jax.ShapeDtypeStruct((TIMES, ROWS, WIDTH), jnp.float32)
    assert count_model_flops(_over_slices, xs, W).avoidable == {"forward dot_general": TIMES * ONE}


def test_a_product_that_only_scales_is_a_multiplication() -> None:
    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("i...k,...k->i...k", x, w[0])

    def outer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("i,j->ij", x[0], w[0])

    scale = {"forward dot_general": 2 * ROWS * WIDTH}
    assert count_model_flops(scaled, X, W).avoidable == scale
    assert count_model_flops(outer, X, W).avoidable == {}


def test_a_gradient_with_the_constant_1_is_the_other_operand() -> None:
    found = count_model_flops(_times_one, X, W)
    assert found.avoidable == {"backward dot_general": 2 * ROWS * WIDTH}


def test_a_forward_pass_for_a_metric_equals_that_for_the_gradient() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(loss)(w, x), jnp.sqrt(loss(w, x))

    assert count_model_flops(step, W, X).avoidable == {"evaluation dot_general": ONE}
