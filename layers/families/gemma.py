"""Gemma: a scaled embedding, tied head; zero-centred norms in Gemma 1 to 3.

Gemma 4 has wider global layers whose keys double as values; its small models reuse layers' keys.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..attention.multi_head import AttentionSpec
from ..attention.rope import Rope
from ..feed_forward.compounds import ExpertsBesideMlpSpec
from ..stack.block import POST_NORMS, PRE_NORMS, LayerSpec
from . import blocks
from .blocks import ModelSpec, family

# google/gemma-2-9b, config.json: attn_logit_softcapping, final_logit_softcapping.
_GEMMA2_SCORES_CAP, _GEMMA2_LOGITS_CAP = 50.0, 30.0

_GEMMA4_INTERVAL = 6
# Keyed by use_double_wide_mlp: E4B, E2B. MaxText's files name no period.
_GEMMA4_INTERVALS = {False: _GEMMA4_INTERVAL, True: 5}


def gemma_model(config: Any, layers: tuple[LayerSpec, ...], **changes: Any) -> ModelSpec:
    """`layers` between Gemma's scaled embedding and its head."""
    scale = math.sqrt(config.emb_dim)
    options = {"normalization": "zero_centered_rmsnorm", "embedding_scale": scale, **changes}
    return blocks.model(config, layers, **options)


@family("gemma")
def gemma(config: Any) -> ModelSpec:
    """All layers alike."""
    layer = LayerSpec(mixer=blocks.attention(config), feed_forward=blocks.mlp(config))
    return gemma_model(config, (layer,) * config.num_decoder_layers)


@family("gemma2")
def gemma2(config: Any) -> ModelSpec:
    """Alternating local and global layers (`num_decoder_layers` counts pairs), soft caps."""
    cap = config.attn_logits_soft_cap or _GEMMA2_SCORES_CAP
    whole = blocks.attention(config, pattern=blocks.pattern(config, soft_cap=cap))
    parts: dict[str, Any] = {"feed_forward": blocks.mlp(config), "norms": PRE_NORMS + POST_NORMS}
    count = 2 * config.num_decoder_layers
    logits_cap = config.final_logits_soft_cap or _GEMMA2_LOGITS_CAP
    layers = blocks.alternating(config, 2, whole, count=count, **parts)
    return gemma_model(config, layers, logits_soft_cap=logits_cap)


@family("gemma3")
def gemma3(config: Any) -> ModelSpec:
    """Five local layers, then a global one; norms before and after, and on queries and keys."""
    scores = blocks.pattern(config, joins_images=config.images_per_sequence > 0)
    whole = blocks.attention(config, qk_norm="head", pattern=scores)
    # Only the global layers are stretched.
    base = config.local_rope_max_timescale or config.rope_max_timescale
    nearby = blocks.window(config, whole).replace(rope=Rope(timescale=base))
    parts: dict[str, Any] = {"feed_forward": blocks.mlp(config), "norms": PRE_NORMS + POST_NORMS}
    return gemma_model(config, blocks.alternating(config, 6, whole, nearby, **parts))


def _gemma4_mixers(config: Any) -> tuple[AttentionSpec, AttentionSpec]:
    """Global layers, which have their own heads, and local ones; norms on queries, keys, values."""
    local = blocks.attention(
        config, qk_norm="head", value_norm=True, pattern=blocks.pattern(config, scale=1.0)
    )
    whole = local.replace(
        kv_heads=config.global_num_kv_heads or config.num_kv_heads,
        head_dim=config.global_head_dim or config.head_dim,
        shared_kv=config.share_kv_projections,
        rotary_dim=0,
    )
    near = blocks.window(config, local)
    if config.images_per_sequence:  # only in local layers, unlike Gemma 3
        inside = dataclasses.replace(near.pattern, joins_images=True)
        near = near.replace(pattern=inside)
    if config.local_rope_max_timescale:
        near = near.replace(rope=Rope(timescale=config.local_rope_max_timescale))
    return whole, near


@family("gemma4")
def gemma4(config: Any) -> ModelSpec:
    """Five local layers, then a global one; dense, or with experts beside the MLP."""
    norms: tuple[str, ...] = PRE_NORMS + POST_NORMS
    feed_forward: Any = blocks.mlp(config)
    if config.num_experts > 1:
        routed = blocks.router(config, scaled=True)
        experts = blocks.experts(config, routed, shared=None)
        # The MLP is as wide as MaxText's shared expert: `mlp_dim` for each.
        dense = blocks.mlp(config, config.shared_experts * config.mlp_dim)
        feed_forward = ExpertsBesideMlpSpec(experts=experts, mlp=dense)
        norms = ("pre_mixer", *POST_NORMS)  # the part has the other norms itself
    parts: dict[str, Any] = {"feed_forward": feed_forward, "norms": norms, "scaled": True}
    layers = blocks.alternating(config, _GEMMA4_INTERVAL, *_gemma4_mixers(config), **parts)
    return gemma_model(config, layers, normalization="rmsnorm")


@family("gemma4_small")
def gemma4_small(config: Any) -> ModelSpec:
    """E2B and E4B: the last layers borrow keys and values; each layer has its own inputs."""
    interval = config.sliding_window_pattern or _GEMMA4_INTERVALS[config.use_double_wide_mlp]
    width = config.hidden_size_per_layer_input
    parts: dict[str, Any] = {
        "norms": PRE_NORMS + POST_NORMS,
        "per_layer_width": width,
        "scaled": True,
    }
    layers = blocks.alternating(config, interval, *_gemma4_mixers(config), **parts)
    lent = len(layers) - config.num_kv_shared_layers
    kinds = ["local" if i % interval else "global" for i in range(1, len(layers) + 1)]
    # The last layer of each kind that computes its own keys and values lends them.
    lenders = {kind: i for i, kind in enumerate(kinds[:lent])} if lent < len(layers) else {}

    def of_place(i: int, kind: str) -> LayerSpec:
        shares = {"borrows": kind} if i >= lent else {}
        if lenders.get(kind) == i:
            shares = {"keeps": kind}
        mixer: Any = layers[i].mixer
        wide = 2 if i >= lent and config.use_double_wide_mlp else 1
        mlp = blocks.mlp(config, wide * config.mlp_dim)
        return dataclasses.replace(layers[i], mixer=mixer.replace(**shares), feed_forward=mlp)

    placed = tuple(of_place(i, kind) for i, kind in enumerate(kinds))
    return gemma_model(config, placed, normalization="rmsnorm", per_layer_width=width)
