"""FLOPs of the HLO instructions that factorise, solve or transform, by textbook formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

from mfu_jax.flops.executed.formulas import textbook
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape


def _side(instruction: HloInstruction, shape: Shape) -> int:
    if len(shape.dims) < 2:
        raise instruction.error(f"operand {shape} that is no matrix")
    return shape.dims[-1]


def _cholesky(computation: HloComputation, instruction: HloInstruction) -> int:
    shape = computation.operand(instruction, 0).shape
    return math.prod(shape.dims[:-2]) * textbook.cholesky(_side(instruction, shape))


def _triangular_solve(computation: HloComputation, instruction: HloInstruction) -> int:
    n = _side(instruction, computation.operand(instruction, 0).shape)
    return textbook.triangular_solve(n, computation.operand(instruction, 1).shape.size // max(1, n))


def _fft(computation: HloComputation, instruction: HloInstruction) -> int:
    """Per signal: the longer side of a real transform has all its points."""
    points = math.prod(instruction.integers("fft_length"))
    operand, result = computation.operand(instruction, 0).shape, instruction.shape
    is_real = not (operand.dtype.startswith("c") and result.dtype.startswith("c"))
    signal = operand if not operand.dtype.startswith("c") else result
    return signal.size // max(1, points) * textbook.fft(max(1, points), is_real=is_real)


FACTORIZATIONS: dict[str, Callable[[HloComputation, HloInstruction], int]] = {
    "cholesky": _cholesky,
    "triangular-solve": _triangular_solve,
    "fft": _fft,
}
