"""Towers of Hugging Face's multimodal models: gemma 3, gemma 3n, Llama 4.

A config does not say how many images a sequence has: without `images_per_sequence` a tower has its
weights and no FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mfu_jax.errors import UserError
from mfu_jax.flops import towers
from mfu_jax.flops.architectures.hf_shape import HfDecoderShape
from mfu_jax.flops.components import Layer
from mfu_jax.flops.matmuls import Components, norm, projection, table, vector

# Weights of MobileNet-V5, which gemma 3n takes from timm 1.0 as it is: no config describes it.
MOBILENET_V5_300M = 294_126_912


def tower_layers(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """The layers of the towers that stand beside the decoder; none for a text model.

    Raises:
        UserError: a text model is given images.
    """
    if not shape.vision_tower:
        if shape.images_per_sequence or shape.audio_frames_per_sequence:
            raise UserError("images_per_sequence, audio_frames_per_sequence: this is a text model")
        return ()
    tower = _TOWERS[shape.vision_tower](shape)
    return towers.frozen_tower(tower, frozen=shape.freeze_vision_encoder_params)


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
    if shape.images_per_sequence:
        shape.require("image_size_for_vit")
    return towers.qwen3_vision(shape)


def _gemma3n(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """Gemma 3n: MobileNet-V5 and a conformer for audio, each with a table of 128 hard tokens.

    The tables' norms and projections run at every position, and what is no hard token is discarded.

    Raises:
        UserError: images or audio are to be counted.
    """
    for name in ("images_per_sequence", "audio_frames_per_sequence"):
        if getattr(shape, name):
            raise UserError(
                f"{name}={getattr(shape, name)}: gemma 3n's towers are not counted from a config; "
                f"mfu_jax.count_model_flops(fn, *args) counts any JAX function"
            )
    width, audio = shape.hidden_size_for_vit, shape.d_model_for_audio
    return (
        Layer(name="vision/mobilenet", components=(vector("weights", MOBILENET_V5_300M),)),
        *_conformer(shape),
        Layer(
            name="projectors",
            components=(
                *_hard_tokens("vision", shape.vision_vocab, width, shape.emb_dim),
                *_hard_tokens("audio", shape.audio_vocab, audio, shape.emb_dim),
            ),
        ),
    )


def _hard_tokens(name: str, rows: int, width: int, out: int) -> Components:
    return (
        table(f"{name}/tokens", rows, width),
        norm(f"{name}/norms", width, copies=2),
        projection(f"{name}/projection", width, out),
    )


def _conformer(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """Two strided convolutions over mel bins, then conformer layers of width C.

    Per layer two MLPs of 4·C, attention with a projection of relative positions, and a gated
    depthwise convolution.
    """
    width, (first, second) = shape.d_model_for_audio, shape.audio_channels
    bins = shape.num_mel_bins_for_audio
    for _ in range(2):
        bins = (bins + 2 - 3) // 2 + 1
    block = (
        projection("ffw", width, 4 * width, copies=4, tokens=0),
        projection("attention", width, width, copies=5, tokens=0),
        vector("attention/scale", width // shape.audio_heads),
        projection("convolution/linear", width, width, copies=3, tokens=0),
        vector("convolution/kernel", shape.audio_kernel * width),
        norm("norms", width, copies=9),
    )
    return (
        Layer(
            name="audio/convolutions",
            components=(
                projection("conv_0", 9, first, tokens=0),
                projection("conv_1", 9 * first, second, tokens=0),
                norm("norms", first + second),
                projection("entry", second * bins, width, tokens=0),
            ),
        ),
        Layer(name="audio/layers", components=block, repeats=shape.encoder_layers_for_audio),
    )


_TOWERS: dict[str, Callable[[HfDecoderShape], tuple[Layer, ...]]] = {
    "siglip": _siglip,
    "llama4": _llama4,
    "qwen3_5": _qwen3_5,
    "gemma3n": _gemma3n,
}
