"""Overrides single fields of a model's config, and reports those without effect."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.sources import overridden
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.training import training_model
from mfu_jax.util.values import shown

# What a config may say although its model stays the same.
_OF_THE_STEP = frozenset(
    {
        *("model_name", "override_model_config", "per_device_batch_size", "max_target_length"),
        *("gradient_accumulation_steps", "use_multimodal", "use_audio"),
        "make_vocab_size_divisible_by",
    }
)


def load_model_config(source: Any, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Loads the config named by `source` and applies `overrides` (field → value).

    Args:
        source: a bundled model's name, the path of a MaxText model YAML or of a config.json (or its
            folder), a mapping with the content of either, or an object with MaxText's field
            names.
        overrides: fields of `ModelConfig` or MaxText's ``base_*`` names; they override the source.

    Raises:
        UserError: the source is not found, not readable or not recognised, or a field is wrong.

    Warns:
        UserWarning: an override has no effect: the model has no such part, or other fields decide.

    >>> load_model_config("llama3-8b", {"num_decoder_layers": 2}).num_decoder_layers
    2
    """
    overrides = dict(overrides or {})
    config = overridden(source, overrides)
    for key in overrides:
        if key not in _OF_THE_STEP and not _changes(key, source, overrides, config):
            warnings.warn(
                f"{key}={_as_written(overrides[key])} changes nothing: with its other fields, this "
                f"model with decoder_block={config.decoder_block!r} is the same without it",
                stacklevel=2,
            )
    return config


def _as_written(value: Any) -> str:
    """A value for a message, in YAML's notation: a list, a decimal."""
    if isinstance(value, tuple):
        return shown(list(value))
    return shown(float(value) if isinstance(value, Fraction) else value)


def _changes(key: str, source: Any, overrides: dict[str, Any], config: ModelConfig) -> bool:
    """Whether an override has an effect: the model would differ, or not build, without it.

    An override equal to the current value is not reported.
    """
    try:
        with warnings.catch_warnings():  # said once, of the model with all overrides
            warnings.simplefilter("ignore")
            without = overridden(source, {k: v for k, v in overrides.items() if k != key})
        return without == config or training_model(without) != training_model(config)
    except UserError:
        return True
