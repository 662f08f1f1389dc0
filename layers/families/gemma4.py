"""Gemma 4: wider global layers whose keys double as values; small models reuse layers' keys."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..attentions import AttentionSpec
from ..blocks import POST_NORMS, PRE_NORMS, LayerSpec
from ..experts_beside_mlp import ExpertsBesideMlpSpec
from ..rope import Rope
from . import parts
from .dense import local_global
from .registry import ModelSpec, family

_INTERVAL = 6
# Keyed by use_double_wide_mlp: E4B, E2B. MaxText's files name no period.
_INTERVALS = {False: _INTERVAL, True: 5}


def _kinds(config: Any) -> dict[str, AttentionSpec]:
    """Global layers have their own heads; both have norms on queries, keys and values."""
    local = parts.attention(
        config, qk_norm="head", value_norm=True, pattern=parts.pattern(config, scale=1.0)
    )
    whole = local.replace(
        kv_heads=config.global_num_kv_heads or config.num_kv_heads,
        head_dim=config.global_head_dim or config.head_dim,
        shared_kv=config.share_kv_projections,
        rotary_dim=0,
    )
    near = parts.window(config, local)
    if config.images_per_sequence:  # only in local layers, unlike Gemma 3
        inside = dataclasses.replace(near.pattern, joins_images=True)
        near = near.replace(pattern=inside)
    if config.local_rope_max_timescale:
        near = near.replace(rope=Rope(timescale=config.local_rope_max_timescale))
    return {"global": whole, "local": near}


def _model(config: Any, layers: tuple[LayerSpec, ...], **changes: Any) -> ModelSpec:
    return parts.model(config, layers, embedding_scale=math.sqrt(config.emb_dim), **changes)


@family("gemma4")
def gemma4(config: Any) -> ModelSpec:
    """Five local layers, then a global one; dense, or with experts beside the MLP."""
    kinds = _kinds(config)
    norms: tuple[str, ...] = PRE_NORMS + POST_NORMS
    feed_forward: Any = parts.mlp(config)
    if config.num_experts > 1:
        routed = parts.router(config, scaled=True)
        experts = parts.experts(config, routed, shared=None)
        # The MLP is as wide as MaxText's shared expert: `mlp_dim` for each.
        dense = parts.mlp(config, config.shared_experts * config.mlp_dim)
        feed_forward = ExpertsBesideMlpSpec(experts=experts, mlp=dense)
        norms = ("pre_mixer", *POST_NORMS)  # the part has the other norms itself
    layers = tuple(
        LayerSpec(mixer=kinds[kind], feed_forward=feed_forward, norms=norms, scaled=True)
        for kind in local_global(_INTERVAL, config.num_decoder_layers)
    )
    return _model(config, layers)


@family("gemma4_small")
def gemma4_small(config: Any) -> ModelSpec:
    """E2B and E4B: the last layers borrow keys and values; each layer has its own inputs."""
    interval = config.sliding_window_pattern or _INTERVALS[config.use_double_wide_mlp]
    names = local_global(interval, config.num_decoder_layers)
    kinds = _kinds(config)
    lent = len(names) - config.num_kv_shared_layers
    # The last layer of each kind that computes its own keys and values lends them.
    lenders = {kind: lent - 1 - names[:lent][::-1].index(kind) for kind in set(names[:lent])}
    layers = []
    for i, kind in enumerate(names):
        borrows = i >= lent
        mixer = kinds[kind]
        if borrows:
            mixer = mixer.replace(borrows=kind)
        elif config.num_kv_shared_layers and lenders[kind] == i:
            mixer = mixer.replace(keeps=kind)
        wide = 2 if borrows and config.use_double_wide_mlp else 1
        layers.append(
            LayerSpec(
                mixer=mixer,
                feed_forward=parts.mlp(config, wide * config.mlp_dim),
                norms=PRE_NORMS + POST_NORMS,
                per_layer_width=config.hidden_size_per_layer_input,
                scaled=True,
            )
        )
    return _model(config, tuple(layers), per_layer_width=config.hidden_size_per_layer_input)
