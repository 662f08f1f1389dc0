"""Custom calls whose FLOPs the HLO text does not show, one file per library or kind of body.

Attention and fused losses are rows of `flops.attention_kernels` and `flops.loss_kernels`; a target
without matmuls joins `registry._FREE`. Any other has a rule, registered under the custom call's
target or the kernel's own name by `registry.register_kernel` (users: `mfu_jax.kernels`). A new file
is imported below:

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
