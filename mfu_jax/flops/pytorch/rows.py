"""The count of one sequence as rows of `mfu-jax flops`."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import PairCounting
from mfu_jax.flops.pytorch.counting import Matmul, PyTorchCount

# A weight matmul has two gradients, and so has an attention matmul.
_TRAINING = 3


def rows(count: PyTorchCount, sequences: Number, counting: PairCounting) -> list[dict[str, Any]]:
    """One row per kind of module: FLOPs of `sequences`, forward and training."""
    return [
        _row(part, integral(part.forward_flops(counting) * sequences)) for part in count.matmuls
    ]


def _row(part: Matmul, forward: Number) -> dict[str, Any]:
    layer, _, component = part.module.rpartition(".*.")
    return {
        "layer": f"{layer}.*" if layer else "model",
        "component": component,
        "kind": part.kind,
        "repeats": part.calls,
        "forward_flops": forward,
        "training_flops": _TRAINING * forward,
    }
