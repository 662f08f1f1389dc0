"""Functions from `jax.export`: what their StableHLO multiplies, by hand arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.small_functions import shape

X, W, N = shape(4, 8), shape(8, 8), shape(dtype=jnp.int32)
PRODUCT = 2 * 4 * 8 * 8


def scanned(x, w):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]


def exported(fn, *arguments):
    return export.export(jax.jit(fn))(*arguments).call


@pytest.mark.parametrize(
    ("fn", "products"),
    [
        (lambda x, w: x @ w @ w, 2),
        (scanned, 5),
        (lambda x, w: lax.fori_loop(2, 9, lambda i, x: scanned(x, w), x), 7 * 5),
        (lambda x, w: lax.map(lambda row: row @ w, x), 1),  # four rows
        (lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x + 1) @ w), 1),
    ],
)
def test_products_in_calls_and_loops(fn, products):
    count = count_model_flops(exported(fn, X, W), X, W)
    assert (count.total, count.unaccounted) == (products * PRODUCT, ())
    assert count.total == count_model_flops(fn, X, W).total


@pytest.mark.parametrize(
    ("dtype", "name", "per_pair"), [("bfloat16", "bf16", 2), ("complex64", "c64", 8)]
)
def test_dtypes(dtype, name, per_pair):
    x, w = shape(4, 8, dtype=dtype), shape(8, 8, dtype=dtype)
    count = count_model_flops(exported(jnp.matmul, x, w), x, w)
    assert count.by_dtype == {name: per_pair * 4 * 8 * 8}


def test_a_gradient_through_an_exported_function():
    fn = exported(scanned, X, W)
    count = count_model_flops(jax.value_and_grad(lambda w, x: fn(x, w).sum()), W, X)
    # Its exported gradient runs the forward pass again.
    assert (count.forward, count.backward) == (5 * PRODUCT, (5 + 2 * 5) * PRODUCT)
    assert count.unaccounted == ()


@pytest.mark.parametrize(
    ("fn", "products", "reason"),
    [
        (lambda x, w, n: lax.fori_loop(0, n, lambda i, x: x @ w, x), 1, "how often a loop runs"),
        (lambda x, w, n: lax.cond(n > 0, lambda: x @ w @ w, lambda: x @ w), 2, "which branch"),
        (lambda x, w, n: jnp.linalg.cholesky(w @ w.T), 2, "the FLOPs of"),
    ],
)
def test_what_is_not_known_is_said(fn, products, reason):
    count = count_model_flops(exported(fn, X, W, N), X, W, N)
    assert count.total == products * PRODUCT
    (item,) = count.unaccounted
    assert item.reason.startswith(reason)
