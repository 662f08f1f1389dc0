"""Diffusion transformers: image patches pass through encoder blocks modulated by a condition."""

from __future__ import annotations

import math

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic import formulas, names
from mfu_jax.flops.analytic.components import Layers, layer
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.masks import Full

_TIMESTEP_FREQUENCIES = 256


def dit(config: ModelConfig) -> Layers:
    """DiT (arXiv 2212.09748): patches of a latent ``[side, side, channels]``, adaLN-Zero blocks.

    The condition (timestep and one of `vocab_size` classes) produces six vectors per block,
    ``[C, 6·C]`` once per image, and two more before the output, which predicts noise and variance.
    Positions are a fixed table, counted as parameters, as the authors do.
    """
    config.require("num_query_heads", "mlp_dim", "image_size_for_vit", "patch_size_for_vit")
    vision, length = config.vision, config.step.max_target_length
    tokens = math.prod(vision.patch_grid)
    if length != tokens:
        raise UserError(
            f"max_target_length={length}: expected {tokens}, the patches of image_size_for_vit="
            f"{vision.image_size_for_vit!r} at patch_size_for_vit={vision.patch_size_for_vit}"
        )
    width = config.emb_dim
    pixels = vision.num_channels_for_vit * vision.patch_size_for_vit**2
    # Noise and timesteps are data and need no gradient.
    patches = formulas.projection("patches", pixels, width, bias=True).replace(left_gradient=False)
    frequencies = formulas.projection(
        "timestep/mlp_0", _TIMESTEP_FREQUENCIES, width, bias=True, tokens=1
    ).replace(left_gradient=False)
    block = (
        formulas.projection("modulation", width, 6 * width, bias=True, tokens=1),
        *formulas.attention(
            width,
            config.attention.num_query_heads,
            config.attention.num_query_heads,
            config.attention.head_dim or width // config.attention.num_query_heads,
            Full(),
            bias=True,
        ),
        *formulas.mlp(width, config.feed_forward.mlp_dim, gated=False, bias=True),
    )
    return (
        layer(
            "embedding",
            patches,
            formulas.table(names.POSITIONS, tokens, width),
            frequencies,
            formulas.projection("timestep/mlp_2", width, width, bias=True, tokens=1),
            formulas.table("classes", config.vocab_size, width),
        ),
        layer("layers", *block, repeats=config.num_decoder_layers),
        layer(
            "head",
            formulas.projection("modulation", width, 2 * width, bias=True, tokens=1),
            formulas.projection("output", width, 2 * pixels, bias=True),
        ),
    )
