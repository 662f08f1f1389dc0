"""Rows moved to other places, whose gradients are gathered, too: TPUs scatter row by row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def moved(copies: int, rows: jax.Array, places: jax.Array, back: jax.Array) -> jax.Array:
    """Each row as often as it has copies, in another order: copy c of row r is ``rows · c + r``.

    So the copies of a row lie far apart, and their sum adds whole matrices; of neighbours, TPUs
    would fill up each few to a tile.

    Args:
        copies: of each row.
        rows: [rows, width].
        places: the copy that each place gets, [places]; a number beyond the last: zeros.
        back: the place that each copy got, [rows · copies]; a number beyond the last: none.

    Returns:
        [places, width].
    """
    return _taken(rows, _row_of(places, rows.shape[0], copies))


def _forward(
    copies: int, rows: jax.Array, places: jax.Array, back: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return moved(copies, rows, places, back), back


def _backward(copies: int, back: jax.Array, dy: jax.Array) -> tuple[jax.Array, None, None]:
    return sum_of_copies(copies, _taken(dy, back)), None, None


moved.defvjp(_forward, _backward)


def sum_of_copies(copies: int, rows: jax.Array) -> jax.Array:
    """The sum of each row's copies, ordered as `moved` counts them, in float32.

    Written out: of a reduction over few, TPUs lay the rows out anew.

    Args:
        rows: [copies · rows, width].

    Returns:
        [rows, width], in the dtype of `rows`.
    """
    parts = (part.astype(jnp.float32) for part in jnp.split(rows, copies))
    return functools.reduce(jnp.add, parts).astype(rows.dtype)


def _row_of(places: jax.Array, rows: int, copies: int) -> jax.Array:
    return jnp.where(places < rows * copies, places % rows, rows)


def _taken(rows: jax.Array, places: jax.Array) -> jax.Array:
    return rows.at[places].get(mode="fill", fill_value=0)
