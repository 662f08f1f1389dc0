"""Model FLOPs of one optimizer step on one device, from the config alone.

Everything is the sum over `flops_breakdown`: one row a component of a layer, in exact ints.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.architectures import build
from mfu_jax.flops.components import Kind
from mfu_jax.flops.masks import Number, PairCounting, integral
from mfu_jax.flops.shape import ModelShape

TERA = 10**12


class FlopsRow(NamedTuple):
    """One component of one kind of layer, all its repeats together.

    Attributes:
        layer: the layer's name.
        component: the component's name.
        kind: ``weight`` (an operand is a weight) or ``attention`` (both are activations).
        repeats: layers of this kind.
        forward_flops: of one device in one optimizer step, all repeats.
        training_flops: forward and backward, likewise.
    """

    layer: str
    component: str
    kind: Kind
    repeats: int
    forward_flops: Number
    training_flops: Number


class ModelFlops(NamedTuple):
    """Exact FLOPs of one device in one optimizer step: ints, unless a fraction is left."""

    forward: Number
    training: Number


class TflopsPerDevice(NamedTuple):
    """TFLOPs (10¹²) of one device in one optimizer step."""

    total: float
    learnable_weight: float
    attention: float


def flops_breakdown(config: Any, convention: str = "dense") -> list[FlopsRow]:
    """FLOPs of every component of every layer, per device and optimizer step.

    Args:
        config: a `ModelShape`, a mapping, or any object with MaxText's field names.
        convention: how attention pairs are counted.

    Raises:
        UserError: a field is missing or wrong, or the convention unknown.
    """
    shape = ModelShape.of(config)
    counting = _pair_counting(convention)
    rows = []
    for layer in build(shape).layers:
        for part in layer.components:
            if not part.macs:
                continue
            once = part.forward_flops(shape.max_target_length, counting)
            forward = integral(once * layer.repeats * shape.sequences_per_step)
            rows.append(
                FlopsRow(
                    layer=layer.name,
                    component=part.name,
                    kind=part.kind,
                    repeats=layer.repeats,
                    forward_flops=forward,
                    training_flops=forward * (1 + part.backward_multiple),
                )
            )
    return rows


def model_flops_per_device(config: Any, convention: str = "dense") -> ModelFlops:
    """The exact sums of `flops_breakdown`."""
    rows = flops_breakdown(config, convention)
    return ModelFlops(
        integral(sum(row.forward_flops for row in rows)),
        integral(sum(row.training_flops for row in rows)),
    )


def calculate_tflops_per_device(config: Any, convention: str = "maxtext") -> TflopsPerDevice:
    """TFLOPs of forward and backward of one optimizer step on one device, without remat.

    >>> shape = dict(vocab_size=512, num_decoder_layers=4, emb_dim=64, num_query_heads=4,
    ...     num_kv_heads=4, head_dim=16, mlp_dim=256, mlp_activations=["gelu"],
    ...     per_device_batch_size=2, max_target_length=128)
    >>> calculate_tflops_per_device(shape, "dense").total * 1e12
    452984832.0
    """
    rows = flops_breakdown(config, convention)
    weight, attention = (
        sum(row.training_flops for row in rows if row.kind == kind)
        for kind in ("weight", "attention")
    )
    return TflopsPerDevice(
        float(weight + attention) / TERA, float(weight) / TERA, float(attention) / TERA
    )


def calculate_tokens_per_device(config: Any) -> Number:
    """Tokens that one device takes in one optimizer step."""
    shape = ModelShape.of(config)
    return integral(shape.sequences_per_step * shape.max_target_length)


def _pair_counting(convention: str) -> PairCounting:
    if convention not in ("maxtext", "exact", "dense"):
        known = ("maxtext", "exact", "dense")
        raise UserError(
            f"convention={convention!r} is not known{nearest(convention, known)}; "
            f"expected one of {', '.join(known)}"
        )
    return convention  # type: ignore[return-value]
