"""Zamba and Zamba 2."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.analytic.huggingface.common import checked_length, decoder
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import model_type
from mfu_jax.flops.analytic.model_configs.layers import HYBRID
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


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
