"""Custom calls whose FLOPs the HLO text does not show, one file per library.

A rule is registered under the custom call's target, or under the kernel's own name:

    @register_kernel("my_fused_mlp")
    def _(call: KernelCall) -> int:
        rows, width = call.operands[0].dims
        return 2 * rows * width * call.operands[1].dims[1]
"""

# Importing a module registers its rules.
from mfu_jax.flops.executed.kernels import (
    cudnn,
    linear_algebra,
    mosaic_gpu,
    pallas_tpu,
    transformer_engine,
    triton,
)

__all__ = ["cudnn", "linear_algebra", "mosaic_gpu", "pallas_tpu", "transformer_engine", "triton"]
