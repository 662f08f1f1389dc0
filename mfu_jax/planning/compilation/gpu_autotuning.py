"""What XLA would choose on a GPU that is not here, where it cannot try.

On the device, XLA times Triton's and cuBLAS's kernels for every matmul; without one it takes
Triton's for all. Large matmuls run in cuBLAS then, unless a dimension is odd, as a vocabulary of
50,257 is. In the steps measured on an H100 cuBLAS ran all others but for a few. The choice comes
after XLA has fused slices into cuBLAS calls, so a layer's weights are copied first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_TRITON, _SLICES = "xla_gpu_enable_triton_gemm", "xla_gpu_enable_dynamic_slice_fusion"
CHOICES = (_TRITON, _SLICES)
"""What is chosen: part of the key of a compiled program."""

_DOT = re.compile(r"stablehlo\.dot_general .*? : (.*)")
_SIZES = re.compile(r"tensor<([\dx]+)x\w+>")
_LARGE, _MULTIPLE = 1024, 8


def autotuned(request: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Compiler options that choose matmuls as on the device.

    Args:
        request: of the child process; `platform` is ``cuda`` for GPUs.
        text: the lowered program, StableHLO.

    Returns:
        Options for ``lowered.compile``, but for those that the user's flags set.
    """
    if request["platform"] != "cuda":
        return {}
    chosen = {_SLICES: False} if _has_odd_matmul(text) else {_TRITON: False, _SLICES: False}
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in chosen.items() if name not in given}


def _has_odd_matmul(text: str) -> bool:
    sizes = (
        int(size)
        for dot in _DOT.finditer(text)
        for shape in _SIZES.finditer(dot[1])
        for size in shape[1].split("x")
    )
    return any(size > _LARGE and size % _MULTIPLE for size in sizes)
