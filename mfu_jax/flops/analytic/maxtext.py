"""MaxText's own function names and signatures, for trainers that call them.

from mfu_jax.flops.analytic.maxtext import calculate_tflops_training_per_device
"""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.inputs import as_model_config
from mfu_jax.flops.analytic.totals import (
    TERA,
    TflopsPerDevice,
    calculate_tflops_per_device,
    flops_breakdown,
)


def calculate_tflops_training_per_device(config: Any, log: bool = True) -> TflopsPerDevice:
    """TFLOPs per device and optimizer step: total, learnable weights, attention.

    Args:
        config: MaxText's config object, or anything with its resolved field names.
        log: whether to print the three numbers, as MaxText does.
    """
    tflops = calculate_tflops_per_device(config, "maxtext")
    if log:
        _print_split("Per train step:", tflops)
    return tflops


def calculate_prefill_tflops_per_device(
    num_model_parameters: int, prefill_length: int, config: Any, log: bool = True
) -> TflopsPerDevice:
    """TFLOPs per device for one prompt that is split over all devices of the job.

    2·N per token for the weights, as MaxText counts them, and causal attention in every layer
    (forward only), including windows.

    Args:
        num_model_parameters: N.
        prefill_length: number of prompt tokens.
        config: MaxText's config object, or anything with its resolved field names.
        log: whether to print the three numbers.
    """
    import jax

    prompt = as_model_config(config).replace(
        max_target_length=prefill_length, per_device_batch_size=1, gradient_accumulation_steps=1
    )
    attention = sum(
        row.forward_flops for row in flops_breakdown(prompt, "maxtext") if row.kind == "attention"
    )
    weights = 2 * num_model_parameters * prefill_length
    per_device = TERA * jax.device_count()
    tflops = TflopsPerDevice(
        float(weights + attention) / per_device,
        float(weights) / per_device,
        float(attention) / per_device,
    )
    if log:
        _print_split("Per prefill step per device:", tflops)
    return tflops


def _print_split(title: str, tflops: TflopsPerDevice) -> None:
    print(
        f"{title}\n Total TFLOPs: {tflops.total:.2f} \n split as "
        f"{100 * tflops.learnable_weight / tflops.total:.2f}% learnable weight flops and "
        f"{100 * tflops.attention / tflops.total:.2f}% attention flops"
    )
