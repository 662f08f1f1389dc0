"""Families with experts in some layers, or experts on a latent: Llama 4, Switch, a Qwen."""

from __future__ import annotations

from typing import Any

from ..attention.multi_head import AttentionSpec
from ..feed_forward.compounds import LatentExpertsSpec
from ..stack.block import POST_NORMS, PRE_NORMS, LayerSpec
from . import blocks
from .blocks import ModelSpec, family

# meta-llama/Llama-4-Scout-17B-16E, config.json: floor_scale, attn_scale.
_LLAMA4_TEMPERATURE = (8192, 0.1)


@family("llama4")
def llama4(config: Any) -> ModelSpec:
    """Chunked attention except in every n-th layer; experts in every m-th layer."""
    interval, step = config.nope_layer_interval, max(config.interleave_moe_layer_step, 1)
    routed = blocks.router(config, score="sigmoid", normalize=False)
    experts = blocks.experts(config, routed, weigh_inputs=True)
    whole = blocks.attention(config, qk_norm="", rope=None, temperature=_LLAMA4_TEMPERATURE)
    chunked = blocks.attention(
        config,
        qk_norm="weightless" if config.use_qk_norm else "",
        pattern=blocks.pattern(config, chunk=config.chunk_attn_window_size),
    )
    layers = []
    for i in range(1, config.num_decoder_layers + 1):
        is_global = interval > 0 and i % interval == 0
        mixer: AttentionSpec = whole if is_global else chunked
        dense = i % step != 0
        layers.append(LayerSpec(mixer=mixer, feed_forward=blocks.mlp(config) if dense else experts))
    return blocks.model(config, tuple(layers))


@family("envy")
def envy(config: Any) -> ModelSpec:
    """Switch-style: experts in every n-th layer, a dense MLP in the others."""
    step = max(config.interleave_moe_layer_step, 1)
    experts = blocks.experts(config, blocks.router(config, normalize=False))
    layers = tuple(
        LayerSpec(
            mixer=blocks.attention(config),
            feed_forward=experts if i % step == 0 else blocks.mlp(config),
            norms=(*PRE_NORMS, "post_mixer"),
        )
        for i in range(1, config.num_decoder_layers + 1)
    )
    return blocks.model(config, layers)


@family("qwen3_custom_moe")
def qwen3_custom_moe(config: Any) -> ModelSpec:
    """Attention projects to a narrower latent for the experts; a projection leads back."""
    mixer = LatentExpertsSpec(
        attention=blocks.attention(
            config, qk_norm="head", output_width=config.attention_output_dim
        ),
        experts=blocks.experts(config),
        width=config.moe_expert_input_dim,
    )
    layer = LayerSpec(mixer=mixer, norms=(PRE_NORMS[0], POST_NORMS[0]))
    return blocks.model(config, (layer,) * config.num_decoder_layers)
