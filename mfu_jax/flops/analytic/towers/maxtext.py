"""Vision and audio towers: encoders beside the decoder, with a projector into its width.

Shapes: N tokens of one image (or audio chunk), C width of the tower, F hidden width of its MLP.
Attention is full: N² pairs. A config says how large an image is, not how many a sequence has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.components import Component, Layer
from mfu_jax.flops.analytic.matmuls import (
    Components,
    attention,
    mlp,
    norm,
    projection,
    table,
    vector,
)
from mfu_jax.flops.analytic.shapes.model import ModelShape
from mfu_jax.flops.analytic.towers.gemma4_vision import gated_vision_transformer
from mfu_jax.flops.masks import Full


def encoder_layers(
    name: str,
    layers: int,
    width: int,
    hidden: int,
    *,
    tokens: int,
    copies: int,
    norm_bias: bool = True,
    bias: bool = True,
) -> Layer:
    """Transformer encoder layers over `copies` images (or chunks) of `tokens` tokens each.

    Per layer and token: q, k, v, out ``[C, C]`` and a plain MLP ``[C, F], [F, C]``; per image N²
    pairs of C multiply-adds for each of QKᵀ and PV, whatever the number of heads.
    """
    heads = attention(
        width,
        1,
        1,
        width,
        Full(queries=tokens),
        bias=bias,
        tokens=tokens * copies,
        name="attention",
    )
    # The pairs are one image's; every image has as many.
    heads = tuple(
        part.replace(macs=part.macs * copies) if part.mask is not None else part for part in heads
    )
    return Layer(
        name=name,
        repeats=layers,
        components=(
            norm("norms", width, bias=norm_bias, copies=2),
            *heads,
            *mlp(width, hidden, gated=False, bias=bias, tokens=tokens * copies),
        ),
    )


def frozen_tower(layers: tuple[Layer, ...], *, frozen: bool) -> tuple[Layer, ...]:
    """The tower's layers with the gradients they need; the last one is the projector.

    Frozen, the tower runs forward only, and the projector needs its weights' gradient but not its
    input's. Trained, only the pixels need none.
    """
    first, *middle, last = layers
    if frozen:
        still = tuple(_without(layer, left=True, right=True) for layer in (first, *middle))
        entry, *rest = last.components
        return (*still, dataclasses.replace(last, components=(*_entry(entry, rest),)))
    return (_without(first, left=True, right=False), *middle, last)


def _entry(entry: Component, rest: list[Component]) -> Components:
    """The projector's first matmul reads what nothing trains."""
    parts, found = [], False
    for part in (entry, *rest):
        parts.append(part if found or not part.macs else part.replace(left_gradient=False))
        found = found or bool(part.macs)
    return tuple(parts)


def _without(layer: Layer, *, left: bool, right: bool) -> Layer:
    return dataclasses.replace(
        layer,
        components=tuple(
            part.replace(
                left_gradient=part.left_gradient and not left,
                right_gradient=part.right_gradient and not right,
            )
            for part in layer.components
        ),
    )


Tower = Callable[[ModelShape], tuple[Layer, ...]]
# decoder_block → the fields that its tower needs, and its layers
_TOWERS: dict[str, tuple[tuple[str, ...], Tower]] = {}

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


def _tower(*blocks: str, needs: tuple[str, ...]) -> Callable[[Tower], Tower]:
    """Registers a tower under the `decoder_block`s that come with it."""

    def register(tower: Tower) -> Tower:
        _TOWERS.update(dict.fromkeys(blocks, ((*_VIT, *needs), tower)))
        return tower

    return register


def towers(shape: ModelShape) -> tuple[Layer, ...]:
    """The layers of the shape's vision and audio towers; none for a text model.

    A step without images needs no sizes of the tower: where they are absent, the text model is all.

    Raises:
        UserError: there are images, but the family has no known tower, or a size of it is absent.
    """
    layers: tuple[Layer, ...] = ()
    if shape.images_per_sequence or (shape.use_multimodal and not _missing_vision(shape)):
        require_towers(shape)
        tower = _TOWERS[shape.decoder_block][1](shape)
        layers += frozen_tower(tower, frozen=shape.freeze_vision_encoder_params)
    if shape.audio_frames_per_sequence or (shape.use_audio and not _missing(shape, _AUDIO)):
        require_towers(shape)
        layers += frozen_tower(audio_tower(shape), frozen=shape.freeze_audio_encoder_params)
    return layers


def require_towers(shape: ModelShape) -> None:
    """Raises a `UserError` where a tower is used that is unknown or lacks a size."""
    if shape.decoder_block.startswith("hf_"):
        return  # shapes of a config.json bring their towers along, see `architectures.hf_towers`
    if shape.use_multimodal or shape.images_per_sequence:
        if shape.decoder_block not in _TOWERS:
            raise UserError(
                f"use_multimodal: decoder_block={shape.decoder_block!r} has no known vision "
                f"tower{nearest(shape.decoder_block, _TOWERS)}; known are "
                f"{', '.join(sorted(_TOWERS))}; use_multimodal=false counts the text model"
            )
        shape.require(*_TOWERS[shape.decoder_block][0])
    if shape.use_audio or shape.audio_frames_per_sequence:
        shape.require(*_AUDIO)


def _missing_vision(shape: ModelShape) -> bool:
    block = _TOWERS.get(shape.decoder_block)
    return block is None or _missing(shape, block[0])


def _missing(shape: ModelShape, names: tuple[str, ...]) -> bool:
    return any(not getattr(shape, name) for name in names)


def _image_side(shape: ModelShape) -> tuple[int, int]:
    size = shape.image_size_for_vit
    height, width = size if isinstance(size, tuple) else (size, size)
    return height // shape.patch_size_for_vit, width // shape.patch_size_for_vit


def _patches(shape: ModelShape, tokens: int, *, bias: bool) -> Component:
    """Cuts the pixels into patches and projects each: ``[channels·t·p², C]``."""
    pixels = (
        shape.num_channels_for_vit * shape.temporal_patch_size_for_vit * shape.patch_size_for_vit**2
    )
    return projection(
        "patch_embedding", pixels, shape.hidden_size_for_vit, bias=bias, tokens=tokens
    )


@_tower("gemma3", needs=("image_size_for_vit",))
def siglip(shape: ModelShape) -> tuple[Layer, ...]:
    """Gemma 3: SigLIP, its tokens averaged 4 × 4, one projection."""
    width, images = shape.hidden_size_for_vit, shape.images_per_sequence
    rows, columns = _image_side(shape)
    tokens = rows * columns
    pooled = (rows // 4) * (columns // 4)
    return (
        Layer(
            name="vision/patches",
            components=(
                _patches(shape, tokens * images, bias=True),
                table("vision/positions", tokens, width),
            ),
        ),
        encoder_layers(
            "vision/layers",
            shape.num_hidden_layers_for_vit,
            width,
            shape.intermediate_size_for_vit,
            tokens=tokens,
            copies=images,
        ),
        Layer(name="vision/final", components=(norm("norm", width, bias=True),)),
        Layer(
            name="vision/projector",
            components=(
                norm("norm", width),
                projection("projection", width, shape.emb_dim, tokens=pooled * images),
            ),
        ),
    )


@_tower(
    "llama4",
    needs=("tile_size_for_vit", "projector_input_dim_for_vit", "projector_output_dim_for_vit"),
)
def llama4_vision(shape: ModelShape) -> tuple[Layer, ...]:
    """Llama 4: tiles with a class token, pixel shuffle, an MLP, one projection."""
    width, side = shape.hidden_size_for_vit, shape.tile_size_for_vit // shape.patch_size_for_vit
    tiles = shape.images_per_sequence * max(shape.tiles_per_image, 1)
    patches = side * side
    shuffled = int(patches * shape.pixel_shuffle_ratio_for_vit**2)
    mixed = shape.projector_input_dim_for_vit
    last = shape.projector_output_dim_for_vit
    return (
        Layer(
            name="vision/patches",
            components=(
                _patches(shape, patches * tiles, bias=False),
                vector("class_token", width),
                table("vision/positions", patches + 1, width),
                norm("norms", width, bias=True, copies=2),
            ),
        ),
        encoder_layers(
            "vision/layers",
            shape.num_hidden_layers_for_vit,
            width,
            shape.intermediate_size_for_vit,
            tokens=patches + 1,
            copies=tiles,
        ),
        Layer(
            name="vision/pixel_shuffle",
            components=(
                projection("fc1", shape.intermediate_size_for_vit, mixed, tokens=shuffled * tiles),
                projection("fc2", mixed, last, tokens=shuffled * tiles),
            ),
        ),
        Layer(
            name="vision/projector",
            components=(projection("projection", last, shape.emb_dim, tokens=shuffled * tiles),),
        ),
    )


@_tower(
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    needs=(
        "image_size_for_vit",
        "spatial_merge_size_for_vit",
        "num_position_embeddings_for_vit",
    ),
)
def qwen3_vision(shape: ModelShape) -> tuple[Layer, ...]:
    """Qwen3-VL and Omni: patches of two frames, 2 × 2 merged; mergers of inner layers too."""
    width, images = shape.hidden_size_for_vit, shape.images_per_sequence
    tokens = math.prod(_image_side(shape))
    joined = width * shape.spatial_merge_size_for_vit**2
    merged = tokens // shape.spatial_merge_size_for_vit**2 * images
    out = shape.out_hidden_size_for_vit or shape.emb_dim

    def merger(normed: int) -> Components:
        return (
            norm("norm", normed, bias=True),
            projection("mlp_0", joined, joined, bias=True, tokens=merged),
            projection("mlp_2", joined, out, bias=True, tokens=merged),
        )

    deep = len(shape.deepstack_visual_indexes_for_vit)
    inner = (
        (Layer(name="vision/deepstack_mergers", components=merger(joined), repeats=deep),)
        if deep
        else ()
    )
    return (
        Layer(
            name="vision/patches",
            components=(
                _patches(shape, tokens * images, bias=True),
                table("vision/positions", shape.num_position_embeddings_for_vit, width),
            ),
        ),
        encoder_layers(
            "vision/layers",
            shape.num_hidden_layers_for_vit,
            width,
            shape.intermediate_size_for_vit,
            tokens=tokens,
            copies=images,
        ),
        *inner,
        Layer(name="vision/projector", components=merger(width)),
    )


@_tower(
    "gemma4",
    needs=(
        "image_size_for_vit",
        "num_attention_heads_for_vit",
        "num_position_embeddings_for_vit",
    ),
)
def gemma4_vision(shape: ModelShape) -> tuple[Layer, ...]:
    """Gemma 4's larger models: 3 × 3 tokens averaged, then scaled and shifted by learned values."""
    heads, width = shape.num_attention_heads_for_vit, shape.hidden_size_for_vit
    *layers, projector = gated_vision_transformer(
        shape, heads=heads, kv_heads=heads, head_dim=width // heads, pooling=3
    )
    learned = Layer(name="vision/final", components=(vector("standardize", 2 * width),))
    return (*layers, learned, projector)


def audio_tower(shape: ModelShape) -> tuple[Layer, ...]:
    """Qwen3-Omni's audio encoder: three strided convolutions over chunks of mel frames, full
    attention inside a chunk, two projections.

    A 3 × 3 convolution from c to d channels costs 9·c·d multiply-adds at each output position.
    """
    width, channels = shape.d_model_for_audio, shape.downsample_hidden_size_for_audio
    bins, frames = shape.num_mel_bins_for_audio, 2 * shape.n_window_for_audio
    chunks = shape.audio_frames_per_sequence // frames
    convolutions = []
    for i, inputs in enumerate((1, channels, channels)):
        bins, frames = (bins + 1) // 2, (frames + 1) // 2
        positions = bins * frames * chunks
        name = f"convolution_{i + 1}"
        convolutions.append(projection(name, 9 * inputs, channels, bias=True, tokens=positions))
    tokens = frames * chunks
    return (
        Layer(name="audio/convolutions", components=tuple(convolutions)),
        Layer(
            name="audio/entry",
            components=(projection("conv_out", channels * bins, width, tokens=tokens),),
        ),
        encoder_layers(
            "audio/layers",
            shape.encoder_layers_for_audio,
            width,
            shape.encoder_ffn_dim_for_audio,
            tokens=frames,
            copies=chunks,
        ),
        Layer(name="audio/final", components=(norm("norm", width, bias=True),)),
        Layer(
            name="audio/projector",
            components=(
                projection("proj1", width, width, bias=True, tokens=tokens),
                projection("proj2", width, shape.output_dim_for_audio, bias=True, tokens=tokens),
            ),
        ),
    )
