"""Optimizers with factorisations, and a solve: programs that count by the textbook everywhere.

Each entry of `PROGRAMS`: the function, the shapes of its arguments, its FLOPs by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

ROWS, COLUMNS = 64, 128


def _of(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def shampoo(w: jax.Array, left: jax.Array, right: jax.Array, gradient: jax.Array) -> Any:
    """Inverse fourth roots of both statistics, by their eigenvectors (Gupta et al. 2018)."""

    def root(statistic: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(statistic)
        return (vectors * values**-0.25) @ vectors.T

    left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
    return w - root(left) @ gradient @ root(right), left, right


def soap(w: jax.Array, left: jax.Array, basis: jax.Array, gradient: jax.Array) -> Any:
    """One step of subspace iteration, and Adam's update in its basis (Vyas et al. 2024)."""
    left = left + gradient @ gradient.T
    basis, _ = jnp.linalg.qr(left @ basis)
    rotated = basis.T @ gradient
    return w - basis @ (rotated / (jnp.abs(rotated) + 1e-8)), left, basis


def newton(w: jax.Array, hessian: jax.Array, gradient: jax.Array) -> jax.Array:
    """A Newton step: a Cholesky factorisation and two triangular solves, in blocks of 128."""
    return w - cho_solve((jnp.linalg.cholesky(hessian), True), gradient)


def solves(
    upper: jax.Array, b: jax.Array, factor: jax.Array, c: jax.Array, lower: jax.Array
) -> Any:
    """Solves in blocks of 128, of which one is smaller: from the end, both ways, of one row."""
    with jax.named_scope("start"):
        from_start = solve_triangular(lower, b[:129], lower=True)
    return solve_triangular(upper, b), cho_solve((factor, True), c), from_start


SIDE = 256
_M, _N = ROWS, COLUMNS
_STATISTICS = 2 * _M * _M * _N + 2 * _N * _N * _M
_ROOTS = 9 * (_M**3 + _N**3) + 2 * _M**3 + 2 * _N**3
SHAMPOO_FLOPS = _STATISTICS + _ROOTS + 2 * _M * _M * _N + 2 * _M * _N * _N
# R and reflectors 4m³/3, the same again for Q; each rounded down to a whole number.
_QR = 2 * (4 * _M**3 // 3)
SOAP_FLOPS = 2 * _M * _M * _N + 2 * _M**3 + _QR + 2 * (2 * _M * _M * _N)
NEWTON_FLOPS = SIDE**3 // 3 + 2 * SIDE**2 * COLUMNS

_GRADIENT, _LEFT, _RIGHT = _of(_M, _N), _of(_M, _M), _of(_N, _N)
PROGRAMS = {
    "shampoo": (shampoo, (_GRADIENT, _LEFT, _RIGHT, _GRADIENT), SHAMPOO_FLOPS),
    "soap": (soap, (_GRADIENT, _LEFT, _LEFT, _GRADIENT), SOAP_FLOPS),
    "solves": (
        solves,
        (_of(150, 150), _of(150, 8), _of(130, 130), _of(130, 48), _of(129, 129)),
        150**2 * 8 + 2 * 130**2 * 48 + 129**2 * 8,
    ),
    "newton": (newton, (_of(SIDE, _N), _of(SIDE, SIDE), _of(SIDE, _N)), NEWTON_FLOPS),
}
PLATFORMS = ("cpu", "v5e", "tpu7x", "h100")
