"""Triton kernels (Pallas for GPUs), whose body is a binary form of MLIR that is not parsed."""

from __future__ import annotations

from fractions import Fraction

from mfu_jax.flops.attention_kernels import kernels_named
from mfu_jax.flops.executed.kernels.registry import TRITON, KernelCall, UnknownCost, register_kernel


@register_kernel(TRITON)
def _triton(call: KernelCall) -> UnknownCost:
    """A Pallas kernel for GPUs, whose body is a binary form of MLIR that is not parsed."""
    shares = [kernel.share_recomputed for kernel in kernels_named(call.name)]
    return UnknownCost(
        reason="a Triton kernel tells nothing of it",
        dtype=next(
            (shape.dtype for shape in call.operands if shape.dtype.startswith(("f", "bf"))), ""
        ),
        share_rematerialized=shares[0] if shares else Fraction(0),
    )
