"""Qwen3-Next and Qwen3.5: gated delta nets, gated attention in every n-th layer, experts."""

from __future__ import annotations

from typing import Any

from ..building import Spec
from ..recurrences.delta_net import DeltaNetSpec
from ..stack.block import LayerSpec
from . import blocks
from .registry import ModelSpec, family

# Qwen/Qwen3-Next-80B-A3B-Instruct, config.json: partial_rotary_factor.
_ROTATED = 0.25


@family("qwen3_next", "qwen3_5")
def qwen3_next(config: Any) -> ModelSpec:
    """Zero-centred norms; the shared expert has a gate."""
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
    mixers: list[Spec] = [
        delta if i % interval else whole for i in range(1, config.num_decoder_layers + 1)
    ]
    layers = tuple(LayerSpec(mixer=mixer, feed_forward=feed_forward) for mixer in mixers)
    return blocks.model(config, layers, normalization="zero_centered_rmsnorm")
