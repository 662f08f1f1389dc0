"""Towers of Gemma 4 and 3n: a vision transformer, MobileNet-V5, an audio conformer.

Shapes: T audio tokens, C width of the tower. A tower is a tuple of layers, the projector last.
"""

from __future__ import annotations

import math
from fractions import Fraction

from mfu_jax.flops.analytic.components import Component, Layers, layer
from mfu_jax.flops.analytic.formulas import (
    Components,
    attention,
    mlp,
    norm,
    projection,
    short_convolution,
    table,
    vector,
)
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import over_images
from mfu_jax.flops.masks import Full, LocalBlocks

# MobileNet-V5 of timm 1.0, used by Gemma 3n and described by no config: weights, multiply-adds
# per image of 768 × 768 pixels (its processor's only size), and tokens per image.
_MOBILENET_WEIGHTS = 294_126_912
_MOBILENET_MACS = 435_741_474_816
_MOBILENET_TOKENS = 256
# Its first convolution, 3 × 3 from 3 to 64 channels at every other pixel: its input needs no
# gradient.
_STEM_MACS = 9 * 3 * 64 * 384**2


def gemma4_vision(config: ModelConfig) -> Layers:
    """Patches ``[3·p², C]``, one table per axis, layers of attention and a gated MLP.

    k × k tokens are averaged before the projector. Their positions determine which: there is no
    weight and nothing to multiply. A config.json gives k and the heads; in MaxText's, k is 3, each
    head has its own keys, and the averages are scaled and shifted by learned values.
    """
    vision, images = config.vision, config.step.images_per_sequence
    width, patch, (rows, columns) = (
        vision.hidden_size_for_vit,
        vision.patch_size_for_vit,
        vision.patch_grid,
    )
    tokens, pooling = rows * columns, vision.vision_pooling or 3
    heads = vision.vision_heads or vision.num_attention_heads_for_vit
    attended = attention(
        width,
        heads,
        vision.vision_kv_heads or heads,
        vision.vision_head_dim or width // heads,
        Full(queries=tokens),
        qk_norm=True,
        tokens=tokens * images,
    )
    block = (
        norm("norms", width, copies=4),
        *over_images(attended, images),
        *mlp(width, vision.intermediate_size_for_vit, gated=True, tokens=tokens * images),
    )
    pooled = (rows // pooling) * (columns // pooling) * images
    learned = layer("vision/final", vector("standardize", 2 * width))
    return (
        layer(
            "vision/patches",
            projection("patch_embedding", 3 * patch**2, width, tokens=tokens * images),
            table("vision/positions", 2 * vision.num_position_embeddings_for_vit, width),
        ),
        layer("vision/layers", *block, repeats=vision.num_hidden_layers_for_vit),
        *(() if vision.vision_heads else (learned,)),
        layer("vision/projector", projection("projection", width, config.emb_dim, tokens=pooled)),
    )


def gemma4_audio(config: ModelConfig) -> Layers:
    """Gemma 4's conformer and its projector."""
    _, tokens = _audio_tokens(config)
    inputs = config.audio.output_dim_for_audio
    heard = projection("projection", inputs, config.emb_dim, tokens=tokens)
    return (*_conformer(config), layer("audio/projector", heard))


def gemma3n_vision(config: ModelConfig) -> Layers:
    """MobileNet-V5 and a table of 128 hard tokens.

    The table's norm and projection run at every position; only those of hard tokens are kept.
    """
    images, sizes = config.step.images_per_sequence, config.vision
    stem = Component(name="stem", macs=_STEM_MACS, tokens=images)
    rest = Component(
        name="blocks",
        macs=_MOBILENET_MACS - _STEM_MACS,
        tokens=images,
        parameters=_MOBILENET_WEIGHTS,
    )
    seen = _hard_and_soft_tokens(
        sizes.vision_vocab, sizes.hidden_size_for_vit, config.emb_dim, _MOBILENET_TOKENS * images
    )
    return (
        layer("vision/stem", stem),
        layer("vision/mobilenet", rest),
        layer("vision/projector", *seen),
    )


def gemma3n_audio(config: ModelConfig) -> Layers:
    """A conformer, some of whose tokens are merged, and a table of 128 hard tokens."""
    sizes, (_, tokens) = config.audio, _audio_tokens(config)
    heard = -(-tokens // sizes.audio_reduction)
    parts = _hard_and_soft_tokens(sizes.audio_vocab, sizes.d_model_for_audio, config.emb_dim, heard)
    return (*_conformer(config), layer("audio/projector", *parts))


def _hard_and_soft_tokens(rows: int, width: int, out: int, soft: int) -> Components:
    """One projection, for the tower's tokens and for the table's rows at every position."""
    shared = projection("projection", width, out, tokens=soft)
    return (
        shared,
        table("hard_tokens", rows, width),
        norm("norms", width, copies=2),
        shared.replace(name="hard_projection", tokens=None, parameters=0),
    )


def _audio_tokens(config: ModelConfig) -> tuple[int, int]:
    """Time positions after each of two convolutions that halve their number."""
    first = math.ceil(config.step.audio_frames_per_sequence / 2)
    return first, math.ceil(first / 2)


def _conformer(config: ModelConfig) -> Layers:
    """Two strided convolutions over mel bins, then conformer layers of width C, without projector.

    Per layer, two MLPs of 4·C, attention in overlapping blocks, and a gated depthwise
    convolution. Scores have a second term, queries · relative positions, ``[T, C] @ [C, R]``, whose
    keys ``[R, C] @ [C, C]`` are shared by all sequences of a batch.
    """
    sizes = config.audio
    width, (first, second) = sizes.d_model_for_audio, sizes.audio_channels
    halved, tokens = _audio_tokens(config)
    bins = math.ceil(sizes.num_mel_bins_for_audio / 2)
    fewer = math.ceil(bins / 2)
    past, future, relative = (
        sizes.audio_past,
        sizes.audio_future,
        sizes.audio_relative_positions,
    )

    def scores(name: str, keys: int) -> Component:
        mask = LocalBlocks(tokens, sizes.audio_chunk, keys, past=past, future=future)
        return Component(name=f"attention/{name}", kind="attention", macs=width, mask=mask)

    shared = projection("attention/relative_proj", width, width, tokens=1 if tokens else 0)
    block = (
        projection("ffw", width, 4 * width, copies=4, tokens=tokens),
        projection("attention/qkvo", width, width, copies=4, tokens=tokens),
        shared.replace(
            macs=Fraction(relative * shared.macs) / config.step.per_device_batch_size,
            left_gradient=False,  # the positions are constants
        ),
        vector("attention/scale", width // sizes.audio_heads),
        scores("scores_qk", sizes.audio_context),
        scores("scores_relative", relative),
        scores("scores_pv", sizes.audio_context),
        projection("convolution/linear", width, width, copies=3, tokens=tokens),
        short_convolution("convolution/depthwise", sizes.audio_kernel, width, tokens=tokens),
        norm("norms", width, copies=9),
    )
    layers = layer("audio/layers", *block, repeats=sizes.encoder_layers_for_audio)
    out = sizes.output_dim_for_audio
    closing = projection("output_proj", width, out, bias=True, tokens=tokens)
    return (
        layer("audio/entry", projection("conv_0", 9, first, tokens=halved * bins)),
        layer(
            "audio/convolutions",
            projection("conv_1", 9 * first, second, tokens=tokens * fewer),
            norm("norms", first + second),
            projection("linear", second * fewer, width, tokens=tokens),
        ),
        layers,
        *((layer("audio/output", closing),) if out else ()),
    )
