"""DeepSeek V4: window and compressed attention, hashed routing first, hyper-connections."""

from __future__ import annotations

from typing import Any

from ..attention.compressed import CompressedAttentionSpec
from ..stack.block import LayerSpec
from . import blocks
from .registry import ModelSpec, family

# Layers whose compressed keys each stand for this many tokens pick them with an indexer.
_INDEXED_RATIO = 4


@family("deepseek4")
def deepseek4(config: Any) -> ModelSpec:
    """`compress_ratios` lists the kind of each layer's attention."""
    streams = blocks.streams(config)
    routed = blocks.router(config, score="sigmoid", bias="choice" if config.routed_bias else "")
    hashed = blocks.router(config, score="sigmoid", bias="", hashed=True, balance_weight=0.0)
    experts = {
        True: blocks.experts(config, hashed),
        False: blocks.experts(config, routed),
    }
    layers = tuple(
        LayerSpec(
            mixer=_attention(config, ratio),
            feed_forward=experts[i < config.first_num_hash_layers],
            streams=streams,
        )
        for i, ratio in enumerate(config.compress_ratios[: config.num_decoder_layers])
    )
    return blocks.model(config, layers, streams=streams, hyper_head=streams > 0)


def _attention(config: Any, ratio: int) -> CompressedAttentionSpec:
    return CompressedAttentionSpec(
        heads=config.num_query_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        out_groups=config.o_groups,
        out_rank=config.o_lora_rank,
        window=config.sliding_window_size,
        ratio=ratio,
        rope=blocks.rope(config),
        rope_dim=config.qk_rope_head_dim or config.head_dim,
        indexer=blocks.indexer(config) if ratio == _INDEXED_RATIO else None,
    )
