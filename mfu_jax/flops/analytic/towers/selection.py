"""Selects a model's towers, by decoder block or by the name in its config.json, and loads them."""

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


# vision_tower, as a config.json's translation names it → module.function of its towers
_NAMED = {
    "siglip": ("vision.siglip",),
    "llama4": ("vision.llama4_vision",),
    "qwen3_5": ("vision.qwen3_vision",),
    "gemma3n": ("gemma_towers.gemma3n_vision", "gemma_towers.gemma3n_audio"),
    "gemma4": ("gemma_towers.gemma4_vision", "gemma_towers.gemma4_audio"),
}


def towers(config: ModelConfig) -> Layers:
    """The layers of the decoder's vision and audio towers; none for a text model.

    A config does not say how many images a sequence has: without `images_per_sequence`, a tower has
    weights but no FLOPs.

    Raises:
        UserError: the step has images or audio, but the model has no tower for them, or lacks one
            of its sizes.
    """
    if config.decoder_block.startswith("hf_"):
        return _named_towers(config)
    layers: Layers = ()
    if config.step.images_per_sequence or (config.vision.use_multimodal and _has_vision(config)):
        require_towers(config)
        layers += _tower(_TOWERS[config.decoder_block][1], config)
    if config.step.audio_frames_per_sequence or (
        config.audio.use_audio and not config.missing(_AUDIO)
    ):
        require_towers(config)
        layers += _tower("audio.qwen3_audio", config)
    return layers


def _named_towers(config: ModelConfig) -> Layers:
    vision, audio = config.vision, config.audio
    _refuse(config, "images_per_sequence", vision.vision_tower and vision.hidden_size_for_vit)
    _refuse(config, "audio_frames_per_sequence", vision.vision_tower and audio.audio_heads)
    if not vision.vision_tower:
        return ()
    if config.step.images_per_sequence and vision.vision_tower != "gemma3n":
        config.require("image_size_for_vit")
    sizes = (vision.hidden_size_for_vit, audio.d_model_for_audio)
    named = zip(_NAMED[vision.vision_tower], sizes, strict=False)
    return tuple(layer for name, size in named if size for layer in _tower(name, config))


def _refuse(config: ModelConfig, name: str, tower: object) -> None:
    """Raises a `UserError` if the step's field `name` is given without a tower."""
    if (given := config.value(name)) and not tower:
        raise UserError(
            f"{name}={given}: this model has no tower for them",
            hint="leave it out",
        )


def _tower(name: str, config: ModelConfig) -> Layers:
    """The tower made by module.function, with the gradients it needs."""
    module, function = name.split(".")
    made = getattr(importlib.import_module(f"mfu_jax.flops.analytic.towers.{module}"), function)
    layers: Layers = made(config)
    training, is_audio = config.training, layers[0].name.startswith("audio")
    frozen = (
        training.freeze_audio_encoder_params if is_audio else training.freeze_vision_encoder_params
    )
    return frozen_tower(layers, frozen=frozen)


def require_towers(config: ModelConfig) -> None:
    """Raises a `UserError` if a tower is used that is unknown or lacks a size."""
    if config.decoder_block.startswith("hf_"):
        return  # a config.json describes its own towers: see `_NAMED`
    if config.vision.use_multimodal or config.step.images_per_sequence:
        if config.decoder_block not in _TOWERS:
            raise UserError(
                f"use_multimodal: decoder_block={config.decoder_block!r} has no known vision "
                f"tower; known are {', '.join(sorted(_TOWERS))}",
                hint=f"{nearest(config.decoder_block, _TOWERS)}use_multimodal=false counts the "
                "text model",
            )
        config.require(*_TOWERS[config.decoder_block][0])
    if config.audio.use_audio or config.step.audio_frames_per_sequence:
        config.require(*_AUDIO)


def _has_vision(config: ModelConfig) -> bool:
    """Whether the family has a known tower and the config has all its sizes."""
    needed, _ = _TOWERS.get(config.decoder_block, (None, None))
    return needed is not None and not config.missing(needed)
