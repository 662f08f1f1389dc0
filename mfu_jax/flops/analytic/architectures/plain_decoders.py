"""Decoders whose layers differ at most in the mask of attention, or in having experts."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.components import Layers, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.masks import Mask

# MaxText's GPT-3 files set a position table with this many rows.
_GPT3_POSITIONS = 16384


def dense_decoder(config: ModelConfig) -> Layers:
    """Attention, then MLP or experts, in every layer."""
    return _uniform(config)


def default(config: ModelConfig) -> Layers:
    """Attention and MLP in parallel, behind one norm (MaxText's DecoderLayer)."""
    return _uniform(config, norms=1)


def qwen3(config: ModelConfig) -> Layers:
    """Like llama, with norms on queries and keys."""
    return _uniform(config, qk_norm=True)


def qwen2(config: ModelConfig) -> Layers:
    """Like llama, with a bias on q, k and v only."""
    return _uniform(config, output_bias=config.feed_forward.use_bias)


def gpt3(config: ModelConfig) -> Layers:
    """LayerNorm, learned positions, biases everywhere, plain MLP."""
    positions = config.embedding.trainable_position_size or _GPT3_POSITIONS
    return _uniform(config.replace(use_bias=True, trainable_position_size=positions))


def _uniform(config: ModelConfig, **options: Any) -> Layers:
    """`num_decoder_layers` equal layers."""
    kind = "layers", blocks.layer_mask(config), False
    return _decoder(config, [kind] * config.num_decoder_layers, **options)


def gemma2(config: ModelConfig) -> Layers:
    """Alternating local and global layers; MaxText's `num_decoder_layers` counts the pairs."""
    return _local_global(config, 2, 2 * config.num_decoder_layers, norms=4)


def gemma3(config: ModelConfig) -> Layers:
    """Five local layers, then a global one; pre- and post-norms, and norms on queries and keys."""
    return _local_global(config, 6, norms=4, qk_norm=True)


def olmo3(config: ModelConfig) -> Layers:
    """Three local layers, then a global one; post-norms, and norms over all query and key heads."""
    return _local_global(config, 4, qk_norm=True, qk_norm_all_heads=True)


def gpt_oss(config: ModelConfig) -> Layers:
    """Alternating local and global layers, experts with biases, one sink logit per head."""
    return _local_global(config.replace(use_bias=True, routed_bias=True), 2, sinks=True)


def llama4(config: ModelConfig) -> Layers:
    """Chunked attention except in every n-th layer; experts in every m-th layer."""
    interval = config.attention.nope_layer_interval
    masks = {"global": blocks.global_mask(config), "chunked": blocks.chunk_mask(config)}
    kinds = []
    for i, dense in enumerate(_dense_layers(config), 1):
        name = "chunked" if interval <= 0 or i % interval else "global"
        kinds.append((f"{name}_{'dense' if dense else 'moe'}_layers", masks[name], dense))
    # Its query and key norms have no weights.
    return _decoder(config, kinds, qk_norm=False)


def envy(config: ModelConfig) -> Layers:
    """Switch-style: experts in every n-th layer, a dense MLP in the others."""
    names, mask = {True: "dense_layers", False: "moe_layers"}, blocks.global_mask(config)
    kinds = [(names[dense], mask, dense) for dense in _dense_layers(config)]
    return _decoder(config, kinds, norms=3)


def _dense_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has a dense MLP: all but every n-th."""
    step = max(config.experts.interleave_moe_layer_step, 1)
    return [i % step != 0 for i in range(1, config.num_decoder_layers + 1)]


def _local_global(
    config: ModelConfig, interval: int, layers: int | None = None, **options: Any
) -> Layers:
    """Every `interval`-th layer is global, the others local (with a sliding window)."""
    local = "local_layers", blocks.window_mask(config), False
    wide = "global_layers", blocks.global_mask(config), False
    numbers = range(1, (layers or config.num_decoder_layers) + 1)
    return _decoder(config, [local if i % interval else wide for i in numbers], **options)


def _decoder(
    config: ModelConfig, kinds: list[tuple[str, Mask, bool]], *, norms: int = 2, **attention: Any
) -> Layers:
    """Layers of attention, then MLP or experts, that are otherwise alike.

    Args:
        kinds: the name of each layer, its mask, and whether it is dense in a model with experts.
        norms: over the model width, per layer.
        attention: options of `formulas.attention`.
    """

    def block(kind: tuple[str, Mask, bool]) -> tuple[str, Components]:
        name, mask, dense = kind
        return name, (
            *blocks.norms(config, norms),
            *blocks.attention(config, mask, **attention),
            *blocks.feed_forward(config, dense=dense),
        )

    return blocks.decoder(config, layers_of(kinds, block))
