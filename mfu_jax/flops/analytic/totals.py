"""Model FLOPs per device and optimizer step, from the config alone.

Every total is a sum over `flops_breakdown`: one row per component of a layer, in exact ints.
`calculate_tflops_training_per_device` and `calculate_prefill_tflops_per_device` have MaxText's own
names and signatures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_jax.flops.analytic.conventions import CONVENTIONS, FlopsRow, find_convention
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.training import training_model
from mfu_jax.flops.exact import Number, integral

TERA = 10**12


class FlopsPerDevice(NamedTuple):
    """Exact FLOPs per device and optimizer step: ints, unless a fraction remains."""

    forward: Number
    training: Number


class TflopsPerDevice(NamedTuple):
    """TFLOPs (10¹²) per device and optimizer step."""

    total: float
    learnable_weight: float
    attention: float


def flops_breakdown(config: Any, convention: str = "dense") -> list[FlopsRow]:
    """FLOPs of every component of every layer, per device and optimizer step.

    Args:
        config: a `ModelConfig`, a mapping, or any object with MaxText's field names.
        convention: how to count; a key of `CONVENTIONS`.

    Raises:
        UserError: a field is missing or wrong, or the convention is unknown.
    """
    counted = find_convention(convention)
    model_config = as_model_config(config)
    return counted.rows(model_config, training_model(model_config))


def model_flops_per_device(config: Any, convention: str = "dense") -> FlopsPerDevice:
    """The exact sums of `flops_breakdown`."""
    return _summed(flops_breakdown(config, convention))


def flops_bounds(config: Any, convention: str = "dense") -> tuple[FlopsPerDevice, FlopsPerDevice]:
    """The sums if each token uses only experts that compute nothing, and if it uses none of them.

    Different only for a model with such experts, whose FLOPs depend on the tokens.
    """
    model_config = as_model_config(config)
    most = model_config.experts.num_experts_per_tok * (model_config.experts.zero_experts > 0)
    low, high = (
        model_flops_per_device(model_config.replace(zero_experts_per_tok=number), convention)
        for number in (most, 0)
    )
    return low, high


def _summed(rows: list[FlopsRow]) -> FlopsPerDevice:
    return FlopsPerDevice(
        integral(sum(row.forward_flops for row in rows)),
        integral(sum(row.training_flops for row in rows)),
    )


def calculate_tflops_per_device(config: Any, convention: str = "maxtext") -> TflopsPerDevice:
    """Forward and backward TFLOPs per device and optimizer step, without remat.

    >>> config = dict(vocab_size=512, num_decoder_layers=4, emb_dim=64, num_query_heads=4,
    ...     num_kv_heads=4, head_dim=16, mlp_dim=256, mlp_activations=["gelu"],
    ...     per_device_batch_size=2, max_target_length=128)
    >>> calculate_tflops_per_device(config, "dense").total * 1e12
    452984832.0
    """
    return tflops_of(flops_breakdown(config, convention))


def tflops_of(rows: list[FlopsRow]) -> TflopsPerDevice:
    """The sums of a breakdown, in TFLOPs."""
    weight = sum(row.training_flops for row in rows if row.kind == "weight")
    attention = sum(row.training_flops for row in rows if row.kind == "attention")
    return TflopsPerDevice(
        float(weight + attention) / TERA, float(weight) / TERA, float(attention) / TERA
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


def calculate_tokens_per_device(config: Any) -> Number:
    """Tokens per device and optimizer step."""
    model_config = as_model_config(config)
    return integral(model_config.sequences_per_step * model_config.step.max_target_length)


def compare_conventions(config: Any) -> dict[str, FlopsPerDevice]:
    """The same step under every convention."""
    model_config = as_model_config(config)
    model = training_model(model_config)
    return {
        name: _summed(convention.rows(model_config, model))
        for name, convention in CONVENTIONS.items()
    }


def convert_mfu(mfu: float, config: Any, *, from_convention: str, to_convention: str) -> float:
    """Converts an MFU between conventions, for the same step and time.

    Args:
        mfu: model FLOPs by `from_convention` / (step time × peak).
        config: the measured model and step.

    Raises:
        UserError: see `flops_breakdown`.
    """
    stated = model_flops_per_device(config, from_convention).training
    wanted = model_flops_per_device(config, to_convention).training
    return mfu * float(wanted / stated)
