"""Textbook FLOPs of factorisations, triangular solves and Fourier transforms.

n³-order counts are from Golub and Van Loan, Matrix Computations (4th ed.), and LAPACK Working Note
41; lower orders are dropped. A library may do more or less. Counts with thirds are rounded down
once per matrix, so that each is an int. A complex matrix takes four times as many: a complex
multiply-add is four real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mfu_jax.flops.traced.rules import batch_of, register_rule

_MatrixRule = Callable[[Any, int, int], int]


def _of_matrices(*primitives: str) -> Callable[[_MatrixRule], _MatrixRule]:
    """Registers the count of one real matrix, given the equation, its long and its short side.

    The first operand says how many there are, and whether they are complex.
    """

    def register(rule: _MatrixRule) -> _MatrixRule:
        @register_rule(*primitives)
        def of_all(eqn: Any) -> int:
            shape = eqn.invars[0].aval.shape
            times = batch_of(shape) * _real_products(eqn)
            return times * rule(eqn, max(shape[-2:]), min(shape[-2:]))

        return rule

    return register


def _real_products(eqn: Any) -> int:
    return 4 if _is_complex(eqn.invars[0]) else 1


# Of a square matrix of n rows.
_OF_ROWS: dict[str, Callable[[int], int]] = {
    "cholesky": lambda n: n**3 // 3,
    "eigh": lambda n: 9 * n**3,  # the symmetric QR algorithm with eigenvectors
    "hessenberg": lambda n: 10 * n**3 // 3,
    "schur": lambda n: 25 * n**3,  # with the Schur vectors
    "tridiagonal": lambda n: 4 * n**3 // 3,
}


@_of_matrices(*_OF_ROWS)
def of_a_square_matrix(eqn: Any, m: int, n: int) -> int:
    """The count in `_OF_ROWS`."""
    return _OF_ROWS[eqn.primitive.name](n)


@_of_matrices("triangular_solve")
def triangular_solve(eqn: Any, m: int, n: int) -> int:
    """n² for each right-hand side."""
    return n * math.prod(eqn.invars[1].aval.shape[-2:])


@_of_matrices("lu")
def lu(eqn: Any, m: int, n: int) -> int:
    """m·n² − n³/3, which is 2n³/3 for a square matrix."""
    return m * n**2 - -(-(n**3) // 3)


@_of_matrices("geqrf", "geqp3")
def geqrf(eqn: Any, m: int, n: int) -> int:
    """2·m·n² − 2n³/3: R, and the reflectors that make up Q."""
    return 2 * m * n**2 - -(-2 * n**3 // 3)


@_of_matrices("qr")
def qr_with_q(eqn: Any, m: int, n: int) -> int:
    """R and the thin or full Q, counted like `householder_product`."""
    rows = eqn.invars[0].aval.shape[-2]
    columns = rows if eqn.params["full_matrices"] else n
    return geqrf(eqn, m, n) + _form_q(rows, columns, n)


@_of_matrices("householder_product")
def householder_product(eqn: Any, m: int, n: int) -> int:
    """4·m·n·k − 2·(m + n)·k² + 4k³/3: Q [m, n] from k reflectors."""
    return _form_q(m, n, eqn.invars[1].aval.shape[-1])


def _form_q(m: int, n: int, k: int) -> int:
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 // 3


@_of_matrices("ormqr")
def multiply_by_q(eqn: Any, *_: int) -> int:
    """4·m·n·k − 2·n·k²: k reflectors of length m applied to the n columns of a matrix."""
    k = eqn.invars[1].aval.shape[-1]
    shape = eqn.invars[2].aval.shape
    m, n = shape[-2:] if eqn.params.get("left", True) else shape[:-3:-1]
    return int(4 * m * n * k - 2 * n * k**2)


@_of_matrices("eig")
def eig(eqn: Any, m: int, n: int) -> int:
    """25n³ with eigenvectors, 10n³ for eigenvalues only."""
    return (25 if len(eqn.outvars) > 1 else 10) * n**3


@register_rule("tridiagonal_solve")
def tridiagonal_solve(eqn: Any) -> int:
    """8 per element of the right-hand sides (Thomas algorithm)."""
    return _real_products(eqn) * 8 * math.prod(eqn.invars[3].aval.shape)


@_of_matrices("svd")
def svd(eqn: Any, m: int, n: int) -> int:
    """Golub and Reinsch: 4mn² − 4n³/3 for singular values only, 14mn² + 8n³ with thin factors,
    4m²n + 8mn² + 9n³ with full ones."""
    if not eqn.params["compute_uv"]:
        return 4 * m * n**2 - -(-4 * n**3 // 3)
    if eqn.params["full_matrices"]:
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


@_of_matrices("symmetric_product")
def symmetric_product(eqn: Any, *_: int) -> int:
    """alpha·A·Aᵀ + beta·C, all entries: 2·n²·k."""
    n, k = eqn.invars[0].aval.shape[-2:]
    return int(2 * n**2 * k)


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
