"""Towers of Gemma 3n and Gemma 4: MobileNet-V5, a vision transformer, an audio conformer.

Shapes: T audio tokens, C width of the tower. A tower is a tuple of layers, the projector last.
"""

from __future__ import annotations

import math
from fractions import Fraction

from mfu_jax.flops.analytic.components import Component, Layer
from mfu_jax.flops.analytic.matmuls import (
    Components,
    norm,
    projection,
    short_convolution,
    table,
    vector,
)
from mfu_jax.flops.analytic.shapes.hf_decoder import HfDecoderShape
from mfu_jax.flops.analytic.towers.gemma4_vision import gated_vision_transformer
from mfu_jax.flops.masks import LocalBlocks

Tower = tuple[Layer, ...]

# MobileNet-V5 as Gemma 3n takes it from timm 1.0, which no config describes: weights, multiply-adds
# of an image of 768 × 768 pixels (the only size its processor makes), tokens that become of it.
MOBILENET_V5_300M = 294_126_912
_MOBILENET_MACS = 435_741_474_816
_MOBILENET_TOKENS = 256
# Its first convolution, 3 × 3 from 3 to 64 channels at every other pixel: its input needs no
# gradient.
_STEM_MACS = 9 * 3 * 64 * 384**2


def gemma3n_towers(shape: HfDecoderShape) -> tuple[Tower, ...]:
    """Gemma 3n: MobileNet-V5 and a conformer, each with a table of 128 hard tokens.

    The tables' norms and projections run at every position, and what is no hard token is discarded.
    """
    images = shape.images_per_sequence
    width, audio = shape.hidden_size_for_vit, shape.d_model_for_audio
    stem = Component(name="stem", macs=_STEM_MACS, tokens=images)
    rest = Component(
        name="blocks",
        macs=_MOBILENET_MACS - _STEM_MACS,
        tokens=images,
        parameters=MOBILENET_V5_300M,
    )
    _, tokens = audio_tokens(shape)
    heard = -(-tokens // shape.audio_reduction)
    return (
        (
            Layer(name="vision/stem", components=(stem,)),
            Layer(name="vision/mobilenet", components=(rest,)),
            Layer(
                name="vision/projector",
                components=_hard_and_soft_tokens(
                    shape.vision_vocab, width, shape.emb_dim, _MOBILENET_TOKENS * images
                ),
            ),
        ),
        (
            *conformer(shape),
            Layer(
                name="audio/projector",
                components=_hard_and_soft_tokens(shape.audio_vocab, audio, shape.emb_dim, heard),
            ),
        ),
    )


def _hard_and_soft_tokens(rows: int, width: int, out: int, soft: int) -> Components:
    """One projection, of the tower's tokens and of the table's, one for each position."""
    shared = projection("projection", width, out, tokens=soft)
    return (
        shared,
        table("hard_tokens", rows, width),
        norm("norms", width, copies=2),
        shared.replace(name="hard_projection", tokens=None, parameters=0),
    )


def gemma4_towers(shape: HfDecoderShape) -> tuple[Tower, ...]:
    """Gemma 4: a vision transformer and a conformer, as far as the config has them."""
    towers: list[Tower] = []
    if shape.hidden_size_for_vit:
        towers.append(
            gated_vision_transformer(
                shape,
                heads=shape.vision_heads,
                kv_heads=shape.vision_kv_heads,
                head_dim=shape.vision_head_dim,
                pooling=shape.vision_pooling,
            )
        )
    if shape.d_model_for_audio:
        _, tokens = audio_tokens(shape)
        heard = projection("projection", shape.output_dim_for_audio, shape.emb_dim, tokens=tokens)
        towers.append((*conformer(shape), Layer(name="audio/projector", components=(heard,))))
    return tuple(towers)


def audio_tokens(shape: HfDecoderShape) -> tuple[int, int]:
    """Positions in time after each of two convolutions that halve it."""
    first = math.ceil(shape.audio_frames_per_sequence / 2)
    return first, math.ceil(first / 2)


def conformer(shape: HfDecoderShape) -> tuple[Layer, ...]:
    """Two strided convolutions over mel bins, then conformer layers of width C, without projector.

    Per layer two MLPs of 4·C, attention inside overlapping blocks, and a gated depthwise
    convolution. Scores have a second term, queries · relative positions, ``[T, C] @ [C, R]``, whose
    keys ``[R, C] @ [C, C]`` are the same for every sequence of a batch.
    """
    width, (first, second) = shape.d_model_for_audio, shape.audio_channels
    halved, tokens = audio_tokens(shape)
    bins = math.ceil(shape.num_mel_bins_for_audio / 2)
    fewer = math.ceil(bins / 2)
    past, future, relative = shape.audio_past, shape.audio_future, shape.audio_relative_positions

    def scores(name: str, keys: int) -> Component:
        mask = LocalBlocks(tokens, shape.audio_chunk, keys, past=past, future=future)
        return Component(name=f"attention/{name}", kind="attention", macs=width, mask=mask)

    shared = projection("attention/relative_proj", width, width, tokens=1 if tokens else 0)
    block = (
        projection("ffw", width, 4 * width, copies=4, tokens=tokens),
        projection("attention/qkvo", width, width, copies=4, tokens=tokens),
        shared.replace(
            macs=Fraction(relative * shared.macs) / shape.per_device_batch_size,
            left_gradient=False,  # the positions are constants
        ),
        vector("attention/scale", width // shape.audio_heads),
        scores("scores_qk", shape.audio_context),
        scores("scores_relative", relative),
        scores("scores_pv", shape.audio_context),
        projection("convolution/linear", width, width, copies=3, tokens=tokens),
        short_convolution("convolution/depthwise", shape.audio_kernel, width, tokens=tokens),
        norm("norms", width, copies=9),
    )
    layers = Layer(name="audio/layers", components=block, repeats=shape.encoder_layers_for_audio)
    out = shape.output_dim_for_audio
    closing = projection("output_proj", width, out, bias=True, tokens=tokens)
    return (
        Layer(
            name="audio/entry",
            components=(projection("conv_0", 9, first, tokens=halved * bins),),
        ),
        Layer(
            name="audio/convolutions",
            components=(
                projection("conv_1", 9 * first, second, tokens=tokens * fewer),
                norm("norms", first + second),
                projection("linear", second * fewer, width, tokens=tokens),
            ),
        ),
        layers,
        *((Layer(name="audio/output", components=(closing,)),) if out else ()),
    )
