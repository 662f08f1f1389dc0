"""Moves rows to other places; gradients are gathers, too, because TPUs scatter row by row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def moved(
    copies: int, drops: bool, rows: jax.Array, places: jax.Array, back: jax.Array
) -> jax.Array:
    """`copies` copies of each row in another order; copy c of row r has number ``rows · c + r``.

    With this numbering, the copies of a row lie far apart, and their sum adds whole matrices;
    TPUs would pad each few neighbouring copies to a tile.

    Args:
        copies: of each row.
        drops: whether numbers may be past the last. If not, all places are filled and all copies
            placed, and nothing is masked: a mask reads and writes all rows once more.
        rows: [rows, width].
        places: the copy for each place, [places]; a number past the last: zeros.
        back: the place of each copy, [rows · copies]; a number past the last: none.

    Returns:
        [places, width].
    """
    count = rows.shape[0]
    if not drops:
        return _taken(rows, places % count, drops)
    return _taken(rows, jnp.where(places < count * copies, places % count, count), drops)


def _forward(
    copies: int, drops: bool, rows: jax.Array, places: jax.Array, back: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return moved(copies, drops, rows, places, back), back


def _backward(
    copies: int, drops: bool, back: jax.Array, dy: jax.Array
) -> tuple[jax.Array, None, None]:
    return sum_of_copies(copies, _taken(dy, back, drops)), None, None


moved.defvjp(_forward, _backward)


def sum_of_copies(copies: int, rows: jax.Array) -> jax.Array:
    """The sum of each row's copies, numbered as in `moved`, in float32.

    Unrolled: for a reduction over few rows, TPUs would change the layout.

    Args:
        rows: [copies · rows, width].

    Returns:
        [rows, width], in the dtype of `rows`.
    """
    parts = (part.astype(jnp.float32) for part in jnp.split(rows, copies))
    return functools.reduce(jnp.add, parts).astype(rows.dtype)


def _taken(rows: jax.Array, places: jax.Array, drops: bool) -> jax.Array:
    if drops:
        return rows.at[places].get(mode="fill", fill_value=0)
    return rows.at[places].get(mode="promise_in_bounds")
