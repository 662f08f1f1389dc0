"""Compute-efficiency metrics for JAX training: model FLOPs, executed FLOPs, MFU, HFU.

The public names are imported when they are first used: counting the FLOPs of a config needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC = {
    "calculate_tflops_per_device": "mfu_jax.flops.analytic",
    "calculate_tokens_per_device": "mfu_jax.flops.analytic",
    "flops_breakdown": "mfu_jax.flops.analytic",
    # MaxText's own names and signatures
    "calculate_tflops_training_per_device": "mfu_jax.flops.maxtext",
    "calculate_prefill_tflops_per_device": "mfu_jax.flops.maxtext",
    "attention_mask": "mfu_jax.flops.masks",
    "count_model_flops": "mfu_jax.flops.traced",
    "executed_flops": "mfu_jax.flops.executed",
    "compare_flops": "mfu_jax.flops.comparison",
    "tabulate": "mfu_jax.module_table",
    "MetricLogger": "mfu_jax.metric_logger",
    "StepCost": "mfu_jax.step_cost",
    "instrument": "mfu_jax.instrumented_step",
}

# modules that are public as they are
_MODULES = ("flags", "hardware")

__all__ = [
    "MetricLogger",
    "StepCost",
    "attention_mask",
    "calculate_prefill_tflops_per_device",
    "calculate_tflops_per_device",
    "calculate_tflops_training_per_device",
    "calculate_tokens_per_device",
    "compare_flops",
    "count_model_flops",
    "executed_flops",
    "flags",
    "flops_breakdown",
    "hardware",
    "instrument",
    "tabulate",
]

if TYPE_CHECKING:
    from mfu_jax import flags, hardware
    from mfu_jax.flops.analytic import (
        calculate_tflops_per_device,
        calculate_tokens_per_device,
        flops_breakdown,
    )
    from mfu_jax.flops.comparison import compare_flops
    from mfu_jax.flops.executed import executed_flops
    from mfu_jax.flops.masks import attention_mask
    from mfu_jax.flops.maxtext import (
        calculate_prefill_tflops_per_device,
        calculate_tflops_training_per_device,
    )
    from mfu_jax.flops.traced import count_model_flops
    from mfu_jax.instrumented_step import instrument
    from mfu_jax.metric_logger import MetricLogger
    from mfu_jax.module_table import tabulate
    from mfu_jax.step_cost import StepCost


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mfu_jax.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
