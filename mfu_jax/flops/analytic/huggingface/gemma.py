"""Gemma 2, 3, 3n and 4: norms before and after each block, windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping

from mfu_jax.flops.analytic.huggingface.common import (
    checked_length,
    decoder,
    decoder_of,
    every,
    experts,
    layer_types,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.shapes.hf_decoder import FULL, SLIDING, HfDecoderShape
from mfu_jax.flops.analytic.shapes.hf_gemma import HfGemmaShape


@model_type("gemma2")
def gemma2(c: Fields) -> HfDecoderShape:
    """A local and a global layer in turn."""
    return decoder(
        c,
        norms_per_layer=4,
        layer_types=layer_types(c, every(2, FULL, SLIDING)),
        bidirectional=c.get("use_bidirectional_attention") is True,
    )


@model_type("gemma3_text")
def gemma3_text(c: Fields) -> HfDecoderShape:
    """Five local layers, then a global one; norms on queries and keys."""
    interval = c.size("sliding_window_pattern", 6)
    both_ways = c.get("use_bidirectional_attention") is True
    window = c.optional_size("sliding_window")
    return decoder(
        c,
        norms_per_layer=4,
        qk_norm="head",
        layer_types=layer_types(c, every(interval, FULL, SLIDING)),
        bidirectional=both_ways,
        # The field holds the whole window, which then reaches half to each side.
        sliding_window_size=window // 2 + 1 if both_ways and window else window,
    )


@model_type("gemma3n_text")
def gemma3n_text(c: Fields) -> HfGemmaShape:
    """Four local layers, then a global one; AltUp, Laurel, per-layer inputs, shared keys."""
    widths = c.get("intermediate_size")
    each = (
        checked_length(c, "intermediate_size", c.list_of(int, "intermediate_size") or [])
        if (isinstance(widths, list | tuple))
        else []
    )
    return decoder_of(
        HfGemmaShape,
        c,
        layer_types=layer_types(c, every(5, FULL, SLIDING)),
        mlp_dim=max(each) if each else c.size("intermediate_size"),
        mlp_dims=each,
        altup_inputs=c.size("altup_num_inputs"),
        laurel_rank=c.size("laurel_rank"),
        **_per_layer(c),
    )


@model_type("gemma4_text")
def gemma4_text(c: Fields) -> HfGemmaShape:
    """Five local layers, then a global one with heads of its own; dense, or experts beside."""
    both_ways = c.get("use_bidirectional_attention") == "all"
    window = c.optional_size("sliding_window")
    kinds = layer_types(c, every(6, FULL, SLIDING))
    kinds[-1] = FULL
    equal = c.flag("attention_k_eq_v")
    beside = c.flag("enable_moe_block")
    return decoder_of(
        HfGemmaShape,
        c,
        layer_types=kinds,
        bidirectional=both_ways,
        sliding_window_size=window // 2 + 1 if both_ways and window else window,
        share_kv_projections=equal,
        **_global_heads(c, kinds, equal=equal),
        use_double_wide_mlp=c.flag("use_double_wide_mlp"),
        moe_beside_mlp=beside,
        **(experts(c, "num_experts", used="top_k_experts") if beside else {}),
        **_per_layer(c),
    )


def _global_heads(c: Fields, kinds: list[str], *, equal: bool) -> dict[str, int]:
    """Width and number of the global layers' heads: fields of their own, or per_layer_config."""
    given = c.get("per_layer_config")
    if given is None:
        return {
            "global_head_dim": c.size("global_head_dim", 512),
            "global_num_kv_heads": c.optional_size("num_global_key_value_heads") if equal else 0,
        }
    if not isinstance(given, Mapping):
        c.fail("per_layer_config", "expected an object")
    named = {str(key): value for key, value in given.items()}
    numbers = {int(key) if key.isdecimal() and len(key) < 7 else -1 for key in named}
    if numbers and numbers != {i for i, kind in enumerate(kinds) if kind == FULL}:
        c.fail("per_layer_config", "expected the layers with full attention, or none")
    layers = c.with_values(per_layer_config=named).nested("per_layer_config", c.model_type)
    changed = [layers.nested(key, c.model_type) for key in named]
    sizes = {
        (
            one.size("head_dim") if one.has("head_dim") else 0,
            one.size("num_key_value_heads") if one.has("num_key_value_heads") else 0,
        )
        for one in changed
    }
    if len(sizes) > 1:
        c.fail("per_layer_config", "expected the same sizes in each layer")
    head_dim, kv_heads = sizes.pop() if sizes else (0, 0)
    return {"global_head_dim": head_dim, "global_num_kv_heads": kv_heads}


def _per_layer(c: Fields) -> dict[str, int]:
    shared = c.size("num_kv_shared_layers", 0, zero=True)
    if shared >= c.size("num_hidden_layers"):
        c.fail("num_kv_shared_layers", "expected fewer than num_hidden_layers")
    return {
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": c.optional_size("hidden_size_per_layer_input"),
        "vocab_size_per_layer_input": c.size("vocab_size_per_layer_input", c.size("vocab_size")),
    }
