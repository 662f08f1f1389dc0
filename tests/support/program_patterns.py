"""What TPU programs write in ways of their own: patterns of layers, sums that they broadcast.

Each entry of `PROGRAMS`: the function, the shapes of its arguments, its matmul FLOPs by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

ROWS, WIDTH, LAYERS = 8, 16, 7
ROTATED = (0, 1, 1, 0, 1, 1, 1, 1)  # which of the layers have a matmul
_ONE = 2 * ROWS * WIDTH * WIDTH


def alternating(w: jax.Array, x: jax.Array) -> Any:
    """The gradient of layers of no, one or two matmuls: the kinds are a scan's residuals.

    A TPU's scan writes them to an `AllocateBuffer`.
    """

    def layer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        def one(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w)

        return lax.switch(i % 3, [jnp.sin, one, lambda x: one(one(x))], x), None

    return jax.value_and_grad(lambda x: jnp.sum(lax.scan(layer, x, jnp.arange(LAYERS))[0]))(x)


def rotated(w: jax.Array, x: jax.Array) -> jax.Array:
    """A pattern that each layer rotates: TPUs concatenate by padding and adding."""

    def layer(carry: tuple[jax.Array, jax.Array], _: None) -> Any:
        x, pattern = carry
        x = lax.cond(pattern[0] == 1, lambda x: jnp.tanh(x @ w), jnp.sin, x)
        return (x, jnp.roll(pattern, 1)), None

    return lax.scan(layer, (x, jnp.array(ROTATED)), None, length=len(ROTATED))[0][0]


def chained(a: jax.Array, x: jax.Array) -> jax.Array:
    """Products with vectors of products: a TPU sums a window as wide as a vector at each place."""
    return jax.vmap(lambda a, x: a @ (a.T @ (a @ x)))(a, x)


def solved(a: jax.Array, b: jax.Array) -> jax.Array:
    """Two triangular solves with one right-hand side, the first of which is such a sum."""
    return jax.vmap(lambda a, b: cho_solve((jnp.linalg.cholesky(a), True), b))(a, b)


def implicit(a: jax.Array, b: jax.Array) -> Any:
    """The gradient of a solve: its own solves have the same matrix, which a TPU inverts once."""
    return jax.grad(lambda b: jnp.sum(jnp.tanh(jnp.linalg.solve(a, b))))(b)


def _of(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


BATCH, SIDE = 12, 8
_VECTORS = (_of(BATCH, SIDE, SIDE), _of(BATCH, SIDE))
_ARGUMENTS = (_of(WIDTH, WIDTH), _of(ROWS, WIDTH))
# Forward, and the gradient of x.
_MATMULS = sum(i % 3 for i in range(LAYERS))
PROGRAMS = {
    "alternating": (alternating, _ARGUMENTS, 2 * _MATMULS * _ONE),
    "chained": (chained, _VECTORS, 3 * BATCH * 2 * SIDE * SIDE),
    # n³ / 3, rounded down, and two solves of n².
    "solved": (solved, _VECTORS, BATCH * (SIDE**3 // 3 + 2 * SIDE**2)),
    # LU, rounded down, and two triangular solves of n² forward and backward.
    "implicit": (implicit, (_of(WIDTH, WIDTH), _of(WIDTH)), 2 * WIDTH**3 // 3 + 4 * WIDTH**2),
    "rotated": (rotated, _ARGUMENTS, sum(ROTATED) * _ONE),
}
PLATFORMS = ("v5e",)
