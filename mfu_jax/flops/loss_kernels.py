"""Fused kernels of a linear layer and its cross entropy: the facts that both counts need.

Such a kernel never writes the logits, so its backward pass recomputes them. It works in blocks,
which may extend beyond its matrices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class LossKernel:
    """One kernel, forward or backward.

    Attributes:
        name: pattern to search for in its name, in a jaxpr or in HLO.
        products: matmuls of tokens × width × vocabulary that it runs.
        recomputed: those that another kernel has already run.
    """

    name: str
    products: int
    recomputed: int = 0

    @property
    def share_recomputed(self) -> Fraction:
        """The recomputed share of its FLOPs."""
        return Fraction(self.recomputed, self.products)


KERNELS = (
    LossKernel(  # tokamax
        name=r"^linear_softmax_cross_entropy_loss_(fwd|forward)_pallas", products=1
    ),
    LossKernel(  # logits again, then the gradients of both operands
        name=r"^linear_softmax_cross_entropy_loss_(bwd|backward)_pallas", products=3, recomputed=1
    ),
)


def loss_kernel(name: str) -> LossKernel | None:
    """The row matching a kernel's name, if any."""
    return next((kernel for kernel in KERNELS if re.search(kernel.name, name)), None)


def product_flops(shapes: Sequence[Sequence[int]]) -> int | None:
    """FLOPs of one product of the first two matrices, [tokens, width] · [width, vocabulary].

    >>> product_flops([(1,), (8, 4), (8,), (4, 16)])
    1024
    """
    matrices = [shape for shape in shapes if len(shape) == 2][:2]
    if len(matrices) < 2 or matrices[0][1] != matrices[1][0]:
        return None
    (tokens, width), (_, vocabulary) = matrices
    return 2 * tokens * width * vocabulary
