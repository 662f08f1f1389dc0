"""Families whose layers are all alike, or alternate between global and local attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..attention.rope import Rope
from ..feed_forward.routers import RouterSpec
from ..stack.block import POST_NORMS, PRE_NORMS, LayerSpec
from . import blocks
from .registry import ModelSpec, family


@family("default", "llama2", "mistral", "gpt2", "mixtral")
def uniform(config: Any, **attention: Any) -> ModelSpec:
    """Attention, in a window if the config has one, then MLP or experts."""
    mixer = blocks.window(config, blocks.attention(config, **attention))
    layer = LayerSpec(mixer=mixer, feed_forward=blocks.feed_forward(config))
    return blocks.model(config, (layer,) * config.num_decoder_layers)


@family("gpt3")
def gpt3(config: Any) -> ModelSpec:
    """Biases everywhere."""
    mixer = blocks.attention(config, bias=True, output_bias=True)
    plain = blocks.mlp(config)
    mlp = type(plain)(hidden=plain.hidden, activations=plain.activations, bias=True)
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
    kinds = {"global": whole, "local": blocks.window(config, whole)}
    layers = tuple(
        LayerSpec(mixer=kinds[kind], feed_forward=blocks.mlp(config), norms=POST_NORMS)
        for kind in local_global(4, config.num_decoder_layers)
    )
    return blocks.model(config, layers)


@family("gpt_oss")
def gpt_oss(config: Any) -> ModelSpec:
    """Alternating local and global layers, sinks, biased experts with a clipped swish."""
    whole = blocks.attention(config, bias=True, output_bias=True, sinks=True)
    kinds = {"global": whole, "local": blocks.window(config, whole)}
    routed: RouterSpec = blocks.router(config, bias="logits", normalize=True)
    experts = blocks.experts(config, routed, bias=True, clamp=_GPT_OSS_LIMIT)
    layers = tuple(
        LayerSpec(mixer=kinds[kind], feed_forward=experts, norms=PRE_NORMS)
        for kind in local_global(2, config.num_decoder_layers)
    )
    return blocks.model(config, layers)


# openai/gpt-oss-20b, config.json: swiglu_limit.
_GPT_OSS_LIMIT = 7.0


def local_global(interval: int, layers: int) -> tuple[str, ...]:
    """Every `interval`-th layer is global, the others local."""
    return tuple("global" if (i + 1) % interval == 0 else "local" for i in range(layers))
