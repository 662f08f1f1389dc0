"""Decoders with Mamba, RWKV, RG-LRU or lightning attention, some also with attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    PLAIN_MLP,
    checked_length,
    decoder,
    every,
    experts,
    heads,
    layer_types,
    model_type,
    moe_where,
    shared_expert,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.hybrids import mamba2_mixer, state_space
from mfu_jax.flops.analytic.huggingface.latent import latent
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("mamba", "falcon_mamba")
def mamba(c: Fields) -> ModelConfig:
    """Mamba-1 layers only: one norm, no feed-forward."""
    layers, width = c.size("num_hidden_layers"), c.size("hidden_size")
    bias, rank = c.flag("use_bias"), c.get("time_step_rank")
    return decoder(
        c,
        num_query_heads=0,
        mlp_dim=0,
        norms_per_layer=1,
        layer_types=("mamba",) * layers,
        feed_forward_types=("none",) * layers,
        mamba_inner=c.size("expand") * width,
        mamba_state=c.size("state_size"),
        mamba_kernel=c.size("conv_kernel"),
        mamba_rank=-(-width // 16) if rank == "auto" else c.size("time_step_rank"),
        mamba_bias=bias,
        mamba_conv_bias=c.flag("use_conv_bias", default=True),
    )


@model_type("granitemoehybrid")
def granitemoehybrid(c: Fields) -> ModelConfig:
    """Mamba-2 and attention as listed; experts plus a shared one, or only the shared one."""
    renamed = {"attention": FULL, "mamba": "mamba2", "linear_attention": "mamba2"}
    kinds = layer_types(c, lambda _: "mamba2", **renamed)
    number = c.optional_size("num_local_experts")
    routed: dict[str, Any] = {}
    if number:
        routed = {
            "feed_forward_types": ("moe",) * len(kinds),
            **experts(c, "num_local_experts", "intermediate_size"),
            **shared_expert(c),
        }
    bias = c.flag("mamba_proj_bias")
    return decoder(
        c,
        layer_types=kinds,
        mlp_dim=c.optional_size("shared_intermediate_size"),
        mamba_output_bias=bias,
        mamba_norm=True,
        **routed,
        **state_space(c, c.size("mamba_expand") * c.size("hidden_size")),
    )


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@model_type("nemotron_h")
def nemotron_h(c: Fields) -> ModelConfig:
    """Each layer is one block: Mamba-2, attention, a plain MLP, or plain experts."""
    pattern = c.text("hybrid_override_pattern")
    blocks = [_BLOCKS.get(letter, letter) for letter in pattern]
    blocks = blocks or c.list_of(str, "layers_block_type") or list(_BLOCKS.values())
    renamed = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": FULL}
    state_heads = c.size("mamba_num_heads")
    inner = state_heads * c.size("mamba_head_dim")
    return decoder(
        c.with_values(num_hidden_layers=len(blocks)),
        # transformers reads neither tie_word_embeddings nor attention_bias.
        logits_via_embedding=False,
        attention_bias=False,
        mlp_activations=PLAIN_MLP,
        norms_per_layer=1,
        layer_types=["none" if b in ("mlp", "moe") else renamed.get(b, b) for b in blocks],
        feed_forward_types=[{"mlp": "dense", "moe": "moe"}.get(b, "none") for b in blocks],
        **mamba2_mixer(c, state_heads, inner, state=c.size("ssm_state_size")),
        moe_expert_input_dim=c.optional_size("moe_latent_size"),
        **shared_expert(c, "moe_shared_expert_intermediate_size"),
        **experts(c, "n_routed_experts"),
    )


@model_type("minimax")
def minimax(c: Fields) -> ModelConfig:
    """Alternating attention and lightning attention; experts in every layer."""
    lightning = "lightning_attention"
    kinds = layer_types(c, lambda i: lightning if i % 2 else FULL, linear_attention=lightning)
    return decoder(
        c,
        layer_types=kinds,
        feed_forward_types=("moe",) * len(kinds),
        **experts(c, "num_local_experts", "intermediate_size"),
    )


@model_type("recurrent_gemma")
def recurrent_gemma(c: Fields) -> ModelConfig:
    """Two recurrent blocks, then windowed attention; the MLP has half the given width."""
    blocks = c.list_of(str, "block_types") or ["recurrent", "recurrent", "attention"]
    renamed = {"recurrent": "recurrent", "attention": SLIDING}
    sizes, width = heads(c), c.size("lru_width", c.size("hidden_size"))
    if width % sizes["num_query_heads"]:
        c.fail("lru_width", "expected a multiple of num_attention_heads")
    layers = c.size("num_hidden_layers")
    return decoder(
        c,
        attention_output_bias=True,
        use_bias=True,
        mlp_dim=c.size("intermediate_size") // 2,
        sliding_window_size=c.size("attention_window_size"),
        layer_types=[renamed[blocks[i % len(blocks)]] for i in range(layers)],
        recurrent_width=width,
        conv_kernel=c.size("conv1d_width"),
        **sizes,
    )


@model_type("kimi_linear")
def kimi_linear(c: Fields) -> ModelConfig:
    """Kimi delta or latent attention, depending on layer; experts after the first layers.

    Kimi K3 also has a gate in latent attention, a full-rank gate in the other, experts of narrower
    width, and weights that choose among the outputs of blocks of layers (attention residuals).
    """
    nested = c.get("linear_attn_config") or {}
    if not isinstance(nested, Mapping):
        c.fail("linear_attn_config", "expected an object")
    inner = c.with_values(**{_KIMI[key]: nested[key] for key in _KIMI if key in nested})
    attended = nested.get("full_attn_layers")

    def kind(i: int) -> str:
        full = i + 1 in attended if isinstance(attended, list) else i > 0 and i % 4 == 0
        return FULL if full else "kimi_delta"

    dense = c.size("first_k_dense_replace", 1, zero=True)
    sizes, width, residuals = latent(c), c.size("hidden_size"), c.get("attn_res_block_size")
    return decoder(
        c,
        logits_via_embedding=False,  # transformers does not read tie_word_embeddings
        layer_types=layer_types(c, kind, linear_attention="kimi_delta"),
        feed_forward_types=moe_where(c, lambda i: i >= dense),
        gdn_num_value_heads=inner.size("linear_num_heads"),
        gdn_value_head_dim=inner.size("linear_head_dim"),
        gdn_conv_kernel_dim=inner.size("linear_conv_kernel_dim"),
        gdn_low_rank_gates=1 if nested.get("use_full_rank_gate") is True else 2,
        attention_gate_width=sizes["v_head_dim"] if c.flag("mla_use_output_gate") else 0,
        moe_expert_input_dim=c.optional_size("routed_expert_hidden_size"),
        latent_norm=True,
        further_vectors=2 * width * (2 * c.size("num_hidden_layers") + 1) if residuals else 0,
        shared_experts=c.optional_size("n_shared_experts"),
        **sizes,
        **experts(c, "num_local_experts"),
    )


_KIMI = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@model_type("bailing_hybrid")
def bailing_hybrid(c: Fields) -> ModelConfig:
    """Like kimi_linear, but the gates have full rank, and attention has one gate per head."""
    group = c.size("layer_group_size")
    dense = c.size("first_k_dense_replace", zero=True)
    return decoder(
        c,
        logits_via_embedding=False,  # transformers does not read tie_word_embeddings
        layer_types=layer_types(c, every(group, FULL, "kimi_delta"), linear_attention="kimi_delta"),
        feed_forward_types=moe_where(c, lambda i: i >= dense),
        attention_gate_width=1,
        gdn_num_value_heads=c.size("num_attention_heads"),
        gdn_value_head_dim=c.size("head_dim"),
        gdn_conv_kernel_dim=c.size("short_conv_kernel_size"),
        shared_experts=c.optional_size("n_shared_experts"),
        **latent(c),
        **experts(c, "num_local_experts"),
    )


@model_type("rwkv")
def rwkv(c: Fields) -> ModelConfig:
    """RWKV-4: time and channel mixing; an extra norm before the first layer."""
    layers, width = c.size("num_hidden_layers"), c.size("hidden_size")
    return decoder(
        c,
        num_query_heads=0,
        normalization="layernorm",
        layer_types=("rwkv",) * layers,
        feed_forward_types=("rwkv",) * layers,
        recurrent_width=c.size("attention_hidden_size", width),
        mlp_dim=c.size("intermediate_size", 4 * width),
        further_vectors=2 * width,
    )


@model_type("lfm2_moe")
def lfm2_moe(c: Fields) -> ModelConfig:
    """Like lfm2, with experts after the first layers."""
    dense = c.size("num_dense_layers", zero=True)
    return decoder(
        c,
        attention_bias=False,
        qk_norm="head",
        layer_types=_listed(c),
        feed_forward_types=moe_where(c, lambda i: i >= dense),
        conv_kernel=c.size("conv_L_cache"),
        conv_bias=c.flag("conv_bias"),
        logits_via_embedding=c.flag("tie_embedding", default=c.flag("tie_word_embeddings")),
        **experts(c, "num_experts"),
    )


def _listed(c: Fields) -> list[str]:
    return checked_length(c, "layer_types", c.list_of(str, "layer_types") or [])


@model_type("lfm3")
def lfm3(c: Fields) -> ModelConfig:
    """Convolutions, windowed and full attention; one gate per head; norms after the blocks."""
    attended = {0: SLIDING, 2: FULL}
    return decoder(
        c,
        qk_norm="head",
        norms_per_layer=4 if c.flag("use_sandwich_norm") else 2,
        attention_gate_width=int(c.flag("use_attention_gate")),
        layer_types=layer_types(c, lambda i: attended.get(i % 4, "conv") if i else "conv"),
        conv_kernel=c.size("conv_L_cache"),
        conv_bias=c.flag("conv_bias"),
    )
