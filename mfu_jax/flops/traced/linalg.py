"""Textbook FLOPs of factorisations, triangular solves and Fourier transforms.

n³-order counts are from Golub and Van Loan, Matrix Computations (4th ed.), and LAPACK Working Note
41; lower orders are dropped. A library may do more or less. Counts with thirds are rounded down
once per matrix, so that each is an int. A complex matrix takes four times as many: a complex
multiply-add is four real ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from mfu_jax.flops.traced.rules import FlopRule, batch_of, register_rule


def _of_matrices(*primitives: str) -> Callable[[FlopRule], FlopRule]:
    """Registers the count for a real matrix; the first operand says whether it is complex."""

    def register(rule: FlopRule) -> FlopRule:
        @register_rule(*primitives)
        @functools.wraps(rule)
        def of_any_matrix(eqn: Any) -> int:
            return (4 if _is_complex(eqn.invars[0]) else 1) * rule(eqn)

        return rule

    return register


def _matrices(eqn: Any) -> tuple[int, int, int]:
    """The number of matrices in the first operand, their long side and their short side."""
    shape = eqn.invars[0].aval.shape
    return batch_of(shape), max(shape[-2:]), min(shape[-2:])


# Of a square matrix of n rows.
_OF_ROWS: dict[str, Callable[[int], int]] = {
    "cholesky": lambda n: n**3 // 3,
    "eigh": lambda n: 9 * n**3,  # the symmetric QR algorithm with eigenvectors
    "hessenberg": lambda n: 10 * n**3 // 3,
    "schur": lambda n: 25 * n**3,  # with the Schur vectors
    "tridiagonal": lambda n: 4 * n**3 // 3,
}


@_of_matrices(*_OF_ROWS)
def of_a_square_matrix(eqn: Any) -> int:
    """The count in `_OF_ROWS`."""
    batch, n, _ = _matrices(eqn)
    return batch * _OF_ROWS[eqn.primitive.name](n)


@_of_matrices("triangular_solve")
def triangular_solve(eqn: Any) -> int:
    """n² for each right-hand side."""
    n = eqn.invars[0].aval.shape[-1]
    return n * math.prod(eqn.invars[1].aval.shape)


@_of_matrices("lu")
def lu(eqn: Any) -> int:
    """m·n² − n³/3, which is 2n³/3 for a square matrix."""
    batch, m, n = _matrices(eqn)
    return batch * (m * n**2 - -(-(n**3) // 3))


@_of_matrices("geqrf", "geqp3")
def geqrf(eqn: Any) -> int:
    """2·m·n² − 2n³/3: R, and the reflectors that make up Q."""
    batch, m, n = _matrices(eqn)
    return batch * (2 * m * n**2 - -(-2 * n**3 // 3))


@_of_matrices("qr")
def qr_with_q(eqn: Any) -> int:
    """R and the thin or full Q, counted like `householder_product`."""
    batch, _, n = _matrices(eqn)
    rows = eqn.invars[0].aval.shape[-2]
    columns = rows if eqn.params["full_matrices"] else min(rows, n)
    return geqrf(eqn) + batch * _form_q(rows, columns, n)


@_of_matrices("householder_product")
def householder_product(eqn: Any) -> int:
    """4·m·n·k − 2·(m + n)·k² + 4k³/3: Q [m, n] from k reflectors."""
    shape = eqn.invars[0].aval.shape
    m, n = shape[-2:]
    k = eqn.invars[1].aval.shape[-1]
    return batch_of(shape) * _form_q(m, n, k)


def _form_q(m: int, n: int, k: int) -> int:
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 // 3


@_of_matrices("ormqr")
def multiply_by_q(eqn: Any) -> int:
    """4·m·n·k − 2·n·k²: k reflectors of length m applied to the n columns of a matrix."""
    k = eqn.invars[1].aval.shape[-1]
    shape = eqn.invars[2].aval.shape
    m, n = shape[-2:] if eqn.params.get("left", True) else shape[:-3:-1]
    return batch_of(shape) * (4 * m * n * k - 2 * n * k**2)


@_of_matrices("eig")
def eig(eqn: Any) -> int:
    """25n³ with eigenvectors, 10n³ for eigenvalues only."""
    batch, n, _ = _matrices(eqn)
    return batch * (25 if len(eqn.outvars) > 1 else 10) * n**3


@_of_matrices("tridiagonal_solve")
def tridiagonal_solve(eqn: Any) -> int:
    """8 per element of the right-hand sides (Thomas algorithm)."""
    return 8 * math.prod(eqn.invars[3].aval.shape)


@_of_matrices("svd")
def svd(eqn: Any) -> int:
    """Golub and Reinsch: 4mn² − 4n³/3 for singular values only, 14mn² + 8n³ with thin factors,
    4m²n + 8mn² + 9n³ with full ones."""
    batch, m, n = _matrices(eqn)
    if not eqn.params["compute_uv"]:
        return batch * (4 * m * n**2 - -(-4 * n**3 // 3))
    if eqn.params["full_matrices"]:
        return batch * (4 * m**2 * n + 8 * m * n**2 + 9 * n**3)
    return batch * (14 * m * n**2 + 8 * n**3)


@_of_matrices("symmetric_product")
def symmetric_product(eqn: Any) -> int:
    """alpha·A·Aᵀ + beta·C, all entries: 2·n²·k."""
    shape = eqn.invars[0].aval.shape
    return 2 * math.prod(shape) * shape[-2]


@register_rule("fft")
def fft(eqn: Any) -> int:
    """5·N·log₂N for a complex transform of N points, half that for a real one (rounded)."""
    sizes = [int(size) for size in eqn.params["fft_lengths"]]
    points = math.prod(sizes)
    signal = (eqn.invars[0] if _is_complex(eqn.outvars[0]) else eqn.outvars[0]).aval
    transforms = math.prod(signal.shape) // points
    is_real = not (_is_complex(eqn.invars[0]) and _is_complex(eqn.outvars[0]))
    return transforms * round((2.5 if is_real else 5) * points * math.log2(points))


def _is_complex(variable: Any) -> bool:
    return bool(variable.aval.dtype.kind == "c")
