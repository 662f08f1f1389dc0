"""The table of families: `decoder_block` → the function that lists a model's layers.

A family's module is imported when the first of its models is counted: the answer for one model
takes half the time if the others' code is not loaded.
"""

from __future__ import annotations

import importlib

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Layers
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.model_configs.towers import EncoderConfig

# decoder_block → module.function in this folder
FAMILIES = {
    "default": "plain_decoders.default",
    "llama2": "plain_decoders.dense_decoder",
    "mistral": "plain_decoders.dense_decoder",
    "gemma": "plain_decoders.dense_decoder",
    "gpt2": "plain_decoders.dense_decoder",
    "qwen3": "plain_decoders.qwen3",
    "qwen3_moe": "plain_decoders.qwen3",
    "qwen2": "plain_decoders.qwen2",
    "mixtral": "plain_decoders.dense_decoder",
    "gpt3": "plain_decoders.gpt3",
    "gemma2": "plain_decoders.gemma2",
    "gemma3": "plain_decoders.gemma3",
    "olmo3": "plain_decoders.olmo3",
    "gpt_oss": "plain_decoders.gpt_oss",
    "llama4": "plain_decoders.llama4",
    "envy": "plain_decoders.envy",
    "qwen3_custom_moe": "qwen.qwen3_custom_moe",
    "qwen3_next": "qwen.qwen3_next",
    "qwen3_5": "qwen.qwen3_next",
    "deepseek": "deepseek.deepseek",
    "glm5": "deepseek.deepseek",
    "hy3": "deepseek.deepseek",
    "deepseek4": "deepseek.deepseek4",
    "gemma4": "gemma_decoders.gemma4",
    "gemma4_small": "gemma_decoders.gemma4_small",
    "dit": "diffusion.dit",
    # From a config.json
    "hf_decoder": "generic_decoder.generic_decoder",
    "hf_gemma": "gemma_decoders.gemma_by_layer",
    "hf_diffusion_gemma": "gemma_decoders.diffusion_gemma",
    "hf_deepseek_v4": "deepseek.hf_deepseek_v4",
    "hf_zamba": "zamba.zamba",
    "hf_bert": "encoders.bert",
    "hf_vit": "encoders.vit",
    "hf_clip": "encoders.clip",
    "hf_t5": "encoders.t5",
    "hf_whisper": "encoders.whisper",
}


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
