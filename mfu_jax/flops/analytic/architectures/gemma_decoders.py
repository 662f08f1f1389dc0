"""Gemma 4: wider global layers whose keys are also values; small models reuse layers' keys.

Also Gemma 3n: per-layer inputs and borrowed keys, plus AltUp and Laurel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mfu_jax.flops.analytic import formulas
from mfu_jax.flops.analytic.architectures import blocks
from mfu_jax.flops.analytic.architectures.generic_decoder import (
    kinds_of_layers,
    mask_of_layer,
)
from mfu_jax.flops.analytic.components import Component, Layers, layer, layers_of
from mfu_jax.flops.analytic.formulas import Components
from mfu_jax.flops.analytic.model_configs.layers import FULL
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.masks import Full, Mask

_INTERVAL = 6
# By use_double_wide_mlp: E4B, E2B. MaxText's files do not state the interval.
_SMALL_INTERVALS = {False: _INTERVAL, True: 5}


def gemma4(config: ModelConfig) -> Layers:
    """Five local layers, then a global one with its own heads; a dense MLP, or also experts."""
    masks = {False: blocks.window_mask(config), True: blocks.global_mask(config)}
    if config.experts.num_experts > 1:
        # The shared expert is as wide as a dense MLP would be.
        routed = blocks.moe(config, shared_dim=config.feed_forward.mlp_dim)
        feed_forward = (*routed, *_expert_scales(config))
    else:
        feed_forward = blocks.mlp(config)

    def block(is_global: bool) -> tuple[str, Components]:
        return "global_layers" if is_global else "local_layers", (
            *blocks.norms(config, 4),
            formulas.vector("layer_scale", 1),
            *_attention(config, masks[is_global], is_global=is_global),
            *feed_forward,
        )

    kinds = ((i + 1) % _INTERVAL == 0 for i in range(config.num_decoder_layers))
    return blocks.decoder(config, layers_of(kinds, block))


def gemma4_small(config: ModelConfig) -> Layers:
    """E2B and E4B: the last layers reuse keys and values; each layer has its own inputs."""
    masks = {False: blocks.window_mask(config), True: blocks.global_mask(config)}
    is_wide = config.feed_forward.use_double_wide_mlp
    interval = config.attention.sliding_window_pattern or _SMALL_INTERVALS[is_wide]
    first_shared = config.num_decoder_layers - config.attention.num_kv_shared_layers
    width, ple = config.emb_dim, config.embedding.hidden_size_per_layer_input

    def block(kind: tuple[bool, bool]) -> tuple[str, Components]:
        is_global, borrowed = kind
        name = "global_layers" if is_global else "local_layers"
        wide = borrowed and config.feed_forward.use_double_wide_mlp
        return f"{name}_shared_kv" if borrowed else name, (
            *blocks.norms(config, 5 if ple else 4),
            formulas.vector("layer_scale", 1),
            *_attention(config, masks[is_global], is_global=is_global, borrowed_kv=borrowed),
            *blocks.mlp(config, (1 + wide) * config.feed_forward.mlp_dim),
            *_per_layer_input(width, ple),
        )

    kinds = (
        ((i + 1) % interval == 0, 0 < first_shared <= i) for i in range(config.num_decoder_layers)
    )
    layers = layers_of(kinds, block)
    return blocks.decoder(config, layers, embedding=_per_layer_embedding(config))


def gemma_by_layer(config: ModelConfig) -> Layers:
    """Gemma 3n and 4 from a config.json, which lists the kind and MLP width of each layer."""
    joined = _altup_projections(config)
    return blocks.decoder(
        config,
        _listed_layers(config),
        embedding=(*_per_layer_embedding(config), *joined),
        closing=joined,
    )


def diffusion_gemma(config: ModelConfig) -> Layers:
    """An encoder of the text and, with the same weights, a decoder of the block after it.

    Each token of the block (the canvas) sees the keys that the encoder kept, and the whole block.
    Nothing reads the encoder's last output: in its last layer, which is global, only keys and
    values have a gradient. Self-conditioning reads zeros, as it does without earlier logits.
    """
    canvas, length = config.attention.causal_block_size, config.step.max_target_length
    layers, windows = _listed_layers(config), config.attention.sliding_window_size

    def encoding(part: Component, *, is_read: bool = True) -> Components:
        read = is_read or part.name == "attention/k_proj"  # the values are the keys
        weights = {"parameters": 0, "active_parameters": None}
        return (part.replace(left_gradient=read, right_gradient=read, **weights),)

    def decoding(part: Component, kept: int = 0) -> Components:
        if part.mask is None:
            return (part.replace(tokens=canvas),)
        return (part.replace(mask=Full(keys=kept + canvas, queries=canvas)),)

    encoder, decoder = [], []
    for each in layers:
        is_global = each.name == f"{FULL}_layers"
        encoded = dataclasses.replace(each, name=f"encoder_{each.name}")
        encoder.append(
            dataclasses.replace(encoded, repeats=each.repeats - is_global).each(encoding)
        )
        if is_global:
            last = dataclasses.replace(encoded, name="encoder_last_layer", repeats=1)
            encoder.append(last.each(functools.partial(encoding, is_read=False)))
        kept = min(length, windows - 1) if windows and not is_global else length
        decoder.append(each.each(functools.partial(decoding, kept=kept)))
    conditioning = layer(
        "self_conditioning",
        *blocks.norms(config, 1),
        *blocks.mlp(config),
    ).each(decoding)
    *below, top = blocks.decoder(config, (*encoder, conditioning, *decoder))
    return (*(each for each in below if each.repeats), top.each(decoding))


def _listed_layers(config: ModelConfig) -> Layers:
    sizes = config.feed_forward
    first_shared = config.num_decoder_layers - config.attention.num_kv_shared_layers
    kinds = [
        (kind, i >= first_shared, sizes.mlp_dims[i] if sizes.mlp_dims else sizes.mlp_dim)
        for i, (kind, _) in enumerate(kinds_of_layers(config))
    ]

    def block(kind: tuple[str, bool, int]) -> tuple[str, Components]:
        mixer, borrowed, hidden = kind
        wide = borrowed and sizes.use_double_wide_mlp
        mask, bias = mask_of_layer(config, mixer), config.attention.attention_bias
        return f"{mixer}_layers{'_shared_kv' if borrowed else ''}", (
            *_attention(config, mask, is_global=mixer == FULL, borrowed_kv=borrowed, bias=bias),
            *blocks.mlp(config, (1 + wide) * hidden),
            *_extras(config),
        )

    return layers_of(kinds, block)


def _attention(config: ModelConfig, mask: Mask, *, is_global: bool, **changes: Any) -> Components:
    """Norms on queries and keys; global layers have their own heads and may share k and v."""
    sizes = config.attention
    if is_global:
        changes["kv_heads"] = sizes.global_num_kv_heads or sizes.num_kv_heads
        changes["head_dim"] = sizes.global_head_dim or sizes.head_dim
    else:
        changes["shared_kv"] = False
    return blocks.attention(config, mask, qk_norm=True, **changes)


def _expert_scales(config: ModelConfig) -> Components:
    """Norms around the experts, and scales of the router's input and of each expert."""
    return (
        *blocks.norms(config, 3, "moe/norms"),
        formulas.vector("moe/router_scale", config.emb_dim),
        formulas.vector("moe/expert_scale", config.experts.num_experts),
    )


def _extras(config: ModelConfig) -> Components:
    """Components besides attention and MLP: norms, experts, per-layer inputs, Laurel, AltUp."""
    width, ple = config.emb_dim, config.embedding.hidden_size_per_layer_input
    rank, streams = config.stack.laurel_rank, config.stack.altup_inputs
    extras: list[Component] = [*blocks.norms(config, 4 + bool(ple))]
    if config.experts.moe_beside_mlp:
        extras.extend((*blocks.moe(config), *_expert_scales(config)))
    extras.extend(_per_layer_input(width, ple))
    if rank:
        extras.append(formulas.projection("laurel/left", width, rank))
        extras.append(formulas.projection("laurel/right", rank, width))
        extras.append(formulas.norm("laurel/norm", width))
    if streams:
        extras.extend(_altup(width, streams))
    return tuple(extras)


def _per_layer_embedding(config: ModelConfig) -> Components:
    """A table of every layer's inputs ``[V, L·P]``, and a projection ``[D, L·P]`` added to it."""
    sizes = config.embedding
    ple = sizes.hidden_size_per_layer_input
    if not ple:
        return ()
    outputs = config.num_decoder_layers * ple
    return (
        formulas.table(
            "per_layer_tokens", sizes.vocab_size_per_layer_input or config.vocab_size, outputs
        ),
        formulas.projection("per_layer_projection", config.emb_dim, outputs),
        formulas.norm("per_layer_norm", ple),
    )


def _per_layer_input(width: int, ple: int) -> Components:
    """Each layer gates its own inputs ``[D, P]`` and adds them back ``[P, D]``; P may be 0."""
    if not ple:
        return ()
    return (
        formulas.projection("per_layer/gate", width, ple),
        formulas.projection("per_layer/projection", ple, width),
    )


def _altup(width: int, streams: int) -> Components:
    """Alternating updates (arXiv 2301.13310) over n streams: predict, then correct.

    Both read the router ``[D, n]``; from its outputs come ``[n, n²]`` weights for the prediction,
    which mixes the streams (n²·D multiply-adds between activations), and ``[n, n]`` weights for the
    correction, which is elementwise.
    """
    router = formulas.projection("altup/router", width, streams)
    return (
        router.replace(macs=2 * router.macs),
        formulas.projection("altup/prediction", streams, streams**2),
        Component(name="altup/mix", kind="attention", macs=streams**2 * width),
        formulas.projection("altup/correction", streams, streams),
        formulas.norm("altup/norm", width),
        formulas.vector("altup/scale", width),
    )


def _altup_projections(config: ModelConfig) -> Components:
    """Projections into or out of the other streams: ``[D, D]`` each."""
    others = config.stack.altup_inputs - 1
    if others < 1:
        return ()
    width = config.emb_dim
    return (formulas.projection("altup/projections", width, width, copies=others),)
