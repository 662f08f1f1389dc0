"""What some versions of JAX and Flax lack: tests that need it are skipped there."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

VERSION = jax.__version_info__

reads_recorded_kernels = pytest.mark.skipif(
    VERSION < (0, 10), reason="jaxlib cannot read Pallas kernels that a later one, 0.10, wrote"
)
reads_recorded_tensor_cores = pytest.mark.skipif(
    VERSION[:2] != (0, 10), reason="a kernel for GPUs is read by the jaxlib that compiled it"
)
reads_recorded_triton = pytest.mark.skipif(
    not (0, 10) <= VERSION < (0, 12), reason="jaxlib reads Triton's IR of versions near its own"
)
respects_local_windows = pytest.mark.skipif(
    VERSION < (0, 8, 3),
    reason="JAX 0.8.0's dot_product_attention ignores local_window_size without is_causal",
)
has_scaled_dot = pytest.mark.skipif(VERSION < (0, 9), reason="jax.lax.scaled_dot came with 0.9")
has_nnx_list = pytest.mark.skipif(
    not hasattr(nnx, "List"), reason="nnx.List, as in the trainer's model, came with Flax 0.12"
)

# Other fusions of the same matmuls, compiled in half the time; the option left XLA with JAX 0.11.
FASTER_TO_COMPILE = {"xla_cpu_use_fusion_emitters": False} if VERSION < (0, 11) else {}
