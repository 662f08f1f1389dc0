"""Rows in groups, each group times its own matrix: dropless experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

# Attention kernels that are chosen on TPUs only, so that these run there, too.
_OF_TPUS = ("flash", "splash")
_TILE = 512  # rows and columns at most of a block of the kernel


def runs_on_tpus(attention: str) -> bool:
    """Whether a model with this attention runs on TPUs."""
    return attention in _OF_TPUS


def grouped_dot(
    rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, on_tpu: bool, interpret: bool = False
) -> jax.Array:
    """``ragged_dot``; on TPUs, with a kernel for the gradient of the matrices.

    XLA has a kernel for the product and for the gradient of the rows there, but computes that of
    the matrices as if every row were in every group.

    Args:
        rows: [rows, in], sorted by group.
        kernels: [groups, in, out].
        sizes: rows of each group.
        on_tpu: whether the program is for TPUs.
        interpret: whether the kernel runs without a TPU.

    Returns:
        [rows, out]; rows beyond the groups are 0.
    """
    if not on_tpu or not _tile(rows.shape[0]):
        return jax.lax.ragged_dot(rows, kernels, sizes)
    return _grouped_dot(interpret, rows, kernels, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(
    interpret: bool, rows: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> jax.Array:
    return jax.lax.ragged_dot(rows, kernels, sizes)


_Saved = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    interpret: bool, rows: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _grouped_dot(interpret, rows, kernels, sizes), (rows, kernels, sizes)


def _backward(interpret: bool, saved: _Saved, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, sizes = saved
    drows = jax.lax.ragged_dot(dy, kernels.swapaxes(1, 2), sizes)
    dkernels = gradient_of_matrices(rows, dy, sizes, kernels.dtype, interpret=interpret)
    return drows, dkernels, None


_grouped_dot.defvjp(_forward, _backward)


def gradient_of_matrices(
    rows: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: jnp.dtype, *, interpret: bool = False
) -> jax.Array:
    """Rows [rows, in] and dy [rows, out] in groups → [groups, in, out] in `dtype`; on TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiling = (_tile(rows.shape[0]), _TILE, _TILE)
    return tgmm(rows.swapaxes(0, 1), dy, sizes, dtype, tiling, interpret=interpret)


def has_tiles(rows: int) -> bool:
    """Whether the kernel can split so many rows."""
    return _tile(rows) > 0


def _tile(rows: int) -> int:
    """Rows of a block, which have to divide all rows; 0 if the kernel cannot split them."""
    return next((tile for tile in (_TILE, 256, 128) if rows % tile == 0), 0)
