"""Custom kernels: tell the executed count what a custom call runs (docs/kernels.md).

Public names; where they are defined may change.
"""

from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)

__all__ = ["KernelCall", "KernelCost", "UnknownCost", "register_kernel"]
