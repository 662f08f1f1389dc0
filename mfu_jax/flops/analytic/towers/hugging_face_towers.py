"""Towers of Hugging Face's multimodal models.

A config does not say how many images a sequence has: without `images_per_sequence`, a tower has
weights but no FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.components import Layers
from mfu_jax.flops.analytic.formulas import Components, norm, projection, vector
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import frozen_tower
from mfu_jax.flops.analytic.towers.gemma_towers import gemma3n_towers, gemma4_towers
from mfu_jax.flops.analytic.towers.vision import llama4_vision, qwen3_vision, siglip


def hugging_face_towers(config: ModelConfig) -> Layers:
    """The layers of the decoder's towers; none for a text model.

    Raises:
        UserError: the step has images or audio, but the model has no tower for them.
    """
    tower = config.vision.vision_tower
    _refuse(config, "images_per_sequence", tower and config.vision.hidden_size_for_vit)
    _refuse(config, "audio_frames_per_sequence", tower and config.audio.audio_heads)
    if not tower:
        return ()
    if config.step.images_per_sequence and tower != "gemma3n":
        config.require("image_size_for_vit")
    return tuple(layer for layers in _TOWERS[tower](config) for layer in _frozen(config, layers))


def _refuse(config: ModelConfig, name: str, tower: object) -> None:
    """Raises a `UserError` if the step's field `name` is given without a tower."""
    if (given := config.value(name)) and not tower:
        raise UserError(f"{name}={given}: this model has no tower for them; leave it out")


def _frozen(config: ModelConfig, layers: Layers) -> Layers:
    training, audio = config.training, layers[0].name.startswith("audio")
    return frozen_tower(
        layers,
        frozen=training.freeze_audio_encoder_params
        if audio
        else training.freeze_vision_encoder_params,
    )


def _siglip(config: ModelConfig) -> Layers:
    """Gemma 3: SigLIP, pooled to `image_tokens`, a norm and a projection.

    SigLIP's own pooling head, if the config has one, is not used: weights without FLOPs.
    """
    vision = config.vision
    *layers, projector = siglip(config)
    width, hidden = vision.hidden_size_for_vit, vision.intermediate_size_for_vit
    *others, last = projector.components
    tokens = vision.image_tokens * config.step.images_per_sequence
    unread: Components = ()
    if vision.vision_pooling_head:
        unread = (
            vector("pooling/probe", width),
            projection("pooling/attention", width, width, bias=True, copies=4, tokens=0),
            norm("pooling/norm", width, bias=True),
            projection("pooling/wi", width, hidden, bias=True, tokens=0),
            projection("pooling/wo", hidden, width, bias=True, tokens=0),
        )
    final = dataclasses.replace(layers[-1], components=(*layers[-1].components, *unread))
    read = last.replace(tokens=tokens)
    return (*layers[:-1], final, dataclasses.replace(projector, components=(*others, read)))


def _llama4(config: ModelConfig) -> Layers:
    """Llama 4: like MaxText's, with a separate field for the projector's input width."""
    *layers, shuffle, projector = llama4_vision(config)
    first, second = shuffle.components
    out = config.vision.projector_output_dim_for_vit
    read = config.vision.vision_output_dim or out
    tokens = second.tokens
    return (
        *layers,
        dataclasses.replace(
            shuffle, components=(first, projection("fc2", out, out, tokens=tokens))
        ),
        dataclasses.replace(
            projector, components=(projection("projection", read, config.emb_dim, tokens=tokens),)
        ),
    )


_TOWERS: dict[str, Callable[[ModelConfig], tuple[Layers, ...]]] = {
    "siglip": lambda config: (_siglip(config),),
    "llama4": lambda config: (_llama4(config),),
    "qwen3_5": lambda config: (qwen3_vision(config),),
    "gemma3n": gemma3n_towers,
    "gemma4": gemma4_towers,
}
