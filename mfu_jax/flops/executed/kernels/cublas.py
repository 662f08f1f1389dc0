"""cuBLAS and cuBLASLt matmuls."""

from __future__ import annotations

import math

from mfu_jax.flops.executed.formulas.matmuls import (
    LIBRARY_DOTS,
    flops_per_multiply_add,
    operand_dtype,
    result_shape,
)
from mfu_jax.flops.executed.kernels.registry import (
    KernelCall,
    KernelCost,
    dot_dimensions,
    register_kernel,
)


@register_kernel(*LIBRARY_DOTS)
def _cublas(call: KernelCall) -> KernelCost:
    """cuBLAS and cuBLASLt matmuls, FP8 included: 2 · result elements · contracted elements."""
    lhs = call.operand(0)
    dims = dot_dimensions(call, call.config.get("gemm_backend_config"))
    if any(not 0 <= d < len(lhs.dims) for d in dims):
        raise call.instruction.error(f"contracted dimension out of range of {lhs}")
    result = result_shape(call.instruction)
    per_pair = flops_per_multiply_add(result.dtype)
    flops = per_pair * result.size * math.prod(lhs.dims[d] for d in dims)
    dtype = operand_dtype(call.computation, call.instruction)  # FP8 calls also have f32 scales
    return KernelCost(flops=flops, dtype=dtype, seen_by_xla=flops)
