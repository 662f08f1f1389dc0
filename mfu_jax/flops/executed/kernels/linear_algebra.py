"""Linear algebra: LAPACK's calls on CPUs, cuBLAS's and cuSOLVER's on GPUs.

Factorisations and solves are counted by textbook formulas, once per matrix, whatever the library
does inside.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

from mfu_jax.flops.executed.formulas import textbook
from mfu_jax.flops.executed.formulas.matmuls import LIBRARY_DOTS, dot_flops, operand_dtype
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.kernels.registry import KernelCall, KernelCost, register_kernel

_Rule = Callable[[KernelCall], int]


@register_kernel(*LIBRARY_DOTS)
def _cublas(call: KernelCall) -> KernelCost:
    """cuBLAS and cuBLASLt matmuls, FP8 included: 2 · result elements · contracted elements."""
    flops = dot_flops(call.computation, call.instruction)
    dtype = operand_dtype(call.computation, call.instruction)  # FP8 calls also have f32 scales
    return KernelCost(flops=flops, dtype=dtype, seen_by_xla=flops)


def _targets(lapack: str, *others: str) -> list[str]:
    """LAPACK's routines for every dtype, and other targets.

    Args:
        lapack: names without the dtype's letter, such as ``potrf``.
        others: whole targets.
    """
    names = [f"lapack_{dtype}{name}_ffi" for name in lapack.split() for dtype in "sdcz"]
    return [*names, *others]


def _register(*targets: str) -> Callable[[_Rule], _Rule]:
    """Registers the count for a real matrix; the first operand says whether it is complex."""

    def register(rule: _Rule) -> _Rule:
        @register_kernel(*targets)
        def of_any_matrix(call: KernelCall) -> int:
            return textbook.real_products(call.operand(0).dtype) * rule(call)

        return rule

    return register


def _matrix(call: KernelCall, operand: int = 0) -> tuple[int, int, int]:
    """How many matrices an operand holds, and their rows and columns."""
    shape = call.operand(operand)
    if len(shape.dims) < 2:
        raise call.instruction.error(f"operand {shape} that is no matrix")
    return _batch(shape), shape.dims[-2], shape.dims[-1]


def _batch(shape: Shape) -> int:
    return math.prod(shape.dims[:-2])


# Formulas in the side of a square matrix, or in rows and columns, and what they count.
_OF_SIDE: dict[Callable[[int], int], list[str]] = {
    textbook.cholesky: _targets("potrf", "cusolver_potrf_ffi", "cusolver_potrf_batched_ffi"),
    textbook.symmetric_eigenvectors: _targets(
        "syevd heevd", "cusolver_syevd_ffi", "cusolver_syevj_ffi", "cusolver_syev_batched_ffi"
    ),
    textbook.eigenvectors: _targets("gees"),  # a Schur form
    textbook.hessenberg: _targets("gehrd"),
    textbook.tridiagonal: _targets("sytrd hetrd", "cusolver_sytrd_ffi"),
}
_OF_SIDES: dict[Callable[[int, int], int], list[str]] = {
    textbook.lu: _targets("getrf", "cusolver_getrf_ffi", "cublas_getrf_batched_ffi"),
    textbook.qr: _targets("geqrf geqp3", "cusolver_geqrf_ffi", "cublas_geqrf_batched_ffi"),
}


def _of_side(count: Callable[[int], int], call: KernelCall) -> int:
    batch, n, _ = _matrix(call)
    return batch * count(n)


def _of_sides(count: Callable[[int, int], int], call: KernelCall) -> int:
    batch, rows, columns = _matrix(call)
    return batch * count(rows, columns)


for _count, _names in _OF_SIDE.items():
    _register(*_names)(functools.partial(_of_side, _count))
for _formula, _names in _OF_SIDES.items():
    _register(*_names)(functools.partial(_of_sides, _formula))


@_register(*_targets("trsm", "__cublas$triangularSolve", "cublas_trsm_batched_ffi"))
def _triangular_solve(call: KernelCall) -> int:
    batch, n, _ = _matrix(call)
    return batch * textbook.triangular_solve(n, call.operand(1).size // max(1, batch * n))


@_register(*_targets("orgqr ungqr", "cusolver_orgqr_ffi"))
def _form_q(call: KernelCall) -> int:
    batch, rows, columns = _matrix(call)
    return batch * textbook.form_q(rows, columns, call.operand(1).dims[-1])


@_register(*_targets("ormqr unmqr", "cusolver_ormqr_ffi"))
def _apply_q(call: KernelCall) -> int:
    _, length, reflectors = _matrix(call)  # one column per reflector
    batch, rows, columns = _matrix(call, 2)
    vectors = rows * columns // max(1, length)
    return batch * textbook.apply_q(length, vectors, min(reflectors, call.operand(1).dims[-1]))


@_register(*_targets("geev", "cusolver_geev_ffi"))
def _eigenvectors(call: KernelCall) -> int:
    batch, n, _ = _matrix(call)
    wanted = re.search(
        r"compute_(?:left|right) = 86", call.instruction.attribute_text
    )  # LAPACK's 'V'
    return batch * textbook.eigenvectors(n, values_only=wanted is None)


@_register(*_targets("gtsv", "cusparse_gtsv2_ffi"))
def _tridiagonal_solve(call: KernelCall) -> int:
    """8 per element of the right-hand sides (Thomas algorithm)."""
    return 8 * call.operand(3).size


@_register(
    *_targets(
        "gesdd gesvd",
        *(f"cusolver_{name}_ffi" for name in ("gesvd", "gesvdj", "gesvdp", "gesvdj_batched")),
    )
)
def _svd(call: KernelCall) -> int:
    batch, rows, columns = _matrix(call)
    text = call.instruction.attributes.get("backend_config", "")
    # LAPACK's mode is the letter N, S or A; cuSOLVER's wrapper has flags.
    values_only = "mode = 78" in text or "compute_uv = false" in text
    full = "mode = 65" in text or "full_matrices = true" in text
    return batch * textbook.svd(rows, columns, values_only=values_only, full=full)


@register_kernel("cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation")
def _permutation(call: KernelCall) -> int:
    """Integers only."""
    return 0
