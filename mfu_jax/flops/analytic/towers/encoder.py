"""Building blocks of towers: patches, transformer encoder layers, and the gradients they need.

Shapes: N tokens of one image (or audio chunk), C width of the tower, F hidden width of its MLP.
Attention is full: N² pairs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mfu_jax.flops.analytic.components import Component, Layer, Layers, layer
from mfu_jax.flops.analytic.formulas import Components, attention, mlp, norm, projection
from mfu_jax.flops.masks import Full, Mask

if TYPE_CHECKING:
    from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def patch_embedding(config: ModelConfig, tokens: int, *, bias: bool) -> Component:
    """Cuts the pixels into patches and projects each: ``[channels·t·p², C]``."""
    vision = config.vision
    pixels = (
        vision.num_channels_for_vit
        * vision.temporal_patch_size_for_vit
        * vision.patch_size_for_vit**2
    )
    return projection(
        "patch_embedding", pixels, vision.hidden_size_for_vit, bias=bias, tokens=tokens
    )


def vision_layers(config: ModelConfig, tokens: int, copies: int) -> Layer:
    """The transformer layers of a vision tower over `copies` images of `tokens` tokens each."""
    sizes = config.vision
    block = encoder_block(
        sizes.hidden_size_for_vit,
        sizes.intermediate_size_for_vit,
        Full(queries=tokens),
        tokens=tokens,
        copies=copies,
    )
    return layer("vision/layers", *block, repeats=sizes.num_hidden_layers_for_vit)


def encoder_block(
    width: int,
    hidden: int,
    mask: Mask,
    *,
    tokens: int | None = None,
    bias: bool = True,
    copies: int = 1,
) -> Components:
    """One transformer encoder layer over `copies` images (or chunks) of `tokens` tokens each.

    Two LayerNorms; per token, q, k, v, out ``[C, C]`` and a plain MLP ``[C, F], [F, C]``; per
    kept pair, C multiply-adds for each of QKᵀ and PV: H heads of width C/H take as many as one.

    Args:
        tokens: None: all of the sequence's.
        bias: whether q, k and v have a bias.
    """
    all_tokens = None if tokens is None else tokens * copies
    attended = attention(width, 1, 1, width, mask, bias=bias, output_bias=True, tokens=all_tokens)
    return (
        norm("norms", width, bias=True, copies=2),
        *over_images(attended, copies),
        *mlp(width, hidden, gated=False, bias=True, tokens=all_tokens),
    )


def over_images(attended: Components, images: int) -> Components:
    """Attention whose mask covers one image, over `images` of them: as many pairs in each."""
    return tuple(
        part.replace(macs=part.macs * images) if part.mask is not None else part
        for part in attended
    )


def frozen_tower(layers: Layers, *, frozen: bool) -> Layers:
    """The tower's layers with the gradients they need; the last one is the projector.

    A frozen tower runs only forward; its projector needs only its weights' gradient.
    In a trained tower, only the pixels need none.
    """
    first, *middle, last = layers
    if frozen:
        still = tuple(_without(layer, left=True, right=True) for layer in (first, *middle))
        return (*still, dataclasses.replace(last, components=_reading_frozen(last.components)))
    return (_without(first, left=True, right=False), *middle, last)


def _reading_frozen(projector: Components) -> Components:
    """The projector's first matmul needs no gradient of its input, unless a norm with trained
    weights precedes it in the projector."""
    first = next(i for i, part in enumerate(projector) if part.macs)
    if any(part.parameters for part in projector[:first]):
        return projector
    entry = projector[first].replace(left_gradient=False)
    return (*projector[:first], entry, *projector[first + 1 :])


def _without(layer: Layer, *, left: bool, right: bool) -> Layer:
    def change(part: Component) -> Components:
        left_gradient = part.left_gradient and not left
        right_gradient = part.right_gradient and not right
        return (part.replace(left_gradient=left_gradient, right_gradient=right_gradient),)

    return layer.each(change)
