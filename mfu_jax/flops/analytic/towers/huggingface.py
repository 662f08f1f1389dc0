"""Towers of Hugging Face's multimodal models, beside their decoders.

A config does not say how many images a sequence has: without `images_per_sequence` a tower has its
weights and no FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.components import Layer
from mfu_jax.flops.analytic.matmuls import Components, norm, projection, vector
from mfu_jax.flops.analytic.shapes.hf_decoder import HfDecoderShape
from mfu_jax.flops.analytic.towers import maxtext as towers
from mfu_jax.flops.analytic.towers.gemma import Tower, gemma3n_towers, gemma4_towers


def tower_layers(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """The layers of the towers that stand beside the decoder; none for a text model.

    Raises:
        UserError: images or audio are given that no tower takes.
    """
    vision = bool(shape.vision_tower and shape.hidden_size_for_vit)
    audio = bool(shape.vision_tower and shape.audio_heads)
    _text_is(shape, vision=vision, audio=audio)
    if not shape.vision_tower:
        return ()
    if shape.images_per_sequence and shape.vision_tower != "gemma3n":
        shape.require("image_size_for_vit")
    return tuple(
        layer
        for tower in _TOWERS[shape.vision_tower](shape)
        for layer in towers.frozen_tower(
            tower,
            frozen=shape.freeze_audio_encoder_params
            if tower[0].name.startswith("audio")
            else shape.freeze_vision_encoder_params,
        )
    )


def _siglip(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """Gemma 3: SigLIP, pooled to `image_tokens`, a norm and a projection.

    SigLIP's own pooling head, where the config has one, is not read: weights without FLOPs.
    """
    *layers, projector = towers.siglip(shape)
    width, hidden = shape.hidden_size_for_vit, shape.intermediate_size_for_vit
    *others, last = projector.components
    tokens = shape.image_tokens * shape.images_per_sequence
    unread: Components = ()
    if shape.vision_pooling_head:
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


def _llama4(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """Llama 4: as MaxText's, with a field of its own for the width that the projector reads."""
    *layers, shuffle, projector = towers.llama4_vision(shape)
    first, second = shuffle.components
    out = shape.projector_output_dim_for_vit
    read = shape.vision_output_dim or out
    tokens = second.tokens
    return (
        *layers,
        dataclasses.replace(
            shuffle, components=(first, projection("fc2", out, out, tokens=tokens))
        ),
        dataclasses.replace(
            projector, components=(projection("projection", read, shape.emb_dim, tokens=tokens),)
        ),
    )


def _qwen3_5(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """Qwen 3.5: as Qwen3-VL's, without mergers of inner layers."""
    return towers.qwen3_vision(shape)


def _text_is(shape: HfDecoderShape, *, vision: bool, audio: bool) -> None:
    """Raises a `UserError` where images or audio are given that no tower takes."""
    for name, known in (("images_per_sequence", vision), ("audio_frames_per_sequence", audio)):
        if getattr(shape, name) and not known:
            raise UserError(
                f"{name}={getattr(shape, name)}: this model has no tower for them; leave it out"
            )


_TOWERS: dict[str, Callable[[HfDecoderShape], tuple[Tower, ...]]] = {
    "siglip": lambda shape: (_siglip(shape),),
    "llama4": lambda shape: (_llama4(shape),),
    "qwen3_5": lambda shape: (_qwen3_5(shape),),
    "gemma3n": gemma3n_towers,
    "gemma4": gemma4_towers,
}
