"""Vision towers of Gemma 3, Llama 4 and Qwen: images → tokens of the decoder's width.

Shapes as in `encoder`. A config gives the size of an image, not the number per sequence.
"""

from __future__ import annotations

import math

from mfu_jax.flops.analytic.components import Layers, layer
from mfu_jax.flops.analytic.formulas import Components, norm, projection, table, vector
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.towers.encoder import patch_embedding, vision_layers


def siglip(config: ModelConfig) -> Layers:
    """Gemma 3: SigLIP, its tokens averaged to `image_tokens` or 4 × 4, a norm and a projection.

    SigLIP's own pooling head, if a config.json has one, is not used: weights without FLOPs.
    """
    vision = config.vision
    width, images = vision.hidden_size_for_vit, config.step.images_per_sequence
    rows, columns = vision.patch_grid
    tokens, hidden = rows * columns, vision.intermediate_size_for_vit
    pooled = vision.image_tokens or (rows // 4) * (columns // 4)
    unread: Components = ()
    if vision.vision_pooling_head:
        unread = (
            vector("pooling/probe", width),
            projection("pooling/attention", width, width, bias=True, copies=4, tokens=0),
            norm("pooling/norm", width, bias=True),
            projection("pooling/wi", width, hidden, bias=True, tokens=0),
            projection("pooling/wo", hidden, width, bias=True, tokens=0),
        )
    return (
        layer(
            "vision/patches",
            patch_embedding(config, tokens * images, bias=True),
            table("vision/positions", tokens, width),
        ),
        vision_layers(config, tokens, images),
        layer("vision/final", norm("norm", width, bias=True), *unread),
        layer(
            "vision/projector",
            norm("norm", width),
            projection("projection", width, config.emb_dim, tokens=pooled * images),
        ),
    )


def llama4_vision(config: ModelConfig) -> Layers:
    """Llama 4: tiles with a class token, pixel shuffle, an MLP, one projection.

    A config.json has a separate field for the width that the projection reads.
    """
    vision = config.vision
    width, side = (
        vision.hidden_size_for_vit,
        vision.tile_size_for_vit // vision.patch_size_for_vit,
    )
    tiles = config.step.images_per_sequence * max(config.step.tiles_per_image, 1)
    patches = side * side
    shuffled = int(patches * vision.pixel_shuffle_ratio_for_vit**2)
    mixed = vision.projector_input_dim_for_vit
    last = vision.projector_output_dim_for_vit
    read = vision.vision_output_dim or last
    return (
        layer(
            "vision/patches",
            patch_embedding(config, patches * tiles, bias=False),
            vector("class_token", width),
            table("vision/positions", patches + 1, width),
            norm("norms", width, bias=True, copies=2),
        ),
        vision_layers(config, patches + 1, tiles),
        layer(
            "vision/pixel_shuffle",
            projection("fc1", vision.intermediate_size_for_vit, mixed, tokens=shuffled * tiles),
            projection("fc2", mixed, last, tokens=shuffled * tiles),
        ),
        layer(
            "vision/projector",
            projection("projection", read, config.emb_dim, tokens=shuffled * tiles),
        ),
    )


def qwen3_vision(config: ModelConfig) -> Layers:
    """Qwen3-VL and Omni: patches of two frames, merged 2 × 2; mergers also for inner layers."""
    vision = config.vision
    width, images = vision.hidden_size_for_vit, config.step.images_per_sequence
    tokens = math.prod(vision.patch_grid)
    joined = width * vision.spatial_merge_size_for_vit**2
    merged = tokens // vision.spatial_merge_size_for_vit**2 * images
    out = vision.out_hidden_size_for_vit or config.emb_dim

    def merger(normed: int) -> Components:
        return (
            norm("norm", normed, bias=True),
            projection("mlp_0", joined, joined, bias=True, tokens=merged),
            projection("mlp_2", joined, out, bias=True, tokens=merged),
        )

    deep = len(vision.deepstack_visual_indexes_for_vit)
    inner = (layer("vision/deepstack_mergers", *merger(joined), repeats=deep),) if deep else ()
    return (
        layer(
            "vision/patches",
            patch_embedding(config, tokens * images, bias=True),
            table("vision/positions", vision.num_position_embeddings_for_vit, width),
        ),
        vision_layers(config, tokens, images),
        *inner,
        layer("vision/projector", *merger(width)),
    )
