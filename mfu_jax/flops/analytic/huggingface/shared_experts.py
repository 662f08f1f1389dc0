"""Decoders whose experts have their own width, most with shared experts and windows."""

from __future__ import annotations

from mfu_jax.flops.analytic.huggingface.common import (
    decoder,
    every,
    experts,
    heads,
    layer_types,
    model_type,
    moe_where,
    needs_trace,
    shared_expert,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("ernie4_5_moe")
def ernie4_5_moe(c: Fields) -> ModelConfig:
    """One switch for all biases; experts in every n-th layer of a range, selected with a bias."""
    bias, layers = c.flag("use_bias"), c.size("num_hidden_layers")
    first, step = c.size("moe_layer_start_index", zero=True), c.size("moe_layer_interval")
    end = c.get("moe_layer_end_index")
    last = layers - 1 if end in (-1, None) else c.size("moe_layer_end_index", zero=True)
    return decoder(
        c,
        attention_bias=bias,
        use_bias=bias,
        head_bias=bias,
        feed_forward_types=moe_where(c, lambda i: (i + 1) % step == 0 and first <= i <= last),
        shared_experts=c.optional_size("moe_num_shared_experts"),
        routed_bias=True,
        **experts(c, "moe_num_experts", used="moe_k"),
    )


@model_type("flint")
def flint(c: Fields) -> ModelConfig:
    """One sink per head; full attention in layers 0, 1, 5, 9, … and the last; a shared expert."""
    layers, step = c.size("num_hidden_layers"), c.size("decoder_sparse_step")
    dense = c.list_of(int, "mlp_only_layers")
    skipped = [0, 1] if dense is None else dense
    full = {0, 1, layers - 1}
    return decoder(
        c,
        qk_norm="head",
        attention_sinks=True,
        layer_types=layer_types(c, lambda i: FULL if i in full or i % 4 == 1 else SLIDING),
        feed_forward_types=moe_where(c, lambda i: i not in skipped and (i + 1) % step == 0),
        **shared_expert(c, "shared_expert_intermediate_size"),
        **experts(c, "num_experts"),
    )


@model_type("afmoe")
def afmoe(c: Fields) -> ModelConfig:
    """A gate as wide as the heads; norms before and after; a bias helps select the experts."""
    interval, dense = c.size("global_attn_every_n_layers"), c.size("num_dense_layers", zero=True)
    attention = heads(c)
    return decoder(
        c,
        norms_per_layer=4,
        qk_norm="head",
        attention_gate_width=attention["head_dim"],
        layer_types=layer_types(c, every(interval, FULL, SLIDING)),
        feed_forward_types=moe_where(c, lambda i: i >= dense),
        shared_experts=c.optional_size("num_shared_experts"),
        routed_bias=True,
        **experts(c, "num_experts"),
        **attention,
    )


@model_type("laguna")
def laguna(c: Fields) -> ModelConfig:
    """One gate per head or channel; a shared expert; a bias helps select the experts."""
    if len(set(c.list_of(int, "num_attention_heads_per_layer") or [0])) > 1:
        c.fail("num_attention_heads_per_layer", "expected the same number in each layer")
    attention = heads(c)
    return decoder(
        c,
        qk_norm="head",
        attention_gate_width=1 if c.get("gating") in (True, "per-head") else attention["head_dim"],
        layer_types=layer_types(c, lambda _: FULL),
        feed_forward_types=moe_where(c, lambda i: i >= 1),
        routed_bias=True,
        **shared_expert(c, "shared_expert_intermediate_size"),
        **experts(c, "num_experts"),
        **attention,
    )


@model_type("beam")
def beam(c: Fields) -> ModelConfig:
    """One gate with a bias per head; norms before and after each block; no shared expert."""
    attention, layers = heads(c), c.size("num_hidden_layers")
    return decoder(
        c,
        norms_per_layer=4,
        qk_norm="head",
        attention_gate_width=attention["head_dim"],
        layer_types=layer_types(
            c, lambda i: FULL if (i + 1) % 6 == 0 or i == layers - 1 else SLIDING
        ),
        feed_forward_types=moe_where(c, lambda i: i >= 3),
        further_vectors=layers * attention["num_query_heads"],
        **experts(c, "num_experts"),
        **attention,
    )


@model_type("mimo_v2_flash")
def mimo_v2_flash(c: Fields) -> ModelConfig:
    """Values narrower than keys; windowed layers have twice the key/value heads, and sinks."""
    attention = heads(c)
    if attention["num_query_heads"] % (doubled := 2 * attention["num_kv_heads"]):
        c.fail("num_key_value_heads", f"expected num_attention_heads to be a multiple of {doubled}")
    window = c.optional_size("sliding_window_size")
    return decoder(
        c,
        attention_output_bias=False,
        attention_sinks=True,
        sinks_in_windows=True,
        sliding_kv_heads=doubled,
        value_head_dim=c.size("v_head_dim"),
        sliding_window_size=window + 1 if window else c.size("sliding_window"),
        layer_types=layer_types(c, lambda i: FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING),
        feed_forward_types=moe_where(c, lambda i: i >= 1),
        **experts(c, "n_routed_experts"),
        **attention,
    )


@model_type("minimax_m3_vl_text")
def minimax_m3_vl_text(c: Fields) -> ModelConfig:
    """Norms on queries and keys, a shared expert; no layers whose indexer selects key blocks."""
    needs_trace(c, "sparse_attention_config")
    sparse = c.list_of(int, "moe_layer_freq")
    kinds = layer_types(c, lambda _: FULL)
    if set(kinds) != {FULL}:
        c.fail("layer_types", "expected full_attention only; --trace counts the others")
    return decoder(
        c,
        qk_norm="head",
        layer_types=kinds,
        mlp_dim=c.size("dense_intermediate_size"),
        feed_forward_types=moe_where(c, lambda i: sparse is None or sparse[i : i + 1] != [0]),
        **shared_expert(c),
        **experts(c, "num_local_experts", "intermediate_size"),
    )


@model_type("cohere2_moe")
def cohere2_moe(c: Fields) -> ModelConfig:
    """One norm for attention and experts in parallel; the first layers may be dense."""
    dense, hidden = c.optional_size("first_k_dense_replace"), c.size("intermediate_size")
    prefix, rest = c.size("prefix_dense_sliding_window_pattern"), c.size("sliding_window_pattern")

    def kind(i: int) -> str:
        interval, index = (prefix, i) if i < dense else (rest, i - dense)
        return every(interval, FULL, SLIDING)(index)

    return decoder(
        c,
        norms_per_layer=1,
        mlp_dim=c.size("prefix_dense_intermediate_size", hidden),
        layer_types=layer_types(c, kind),
        feed_forward_types=moe_where(c, lambda i: i >= dense),
        shared_experts=c.optional_size("num_shared_experts"),
        **experts(c, "num_experts", "intermediate_size"),
    )
