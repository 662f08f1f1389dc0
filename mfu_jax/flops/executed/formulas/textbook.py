"""Textbook FLOPs of factorisations, solves and Fourier transforms of one matrix or signal.

Golub and Van Loan, Matrix Computations (4th ed.): LU 3.2.4, Cholesky 4.2.5, QR 5.2.2 (its Q 5.1.6),
Hessenberg 7.4.3, Schur 7.5.6, tridiagonal 8.3.1, symmetric QR 8.3.3, SVD 8.6.3. FFT: Cooley and
Tukey's 5·N·log₂N. Lower-order terms are dropped, thirds are rounded down. This is not what a
library runs, but how every program is counted, so that a step's counts agree on all platforms.
The counts of matrices are of real ones: times `real_products` for a complex matrix.

Adding one: here and in `traced.linalg`, which shares no code; a library call in
`kernels.linear_algebra`, TPU blocks in `formulas.tpu_factorizations`, HLO instructions and TPU
loops in `formulas.factorizations`.
"""

from __future__ import annotations

import math


def real_products(dtype: str) -> int:
    """Real multiply-adds in one of this dtype: 4 of complex numbers."""
    return 4 if dtype.startswith("c") else 1


def cholesky(n: int) -> int:
    """n³/3."""
    return n**3 // 3


def lu(rows: int, columns: int) -> int:
    """m·n² − n³/3 for the long side m and the short side n."""
    m, n = max(rows, columns), min(rows, columns)
    return (3 * m * n**2 - n**3) // 3


def qr(rows: int, columns: int) -> int:
    """2·m·n² − 2n³/3: R and the reflectors."""
    m, n = max(rows, columns), min(rows, columns)
    return (6 * m * n**2 - 2 * n**3) // 3


def form_q(rows: int, columns: int, reflectors: int) -> int:
    """4·m·n·k − 2·(m + n)·k² + 4k³/3: Q [m, n] from k reflectors."""
    m, n, k = rows, columns, reflectors
    return (12 * m * n * k - 6 * (m + n) * k**2 + 4 * k**3) // 3


def apply_q(length: int, vectors: int, reflectors: int) -> int:
    """4·m·n·k − 2·n·k²: k reflectors of length m, applied to n vectors."""
    return 4 * length * vectors * reflectors - 2 * vectors * reflectors**2


def triangular_solve(n: int, right_hand_sides: int) -> int:
    """n² for each right-hand side."""
    return n**2 * right_hand_sides


def symmetric_eigenvectors(n: int) -> int:
    """9n³."""
    return 9 * n**3


def eigenvectors(n: int, *, values_only: bool = False) -> int:
    """25n³; 10n³ for the eigenvalues alone."""
    return (10 if values_only else 25) * n**3


def hessenberg(n: int) -> int:
    """10n³/3."""
    return 10 * n**3 // 3


def tridiagonal(n: int) -> int:
    """4n³/3."""
    return 4 * n**3 // 3


def svd(rows: int, columns: int, *, values_only: bool, full: bool) -> int:
    """4mn² − 4n³/3 for the values, 14mn² + 8n³ thin, 4m²n + 8mn² + 9n³ with full factors."""
    m, n = max(rows, columns), min(rows, columns)
    if values_only:
        return (12 * m * n**2 - 4 * n**3) // 3
    if full:
        return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return 14 * m * n**2 + 8 * n**3


def fft(points: int, *, is_real: bool) -> int:
    """5·N·log₂N; half of it if one side is real. Rounded."""
    return round((2.5 if is_real else 5) * points * math.log2(points))
