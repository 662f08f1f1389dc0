"""Moved rows against plain indexing: the same values and gradients, and no scatter."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mfu_jax.layers.feed_forward.row_moves import moved

ROWS, COPIES, WIDTH = 4, 2, 3
# The copies that six places get; 8 is none. Copies 2 and 7 have no place: theirs is 6.
PLACES = jnp.array([5, 0, 8, 3, 1, 4])
X = jnp.arange(1.0, 1 + ROWS * WIDTH).reshape(ROWS, WIDTH)
BACK = jnp.array([1, 4, 6, 3, 5, 0, 6, 6])


def plain(x: jax.Array) -> jax.Array:
    copies = jnp.concatenate([jnp.tile(x, (COPIES, 1)), jnp.zeros((1, WIDTH))])
    return copies[PLACES]


@pytest.mark.full
def test_each_place_gets_its_copy_and_each_row_its_copies_gradients() -> None:
    weights = jnp.arange(6.0 * WIDTH).reshape(6, WIDTH)
    got, pull = jax.vjp(lambda x: moved(COPIES, True, x, PLACES, BACK), X)
    want, pull_plain = jax.vjp(plain, X)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pull(weights)[0], pull_plain(weights)[0])


def test_the_gradient_is_gathered() -> None:
    loss = lambda x: moved(COPIES, True, x, PLACES, BACK).sum()  # noqa: E731
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(X))
    assert "scatter" in str(jax.make_jaxpr(jax.grad(lambda x: plain(x).sum()))(X))


def test_where_every_copy_has_a_place_nothing_is_masked() -> None:
    order = jnp.array([5, 0, 7, 3, 1, 4, 6, 2])
    whole = lambda x: moved(COPIES, False, x, order, jnp.argsort(order))  # noqa: E731
    got, pull = jax.vjp(whole, X)
    weights = jnp.arange(8.0 * WIDTH).reshape(8, WIDTH)
    np.testing.assert_array_equal(got, np.tile(X, (COPIES, 1))[order])
    of_copies = np.zeros((8, WIDTH))
    of_copies[order] = weights
    np.testing.assert_array_equal(pull(weights)[0], of_copies[:ROWS] + of_copies[ROWS:])
    program = str(jax.make_jaxpr(lambda x, dy: jax.vjp(whole, x)[1](dy))(X, weights))
    assert not re.search(r"f32\[\S+ = select_n", program)  # the places are integers
