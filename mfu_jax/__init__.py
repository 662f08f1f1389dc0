"""Compute-efficiency metrics for JAX training: model FLOPs, executed FLOPs, MFU, HFU.

Public names are imported on first use: counting the FLOPs of a config needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC = {
    "calculate_tflops_per_device": "mfu_jax.flops.analytic.totals",
    "calculate_tokens_per_device": "mfu_jax.flops.analytic.totals",
    "flops_breakdown": "mfu_jax.flops.analytic.totals",
    # MaxText's own names and signatures
    "calculate_tflops_training_per_device": "mfu_jax.flops.analytic.totals",
    "calculate_prefill_tflops_per_device": "mfu_jax.flops.analytic.totals",
    "attention_mask": "mfu_jax.flops.traced.masks.declared",
    "count_model_flops": "mfu_jax.flops.traced.counting",
    "executed_flops": "mfu_jax.flops.executed.counting",
    "compare_flops": "mfu_jax.flops.ledger",
    "tabulate": "mfu_jax.flops.traced.module_table",
    "dump": "mfu_jax.dumps.recording",
    "plan": "mfu_jax.planning.any_step",
    "plan_sequence": "mfu_jax.planning.sequence",
    "profile": "mfu_jax.profiling.capture",
    "tune": "mfu_jax.planning.tune.any_step",
    "MetricLogger": "mfu_jax.logger.metric_logger",
    "StepCost": "mfu_jax.logger.records.step_cost",
    "instrument": "mfu_jax.instrumentation.instrumented_step",
}

# modules that are public themselves
_MODULES = ("conventions", "dumps", "flags", "hardware", "kernels", "sinks")

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
    "dump",
    "dumps",
    "executed_flops",
    "flags",
    "flops_breakdown",
    "hardware",
    "instrument",
    "plan",
    "plan_sequence",
    "profile",
    "tabulate",
    "tune",
]

if TYPE_CHECKING:
    from mfu_jax import dumps, flags, hardware
    from mfu_jax.dumps.recording import dump
    from mfu_jax.flops.analytic.totals import (
        calculate_prefill_tflops_per_device,
        calculate_tflops_per_device,
        calculate_tflops_training_per_device,
        calculate_tokens_per_device,
        flops_breakdown,
    )
    from mfu_jax.flops.executed.counting import executed_flops
    from mfu_jax.flops.ledger import compare_flops
    from mfu_jax.flops.traced.counting import count_model_flops
    from mfu_jax.flops.traced.masks.declared import attention_mask
    from mfu_jax.flops.traced.module_table import tabulate
    from mfu_jax.instrumentation.instrumented_step import instrument
    from mfu_jax.logger.metric_logger import MetricLogger
    from mfu_jax.logger.records.step_cost import StepCost
    from mfu_jax.planning.any_step import plan
    from mfu_jax.planning.sequence import plan_sequence
    from mfu_jax.planning.tune.any_step import tune
    from mfu_jax.profiling.capture import profile


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mfu_jax.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
