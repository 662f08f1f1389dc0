"""What some versions of JAX lack: tests that need it are skipped there."""

from __future__ import annotations

import jax
import pytest

VERSION = jax.__version_info__

reads_recorded_kernels = pytest.mark.skipif(
    VERSION < (0, 10), reason="jaxlib cannot read Pallas kernels that a later one, 0.10, wrote"
)
has_scaled_dot = pytest.mark.skipif(VERSION < (0, 9), reason="jax.lax.scaled_dot came with 0.9")

# Other fusions of the same matmuls, compiled in half the time; the option left XLA with JAX 0.12.
FASTER_TO_COMPILE = {"xla_cpu_use_fusion_emitters": False} if VERSION < (0, 12) else {}
