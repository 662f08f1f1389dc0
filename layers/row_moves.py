"""Rows moved to other places, whose gradients are gathered, too: TPUs scatter row by row."""

from __future__ import annotations

import functools

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def moved(copies: int, rows: jax.Array, places: jax.Array, back: jax.Array) -> jax.Array:
    """Each row as often as it has copies, in another order: copy c of row r is ``copies · r + c``.

    Args:
        copies: of each row.
        rows: [rows, width].
        places: the copy that each place gets, [places]; a number beyond the last: zeros.
        back: the place that each copy got, [rows · copies]; a number beyond the last: none.

    Returns:
        [places, width].
    """
    return _taken(rows, places // copies)


def _forward(
    copies: int, rows: jax.Array, places: jax.Array, back: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _taken(rows, places // copies), back


def _backward(copies: int, back: jax.Array, dy: jax.Array) -> tuple[jax.Array, None, None]:
    of_copies = _taken(dy, back)
    return of_copies.reshape(-1, copies, dy.shape[-1]).sum(axis=1), None, None


moved.defvjp(_forward, _backward)


def _taken(rows: jax.Array, places: jax.Array) -> jax.Array:
    return rows.at[places].get(mode="fill", fill_value=0)
