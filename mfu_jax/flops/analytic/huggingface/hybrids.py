"""State-space models, convolutions, and hybrids of these with attention."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    checked_length,
    decoder,
    every,
    experts,
    heads,
    layer_types,
    model_type,
    moe_where,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, HYBRID
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("mamba2")
def mamba2(c: Fields) -> ModelConfig:
    """Mamba-2 layers only: one norm, no feed-forward."""
    layers, width = c.size("num_hidden_layers"), c.size("hidden_size")
    state_heads, head_dim = c.size("num_heads"), c.size("head_dim")
    inner = c.size("expand") * width
    if state_heads * head_dim != inner:
        c.fail("num_heads", f"expected num_heads · head_dim = expand · hidden_size = {inner}")
    return decoder(
        c,
        num_query_heads=0,
        mlp_dim=0,
        norms_per_layer=1,
        layer_types=("mamba2",) * layers,
        feed_forward_types=("none",) * layers,
        **mamba2_mixer(c, state_heads, inner, state=c.size("state_size")),
    )


def mamba2_mixer(c: Fields, state_heads: int, inner: int, *, state: int) -> dict[str, Any]:
    """Sizes of Mamba-2 layers with `inner` channels, under the original's field names."""
    bias = c.flag("use_bias")
    return {
        "mamba_inner": inner,
        "mamba_heads": state_heads,
        "mamba_groups": c.size("n_groups"),
        "mamba_state": state,
        "mamba_kernel": c.size("conv_kernel"),
        "mamba_bias": bias,
        "mamba_output_bias": bias,
        "mamba_conv_bias": c.flag("use_conv_bias", default=True),
        "mamba_norm": True,
    }


@model_type("bamba")
def bamba(c: Fields) -> ModelConfig:
    """Mamba-2 layers, attention in the layers of attn_layer_indices; an MLP in each layer."""
    attended = c.list_of(int, "attn_layer_indices") or []
    bias = c.flag("mamba_proj_bias")
    kinds = layer_types(
        c,
        lambda i: FULL if i in attended else "mamba2",
        "layers_block_type",
        attention=FULL,
        mamba="mamba2",
    )
    return decoder(
        c,
        layer_types=kinds,
        mamba_output_bias=bias,
        mamba_norm=True,
        **state_space(c, c.size("mamba_expand") * c.size("hidden_size")),
    )


@model_type("falcon_h1")
def falcon_h1(c: Fields) -> ModelConfig:
    """Mamba-2 and attention side by side in every layer."""
    inner = c.size("mamba_d_ssm", c.size("mamba_expand") * c.size("hidden_size"))
    return decoder(
        c,
        layer_types=(f"mamba2+{FULL}",) * c.size("num_hidden_layers"),
        mamba_output_bias=c.flag("projectors_bias"),
        mamba_norm=c.flag("mamba_rms_norm"),
        **state_space(c, inner),
    )


def state_space(c: Fields, inner: int) -> dict[str, Any]:
    """Sizes of Mamba-2 layers with `inner` channels."""
    state_heads = c.size("mamba_n_heads")
    head_dim = c.get("mamba_d_head")
    wanted = inner if head_dim == "auto" else state_heads * c.size("mamba_d_head")
    if inner % state_heads or wanted != inner:
        c.fail("mamba_n_heads", f"expected mamba_n_heads · mamba_d_head = {inner}")
    return {
        "mamba_inner": inner,
        "mamba_heads": state_heads,
        "mamba_groups": c.size("mamba_n_groups"),
        "mamba_state": c.size("mamba_d_state"),
        "mamba_kernel": c.size("mamba_d_conv"),
        "mamba_bias": c.flag("mamba_proj_bias"),
        "mamba_conv_bias": c.flag("mamba_conv_bias", default=True),
    }


@model_type("jamba")
def jamba(c: Fields) -> ModelConfig:
    """Mamba-1 with attention in every n-th layer, experts in every m-th."""
    layers, width = c.size("num_hidden_layers"), c.size("hidden_size")
    period, offset = c.size("attn_layer_period"), c.size("attn_layer_offset", zero=True)
    sparse, first = c.size("expert_layer_period"), c.size("expert_layer_offset", zero=True)
    # With a single expert, the layer is a plain MLP.
    number = c.size("num_experts")
    bias = c.flag("mamba_proj_bias")
    rank = c.get("mamba_dt_rank")
    return decoder(
        c,
        attention_bias=False,
        layer_types=["mamba" if (i - offset) % period else FULL for i in range(layers)],
        feed_forward_types=moe_where(c, lambda i: number > 1 and (i - first) % sparse == 0),
        mamba_inner=c.size("mamba_expand") * width,
        mamba_state=c.size("mamba_d_state"),
        mamba_kernel=c.size("mamba_d_conv"),
        mamba_rank=-(-width // 16) if rank == "auto" else c.size("mamba_dt_rank"),
        mamba_bias=bias,
        mamba_conv_bias=c.flag("mamba_conv_bias", default=True),
        mamba_norm=True,
        **(experts(c, "num_experts", "intermediate_size") if number > 1 else {}),
        **heads(c),
    )


@model_type("lfm2")
def lfm2(c: Fields) -> ModelConfig:
    """Gated short convolutions, attention in the layers of full_attn_idxs."""
    attended = c.list_of(int, "full_attn_idxs")
    hidden = c.size("block_ff_dim", c.size("intermediate_size"))
    if c.flag("block_auto_adjust_ff_dim", default=True):
        hidden = _adjusted(c, hidden)
    return decoder(
        c,
        attention_bias=False,
        qk_norm="head",
        layer_types=layer_types(c, lambda i: FULL if attended is None or i in attended else "conv"),
        mlp_dim=hidden,
        conv_kernel=c.size("conv_L_cache"),
        conv_bias=c.flag("conv_bias"),
        logits_via_embedding=c.flag("tie_embedding", default=c.flag("tie_word_embeddings")),
    )


def _adjusted(c: Fields, hidden: int) -> int:
    """Two thirds of the width (it is a gated MLP), times a factor, rounded up to a multiple."""
    hidden = 2 * hidden // 3
    factor = c.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return hidden
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 2**20:
        c.fail("block_ffn_dim_multiplier", "expected a positive number")
    multiple = c.size("block_multiple_of")
    return -(-int(factor * hidden) // multiple) * multiple


@model_type("olmo_hybrid")
def olmo_hybrid(c: Fields) -> ModelConfig:
    """Gated delta nets with attention in every fourth layer; a dense MLP."""
    query_heads, layers = c.size("num_attention_heads"), c.size("num_hidden_layers")
    kinds = layer_types(c, every(4, FULL, "linear_attention"))
    if FULL not in kinds and not c.has("layer_types"):
        kinds[-1] = FULL
    key_heads = c.size("linear_num_key_heads", query_heads)
    key_dim = c.size("linear_key_head_dim", int(0.75 * c.size("hidden_size") / key_heads))
    return decoder(
        c,
        qk_norm="all_heads",
        layer_types=kinds[:layers],
        gdn_num_key_heads=key_heads,
        gdn_num_value_heads=c.size("linear_num_value_heads", query_heads),
        gdn_key_head_dim=key_dim,
        gdn_value_head_dim=c.size("linear_value_head_dim", 2 * key_dim),
        gdn_conv_kernel_dim=c.size("linear_conv_kernel_dim"),
    )


@model_type("zamba")
def zamba(c: Fields) -> ModelConfig:
    """Mamba-1, and one shared block in every n-th layer."""
    width, rank = c.size("hidden_size"), c.get("mamba_dt_rank")
    period, offset = c.size("attn_layer_period"), c.size("attn_layer_offset", zero=True)
    bias = c.flag("mamba_proj_bias")

    def hybrid(i: int) -> bool:
        return i == 2 or (i > 2 and (i - 3) % period == offset)

    return _zamba(
        c,
        [HYBRID if hybrid(i) else "mamba" for i in range(c.size("num_hidden_layers"))],
        shared_blocks=1,
        head_dim=c.size("attention_head_dim", 2 * width // c.size("num_attention_heads")),
        mamba_rank=-(-width // 16) if rank == "auto" else c.size("mamba_dt_rank"),
        mamba_bias=bias,
        mamba_conv_bias=c.flag("mamba_conv_bias", default=True),
    )


@model_type("zamba2")
def zamba2(c: Fields) -> ModelConfig:
    """Mamba-2, and shared blocks in the layers listed as hybrid, each with adapters."""
    width, bias = c.size("hidden_size"), c.flag("add_bias_linear")
    hybrids = {6, 12, 18, 24, 30, 36, 42, 47, 51}
    return _zamba(
        c,
        [HYBRID if i in hybrids else "mamba" for i in range(54)],
        shared_blocks=c.size("num_mem_blocks"),
        shared_adapter_rank=c.size("adapter_rank"),
        shared_attention_adapters=c.flag("use_shared_attention_adapter"),
        head_dim=2 * width // c.size("num_attention_heads"),
        mlp_dim=c.size("intermediate_size", 4 * width),
        use_bias=bias,
        mamba_bias=bias,
        mamba_output_bias=bias,
        mamba_conv_bias=True,
        mamba_norm=True,
        mamba_heads=c.size("n_mamba_heads"),
        mamba_groups=c.size("mamba_ngroups"),
    )


def _zamba(c: Fields, default: list[str], **values: Any) -> ModelConfig:
    """What both have in common, with the file's list of layers or else `default`."""
    given = c.list_of(str, "layers_block_type")
    kinds = checked_length(c, "layers_block_type", default if given is None else given)
    query_heads = c.size("num_attention_heads")
    return decoder(
        c,
        decoder_block="hf_zamba",
        layer_types=kinds,
        num_query_heads=query_heads,
        num_kv_heads=c.size("num_key_value_heads", query_heads),
        mamba_inner=c.size("mamba_expand") * c.size("hidden_size"),
        mamba_state=c.size("mamba_d_state"),
        mamba_kernel=c.size("mamba_d_conv"),
        **values,
    )
