"""Fourier transforms, which are HLO instructions, and decompositions that are loops, by textbook.

The loops are decompositions that a TPU program iterates until they converge: `svd`, `eigh` beyond
256 rows. The number of iterations depends on data. As everywhere else, each decomposition is
counted by a textbook formula, at its outermost loop; this includes matmuls and blocks inside. JAX
writes them as separate functions, whose names appear in every op_name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mfu_jax.flops.executed.cost_types import MatmulCost
from mfu_jax.flops.executed.formulas import textbook
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.shapes import Shape

_EIGH = "jit(_eigh_work)"
_SVD = "jit(_svd_tall_and_square_input)"  # part of svd


def fft_flops(computation: HloComputation, instruction: HloInstruction) -> int:
    """Per signal: the longer side of a real transform has all its points."""
    points = math.prod(instruction.integers("fft_length"))
    operand, result = computation.operand(instruction, 0).shape, instruction.shape
    is_real = not (operand.dtype.startswith("c") and result.dtype.startswith("c"))
    signal = operand if not operand.dtype.startswith("c") else result
    return signal.size // max(1, points) * textbook.fft(max(1, points), is_real=is_real)


class Iterations:
    """Finds the decompositions of a program that iterate.

    Attributes:
        any: whether there are any.
    """

    def __init__(self, module: HloModule) -> None:
        self._outermost: Mapping[int, MatmulCost] = {}
        loops = [loop for _, loop in module.with_opcode("while") if _marked(loop)]
        names = {_function(loop.op_name) for loop in loops}
        nested = {a for a in names for b in names if a.startswith(f"{b}/")}
        found = {
            id(loop): (loop.op_name.removesuffix("/while"), _iterated(loop))
            for _, loop in module.with_opcode("while")
            if loops and loop.op_name.removesuffix("/while") in names - nested
        }
        self._outermost = {n: iterated for n, (_, iterated) in found.items() if iterated}
        counted = {name for name, iterated in found.values() if iterated}
        unknown = {name for name, iterated in found.values() if not iterated}
        self._inside = tuple(f"{name}/" for name in counted - unknown)
        self.any = bool(self._inside)

    def contains(self, instruction: HloInstruction) -> bool:
        """Whether an instruction is part of such a decomposition."""
        return self.any and instruction.op_name.startswith(self._inside)

    def at(self, loop: HloInstruction) -> MatmulCost | None:
        """The FLOPs of the decomposition of which a ``while`` is the outermost loop."""
        return self._outermost.get(id(loop)) if self.contains(loop) else None


def _marked(loop: HloInstruction) -> bool:
    return _EIGH in loop.attribute_text or _SVD in loop.attribute_text


def _function(op_name: str) -> str:
    """The name stack of the decomposition that an operation belongs to."""
    parts = op_name.split("/")
    for i, part in enumerate(parts):
        if part in (_EIGH, _SVD):
            return "/".join(parts[: i + (part == _EIGH)])
    return op_name


def _iterated(loop: HloInstruction) -> MatmulCost | None:
    """Read from the arrays in the outermost loop's state; None if they do not give the sizes."""
    arrays = [shape for shape in loop.shape.leaves() if shape.dtype[0] in "fbc"]
    rank = max((len(shape.dims) for shape in arrays), default=0)
    matrices = [shape for shape in arrays if len(shape.dims) == rank]
    if rank < 2:
        return None
    largest, smallest = (of(matrices, key=lambda shape: shape.size) for of in (max, min))
    is_eigh = _EIGH in loop.op_name.split("/")
    flops = _eigh(largest) if is_eigh else _svd(arrays, largest, smallest)
    if flops is None:
        return None
    flops *= textbook.real_products(largest.dtype)
    return MatmulCost(loop, flops, largest.dtype, kernel="eigh" if is_eigh else "svd")


def _eigh(matrix: Shape) -> int | None:
    *batch, rows, columns = matrix.dims
    if rows != columns:
        return None
    return math.prod(batch) * textbook.symmetric_eigenvectors(rows)


def _svd(arrays: list[Shape], largest: Shape, smallest: Shape) -> int | None:
    """The state has U [m, n], or [m, m] if it is full, the values [n], and V [n, n]."""
    *batch, n, columns = smallest.dims
    *_, m, width = largest.dims
    values = {shape.dims[-1] for shape in arrays if len(shape.dims) == len(batch) + 1}
    if n != columns or values != {n} or width not in (m, n):
        return None
    return math.prod(batch) * textbook.svd(m, n, values_only=False, full=width == m != n)
