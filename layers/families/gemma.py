"""Gemma 1 to 3: zero-centred norms, a scaled embedding, tied head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..blocks import POST_NORMS, PRE_NORMS, LayerSpec
from ..rope import Rope
from . import parts
from .dense import local_global
from .registry import ModelSpec, family

# google/gemma-2-9b, config.json: attn_logit_softcapping, final_logit_softcapping.
_GEMMA2_SCORES_CAP, _GEMMA2_LOGITS_CAP = 50.0, 30.0


def gemma_model(config: Any, layers: tuple[LayerSpec, ...], **changes: Any) -> ModelSpec:
    """`layers` between Gemma's scaled embedding and its head."""
    scale = math.sqrt(config.emb_dim)
    options = {"normalization": "zero_centered_rmsnorm", "embedding_scale": scale, **changes}
    return parts.model(config, layers, **options)


@family("gemma")
def gemma(config: Any) -> ModelSpec:
    """All layers alike."""
    layer = LayerSpec(mixer=parts.attention(config), feed_forward=parts.mlp(config))
    return gemma_model(config, (layer,) * config.num_decoder_layers)


@family("gemma2")
def gemma2(config: Any) -> ModelSpec:
    """Alternating local and global layers (`num_decoder_layers` counts pairs), soft caps."""
    whole = parts.attention(config)
    cap = config.attn_logits_soft_cap or _GEMMA2_SCORES_CAP
    whole = whole.replace(pattern=dataclasses.replace(whole.pattern, soft_cap=cap))
    kinds = {"global": whole, "local": parts.window(config, whole)}
    layers = tuple(
        LayerSpec(mixer=kinds[kind], feed_forward=parts.mlp(config), norms=PRE_NORMS + POST_NORMS)
        for kind in local_global(2, 2 * config.num_decoder_layers)
    )
    logits_cap = config.final_logits_soft_cap or _GEMMA2_LOGITS_CAP
    return gemma_model(config, layers, logits_soft_cap=logits_cap)


@family("gemma3")
def gemma3(config: Any) -> ModelSpec:
    """Five local layers, then a global one; norms before and after, and on queries and keys."""
    scores = parts.pattern(config, joins_images=config.images_per_sequence > 0)
    whole = parts.attention(config, qk_norm="head", pattern=scores)
    nearby = parts.window(config, whole)
    # Only the global layers are stretched.
    base = config.local_rope_max_timescale or config.rope_max_timescale
    nearby = nearby.replace(rope=Rope(timescale=base))
    kinds = {"global": whole, "local": nearby}
    layers = tuple(
        LayerSpec(mixer=kinds[kind], feed_forward=parts.mlp(config), norms=PRE_NORMS + POST_NORMS)
        for kind in local_global(6, config.num_decoder_layers)
    )
    return gemma_model(config, layers)
