"""Families whose layers are all alike, or alternate between two kinds of token mixers."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..attention.rope import Rope
from ..recurrences.delta_net import DeltaNetSpec
from ..stack.block import POST_NORMS, LayerSpec
from . import blocks
from .blocks import ModelSpec, family

# openai/gpt-oss-20b, config.json: swiglu_limit.
_GPT_OSS_LIMIT = 7.0
# Qwen/Qwen3-Next-80B-A3B-Instruct, config.json: partial_rotary_factor.
_ROTATED = 0.25


@family("default")
def default(config: Any) -> ModelSpec:
    """Attention and MLP in parallel, behind one norm (MaxText's DecoderLayer)."""
    model = uniform(config)
    layers = (
        dataclasses.replace(layer, norms=("pre_mixer",), parallel=True) for layer in model.layers
    )
    return dataclasses.replace(model, layers=tuple(layers))


@family("llama2", "mistral", "gpt2", "mixtral")
def uniform(config: Any, **attention: Any) -> ModelSpec:
    """Attention, in a window if the config has one, then MLP or experts."""
    mixer = blocks.window(config, blocks.attention(config, **attention))
    layer = LayerSpec(mixer=mixer, feed_forward=blocks.feed_forward(config))
    return blocks.model(config, (layer,) * config.num_decoder_layers)


@family("gpt3")
def gpt3(config: Any) -> ModelSpec:
    """Biases everywhere."""
    mixer = blocks.attention(config, bias=True, output_bias=True)
    mlp = dataclasses.replace(blocks.mlp(config), bias=True)
    layer = LayerSpec(mixer=mixer, feed_forward=mlp)
    return blocks.model(config, (layer,) * config.num_decoder_layers)


@family("qwen2")
def qwen2(config: Any) -> ModelSpec:
    """Biases on queries, keys and values only."""
    return uniform(config, output_bias=config.use_bias)


@family("qwen3", "qwen3_moe")
def qwen3(config: Any) -> ModelSpec:
    """Norms on each head's queries and keys; for Qwen3-VL, image features in the first layers."""
    if not config.images_per_sequence:
        return uniform(config, qk_norm="head")
    seeing = uniform(config, qk_norm="head", rope=_by_grid(blocks.rope(config), config.head_dim))
    deep = len(config.deepstack_visual_indexes_for_vit)
    layers = tuple(
        dataclasses.replace(layer, deep=number if number <= deep else 0)
        for number, layer in enumerate(seeing.layers, start=1)
    )
    return dataclasses.replace(seeing, layers=layers)


def _by_grid(rope: Rope, head_dim: int) -> Rope:
    """20 of 64 pairs for rows, as many for columns (Qwen3-VL, config.json: mrope_section)."""
    pairs = head_dim // 2
    of_side = pairs * 20 // 64
    return dataclasses.replace(rope, sections=(pairs - 2 * of_side, of_side, of_side))


@family("olmo3")
def olmo3(config: Any) -> ModelSpec:
    """Three local layers, then a global one; norms after the parts, and over all heads."""
    whole = blocks.attention(config, qk_norm="all_heads")
    parts: dict[str, Any] = {"feed_forward": blocks.mlp(config), "norms": POST_NORMS}
    return blocks.model(config, blocks.alternating(config, 4, whole, **parts))


@family("gpt_oss")
def gpt_oss(config: Any) -> ModelSpec:
    """Alternating local and global layers, sinks, biased experts with a clipped swish."""
    whole = blocks.attention(config, bias=True, output_bias=True, sinks=True)
    routed = blocks.router(config, bias="logits", normalize=True)
    experts = blocks.experts(config, routed, bias=True, clamp=_GPT_OSS_LIMIT)
    return blocks.model(config, blocks.alternating(config, 2, whole, feed_forward=experts))


@family("qwen3_next", "qwen3_5")
def qwen3_next(config: Any) -> ModelSpec:
    """Delta nets, gated attention in every n-th layer; the shared expert has a gate."""
    whole = blocks.attention(
        config,
        qk_norm="head",
        output_gate=True,
        rotary_dim=max(2, 2 * round(config.head_dim * _ROTATED / 2)),
    )
    delta = DeltaNetSpec(
        key_heads=config.gdn_num_key_heads,
        value_heads=config.gdn_num_value_heads,
        key_dim=config.gdn_key_head_dim,
        value_dim=config.gdn_value_head_dim,
        kernel=config.gdn_conv_kernel_dim,
        chunk=config.gdn_chunk_size,
    )
    feed_forward: Any = blocks.feed_forward(config)
    if config.num_experts > 1 and config.shared_experts:
        feed_forward = blocks.experts(config, shared_gate=True)
    interval = config.inhomogeneous_layer_cycle_interval
    layers = blocks.alternating(config, interval, whole, delta, feed_forward=feed_forward)
    return blocks.model(config, layers, normalization="zero_centered_rmsnorm")
