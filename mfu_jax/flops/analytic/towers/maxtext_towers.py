"""The towers of MaxText's families, selected by decoder block, and loaded if a step uses them."""

from __future__ import annotations

import importlib

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Layers
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import frozen_tower

_VIT = (
    "patch_size_for_vit",
    "hidden_size_for_vit",
    "intermediate_size_for_vit",
    "num_hidden_layers_for_vit",
)
_AUDIO = (
    "d_model_for_audio",
    "encoder_layers_for_audio",
    "encoder_ffn_dim_for_audio",
    "num_mel_bins_for_audio",
    "downsample_hidden_size_for_audio",
    "output_dim_for_audio",
    "n_window_for_audio",
)
_QWEN3 = (
    *_VIT,
    "image_size_for_vit",
    "spatial_merge_size_for_vit",
    "num_position_embeddings_for_vit",
)
# decoder_block → the fields that its vision tower needs, and module.function in this folder
_TOWERS: dict[str, tuple[tuple[str, ...], str]] = {
    "gemma3": ((*_VIT, "image_size_for_vit"), "vision.siglip"),
    "gemma4": (
        (
            *_VIT,
            "image_size_for_vit",
            "num_attention_heads_for_vit",
            "num_position_embeddings_for_vit",
        ),
        "gemma_towers.gemma4_vision",
    ),
    "llama4": (
        (
            *_VIT,
            "tile_size_for_vit",
            "projector_input_dim_for_vit",
            "projector_output_dim_for_vit",
        ),
        "vision.llama4_vision",
    ),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_5"), (_QWEN3, "vision.qwen3_vision")),
}


def maxtext_towers(config: ModelConfig) -> Layers:
    """The layers of the vision and audio towers; none for a text model.

    A step without images does not need the tower's sizes: if they are absent, only the text model
    is counted.

    Raises:
        UserError: there are images, but the family has no known tower, or lacks one of its sizes.
    """
    layers: Layers = ()
    step, training = config.step, config.training
    if step.images_per_sequence or (config.vision.use_multimodal and _has_vision(config)):
        require_towers(config)
        vision = _tower(_TOWERS[config.decoder_block][1], config)
        layers += frozen_tower(vision, frozen=training.freeze_vision_encoder_params)
    if step.audio_frames_per_sequence or (config.audio.use_audio and not config.missing(_AUDIO)):
        require_towers(config)
        audio = _tower("audio.qwen3_audio", config)
        layers += frozen_tower(audio, frozen=training.freeze_audio_encoder_params)
    return layers


def _tower(name: str, config: ModelConfig) -> Layers:
    module, function = name.split(".")
    towers = importlib.import_module(f"mfu_jax.flops.analytic.towers.{module}")
    layers: Layers = getattr(towers, function)(config)
    return layers


def require_towers(config: ModelConfig) -> None:
    """Raises a `UserError` if a tower is used that is unknown or lacks a size."""
    if config.decoder_block.startswith("hf_"):
        return  # a config.json describes its own towers: see `towers.huggingface`
    if config.vision.use_multimodal or config.step.images_per_sequence:
        if config.decoder_block not in _TOWERS:
            raise UserError(
                f"use_multimodal: decoder_block={config.decoder_block!r} has no known vision "
                f"tower{nearest(config.decoder_block, _TOWERS)}; known are "
                f"{', '.join(sorted(_TOWERS))}; use_multimodal=false counts the text model"
            )
        config.require(*_TOWERS[config.decoder_block][0])
    if config.audio.use_audio or config.step.audio_frames_per_sequence:
        config.require(*_AUDIO)


def _has_vision(config: ModelConfig) -> bool:
    """Whether the family has a known tower and the config has all its sizes."""
    needed, _ = _TOWERS.get(config.decoder_block, (None, None))
    return needed is not None and not config.missing(needed)
