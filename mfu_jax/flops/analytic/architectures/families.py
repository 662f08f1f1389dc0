"""The families of ``families.yml``: `decoder_block` → the function that lists a model's layers.

A family's module is imported when the first of its models is counted: the answer for one model
takes half the time if the others' code is not loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Layers
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.model_configs.towers import EncoderConfig
from mfu_jax.util.yaml_files import read_mapping

FAMILIES: Mapping[str, str] = read_mapping(Path(__file__).with_name("families.yml"))


def _is_translated(config: ModelConfig) -> bool:
    """Whether a translation of a config.json has set what says how its layers differ."""
    layers = config.stack.layer_types or config.sparse_attention.compress_ratios
    return bool(layers) or config.encoder != EncoderConfig()


def build(config: ModelConfig) -> Layers:
    """The layers of `config`.

    Raises:
        UserError: its `decoder_block` is not known.
    """
    block = config.decoder_block
    if block not in FAMILIES:
        raise UserError(
            f"decoder_block={block!r} is not known; known are {', '.join(sorted(FAMILIES))}",
            hint=f"{nearest(block, FAMILIES)}count_model_flops(fn, *args) counts any JAX function",
        )
    if block.startswith("hf_") and not _is_translated(config):
        raise UserError(
            f"decoder_block={block!r} comes from a config.json", hint="give that instead"
        )
    module, function = FAMILIES[block].split(".")
    family = importlib.import_module(f"mfu_jax.flops.analytic.architectures.{module}")
    model: Layers = getattr(family, function)(config)
    return model
