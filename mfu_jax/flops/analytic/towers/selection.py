"""Selects a model's towers, by decoder block or by the name in its config.json, and loads them."""

from __future__ import annotations

import importlib
from pathlib import Path

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Layers
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import frozen_tower
from mfu_jax.util.yaml_files import read_mapping

_TABLE = read_mapping(Path(__file__).with_name("towers.yml"))
_TOWERS, _AUDIO, _NAMED = _TABLE["vision"], _TABLE["audio"], _TABLE["named"]


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
        layers += _tower(_TOWERS[config.decoder_block]["tower"], config)
    if config.step.audio_frames_per_sequence or (
        config.audio.use_audio and not config.missing(_AUDIO["needs"])
    ):
        require_towers(config)
        layers += _tower(_AUDIO["tower"], config)
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
        config.require(*_TOWERS[config.decoder_block]["needs"])
    if config.audio.use_audio or config.step.audio_frames_per_sequence:
        config.require(*_AUDIO["needs"])


def _has_vision(config: ModelConfig) -> bool:
    """Whether the family has a known tower and the config has all its sizes."""
    block = config.decoder_block
    return block in _TOWERS and not config.missing(_TOWERS[block]["needs"])
