"""Decoders with uniform layers, or layers that alternate between global and local attention."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Layers, layer, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.model import ModelConfig

# MaxText's GPT-3 files set a position table with this many rows.
_GPT3_POSITIONS = 16384


def dense_decoder(config: ModelConfig) -> Layers:
    """Attention, then MLP or experts, in every layer."""
    return uniform(config)


def qwen3(config: ModelConfig) -> Layers:
    """Like llama, with norms on queries and keys."""
    return uniform(config, qk_norm=True)


def qwen2(config: ModelConfig) -> Layers:
    """Like llama, with a bias on q, k and v only."""
    return uniform(config, output_bias=config.feed_forward.use_bias)


def gpt3(config: ModelConfig) -> Layers:
    """LayerNorm, learned positions, biases everywhere, plain MLP."""
    positions = config.embedding.trainable_position_size or _GPT3_POSITIONS
    return uniform(config.replace(use_bias=True, trainable_position_size=positions))


def uniform(config: ModelConfig, **attention: Any) -> Layers:
    """`num_decoder_layers` layers of attention, MLP or experts, and two norms."""
    block = (
        *blocks.norms(config, 2),
        *blocks.attention(config, blocks.layer_mask(config), **attention),
        *blocks.feed_forward(config),
    )
    return blocks.decoder(config, (layer("layers", *block, repeats=config.num_decoder_layers),))


def gemma2(config: ModelConfig) -> Layers:
    """Alternating local and global layers; MaxText's `num_decoder_layers` counts the pairs."""
    return alternating(config, _local_global(2, 2 * config.num_decoder_layers), norms=4)


def gemma3(config: ModelConfig) -> Layers:
    """Five local layers, then a global one; pre- and post-norms, and norms on queries and keys."""
    return alternating(config, _local_global(6, config.num_decoder_layers), norms=4, qk_norm=True)


def olmo3(config: ModelConfig) -> Layers:
    """Three local layers, then a global one; post-norms, and norms over all query and key heads."""
    return alternating(
        config,
        _local_global(4, config.num_decoder_layers),
        norms=2,
        qk_norm=True,
        qk_norm_all_heads=True,
    )


def gpt_oss(config: ModelConfig) -> Layers:
    """Alternating local and global layers, experts with biases, one sink logit per head."""
    biased = config.replace(use_bias=True, routed_bias=True)
    return alternating(biased, _local_global(2, config.num_decoder_layers), norms=2, sinks=True)


def alternating(
    config: ModelConfig, kinds: tuple[str, ...], *, norms: int, **attention: Any
) -> Layers:
    """Layers of kind ``local`` (sliding window) and ``global``, otherwise alike."""
    masks = {"local": blocks.window_mask(config), "global": blocks.global_mask(config)}

    def block(kind: str) -> tuple[str, Components]:
        return f"{kind}_layers", (
            *blocks.norms(config, norms),
            *blocks.attention(config, masks[kind], **attention),
            *blocks.feed_forward(config),
        )

    return blocks.decoder(config, layers_of(kinds, block))


def _local_global(interval: int, layers: int) -> tuple[str, ...]:
    """Every `interval`-th layer is global, the others local."""
    return tuple("global" if (i + 1) % interval == 0 else "local" for i in range(layers))
