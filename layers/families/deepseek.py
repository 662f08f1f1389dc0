"""DeepSeek V2 to V3.2, Kimi K2: latent attention, dense layers first, then experts.

V4 has window and compressed attention, hashed routing first, and hyper-connections.
"""

from __future__ import annotations

import math
from typing import Any

from ..attention.compressed import CompressedAttentionSpec
from ..attention.latent import LatentAttentionSpec
from ..attention.ops import AttentionPattern
from ..attention.rope import yarn_scale
from ..building import PartSpec
from ..feed_forward.routers import RouterSpec
from ..stack.block import LayerSpec
from ..stack.engram import EngramSpec, table_sizes
from . import blocks
from .blocks import ModelSpec, family

# Layers of V4 whose compressed keys each stand for this many tokens pick them with an indexer.
_INDEXED_RATIO = 4


@family("deepseek")
def deepseek(config: Any) -> ModelSpec:
    """With hyper-connections and n-gram memory if the config has them."""
    streams = blocks.streams(config)
    dense: Any = blocks.mlp(config)
    sparse = dense
    if config.num_experts > 1:
        sparse = blocks.experts(config, deepseek_router(config))
    mixer: PartSpec = blocks.attention(config)
    if config.attention_type == "mla":
        mixer = latent_attention(config)
    engrams = _engrams(config)
    layers = tuple(
        LayerSpec(
            mixer=mixer,
            feed_forward=dense if i < config.first_num_dense_layers else sparse,
            streams=streams,
            engram=engrams.get(i),
        )
        for i in range(config.num_decoder_layers)
    )
    return blocks.model(config, layers, streams=streams)


def deepseek_router(config: Any) -> RouterSpec:
    """V3's sigmoid with a choice bias, or V2's softmax, over groups of experts."""
    score = config.routed_score_func
    if score == "auto":
        score = "sigmoid" if config.routed_bias else "softmax"
    return blocks.router(
        config,
        score=score,
        normalize=config.norm_topk_prob and score == "sigmoid",
        bias="choice" if config.routed_bias else "",
        groups=max(config.n_routing_groups, 0),
        top_groups=max(config.topk_routing_group, 0),
        # The bias balances the load instead of a loss.
        balance_weight=0.0 if config.routed_bias else config.load_balance_loss_weight,
    )


def latent_attention(config: Any) -> LatentAttentionSpec:
    """MLA as the config describes it, sparse if it has an indexer."""
    return LatentAttentionSpec(
        heads=config.num_query_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        rope=blocks.rope(config),
        indexer=blocks.indexer(config) if config.use_indexer else None,
        pattern=AttentionPattern(scale=_scores_scale(config), blocks=blocks.splash_blocks(config)),
    )


def _scores_scale(config: Any) -> float | None:
    """YaRN's temperature on the scores (deepseek-ai/DeepSeek-V3, modeling_deepseek.py)."""
    if config.rope_type != "yarn" or config.rope_attention_scaling:
        return None
    sharper = yarn_scale(blocks.rope(config).factor, config.mscale) ** 2
    return sharper / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)


def _engrams(config: Any) -> dict[int, EngramSpec]:
    """The n-gram memory of each layer that has one."""
    if not config.engram_layers:
        return {}
    sizes = table_sizes(
        config.engram_vocab_bases, config.engram_num_heads, len(config.engram_layers)
    )
    return {
        layer: EngramSpec(
            tables=tables,
            orders=config.engram_max_ngram_size - 1,
            head_dim=config.engram_head_dim,
            kernel=config.engram_kernel_size,
            streams=blocks.streams(config) or 1,
        )
        for layer, tables in zip(config.engram_layers, sizes, strict=True)
    }


@family("deepseek4")
def deepseek4(config: Any) -> ModelSpec:
    """`compress_ratios` lists the kind of each layer's attention."""
    streams = blocks.streams(config)
    routed = blocks.router(config, score="sigmoid", bias="choice" if config.routed_bias else "")
    hashed = blocks.router(config, score="sigmoid", bias="", hashed=True, balance_weight=0.0)
    experts = blocks.experts(config, routed), blocks.experts(config, hashed)
    layers = tuple(
        LayerSpec(
            mixer=_compressed_attention(config, ratio),
            feed_forward=experts[i < config.first_num_hash_layers],
            streams=streams,
        )
        for i, ratio in enumerate(config.compress_ratios[: config.num_decoder_layers])
    )
    return blocks.model(config, layers, streams=streams, hyper_head=streams > 0)


def _compressed_attention(config: Any, ratio: int) -> CompressedAttentionSpec:
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
