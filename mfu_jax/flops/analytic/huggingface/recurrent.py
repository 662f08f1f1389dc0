"""Decoders with a recurrence, convolutions or looped layers, most with attention in some layers."""

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
    latent,
    layer_types,
    model_type,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, HYBRID, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def mamba_sizes(c: Fields, inner: int = 0) -> dict[str, Any]:
    """Sizes of Mamba layers, version 1 if their time step has a rank.

    Args:
        inner: their channels; 0: a multiple of the width.
    """
    width = c.size("hidden_size")
    inner = inner or c.size(c.named("expand", "mamba_expand")) * width
    bias = c.flag(c.named("use_bias", "mamba_proj_bias", "add_bias_linear"))
    values = {
        "mamba_inner": inner,
        "mamba_state": c.size(c.named("state_size", "ssm_state_size", "mamba_d_state")),
        "mamba_kernel": c.size(c.named("conv_kernel", "mamba_d_conv")),
        "mamba_bias": bias,
        "mamba_conv_bias": c.flag(c.named("use_conv_bias", "mamba_conv_bias"), default=True),
    }
    if rank := c.named("time_step_rank", "mamba_dt_rank"):
        return {**values, "mamba_rank": -(-width // 16) if c.get(rank) == "auto" else c.size(rank)}
    field = c.named("num_heads", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    head_dim, number = c.named("mamba_d_head", "mamba_head_dim", "head_dim"), c.size(field)
    is_given = head_dim and c.get(head_dim) != "auto"
    if inner % number or (is_given and number * c.size(head_dim) != inner):
        product = f"{field} · {head_dim} = {inner}" if head_dim else f"a divisor of {inner}"
        c.fail(field, f"expected {product}")
    return {
        **values,
        "mamba_heads": number,
        "mamba_groups": c.size(c.named("n_groups", "mamba_n_groups", "mamba_ngroups")),
        "mamba_output_bias": bias,
        "mamba_norm": True,
    }


@model_type("bamba")
def bamba(c: Fields) -> ModelConfig:
    """Mamba-2 layers, attention in the layers of attn_layer_indices; an MLP in each layer."""
    attended = c.list_of(int, "attn_layer_indices") or []
    kinds = layer_types(
        c,
        lambda i: FULL if i in attended else "mamba2",
        "layers_block_type",
        attention=FULL,
        mamba="mamba2",
    )
    return decoder(c, layer_types=kinds, **mamba_sizes(c))


@model_type("falcon_h1")
def falcon_h1(c: Fields) -> ModelConfig:
    """Mamba-2 and attention side by side in every layer."""
    sizes = mamba_sizes(c, c.size("mamba_d_ssm", 0))
    sizes["mamba_output_bias"] = c.flag("projectors_bias")
    sizes["mamba_norm"] = c.flag("mamba_rms_norm")
    return decoder(c, layer_types=(f"mamba2+{FULL}",) * c.size("num_hidden_layers"), **sizes)


@model_type("jamba")
def jamba(c: Fields) -> ModelConfig:
    """Mamba-1 with attention in every n-th layer, experts in every m-th."""
    period, offset = c.size("attn_layer_period"), c.size("attn_layer_offset", zero=True)
    sparse, first = c.size("expert_layer_period"), c.size("expert_layer_offset", zero=True)
    routed: dict[str, Any] = {}
    if c.size("num_experts") > 1:  # with a single expert, the layer is a plain MLP
        routed = experts(c, lambda i: (i - first) % sparse == 0)
    layers = range(c.size("num_hidden_layers"))
    return decoder(
        c,
        attention_bias=False,
        layer_types=["mamba" if (i - offset) % period else FULL for i in layers],
        mamba_norm=True,
        **mamba_sizes(c),
        **routed,
        **heads(c),
    )


@model_type("granitemoehybrid")
def granitemoehybrid(c: Fields) -> ModelConfig:
    """Mamba-2 and attention as listed; experts plus a shared one, or only the shared one."""
    renamed = {"attention": FULL, "mamba": "mamba2", "linear_attention": "mamba2"}
    kinds = layer_types(c, lambda _: "mamba2", **renamed)
    routed: dict[str, Any] = {}
    if c.optional_size("num_local_experts"):
        routed = experts(c, 0)
    return decoder(
        c,
        layer_types=kinds,
        mlp_dim=c.optional_size("shared_intermediate_size"),
        **routed,
        **mamba_sizes(c),
    )


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@model_type("nemotron_h")
def nemotron_h(c: Fields) -> ModelConfig:
    """Each layer is one block: Mamba-2, attention, a plain MLP, or plain experts."""
    pattern = c.text("hybrid_override_pattern")
    blocks = [_BLOCKS.get(letter, letter) for letter in pattern]
    blocks = blocks or c.list_of(str, "layers_block_type") or list(_BLOCKS.values())
    renamed = {"mamba": "mamba2", "linear_attention": "mamba2", "attention": FULL}
    return decoder(
        c.with_values(num_hidden_layers=len(blocks)),
        # transformers reads neither tie_word_embeddings nor attention_bias.
        logits_via_embedding=False,
        attention_bias=False,
        mlp_activations=PLAIN_MLP,
        norms_per_layer=1,
        layer_types=["none" if b in ("mlp", "moe") else renamed.get(b, b) for b in blocks],
        feed_forward_types=[{"mlp": "dense", "moe": "moe"}.get(b, "none") for b in blocks],
        **mamba_sizes(c, c.size("mamba_num_heads") * c.size("mamba_head_dim")),
        moe_expert_input_dim=c.optional_size("moe_latent_size"),
        **experts(c),
    )


@model_type("recurrent_gemma")
def recurrent_gemma(c: Fields) -> ModelConfig:
    """Two recurrent blocks, then windowed attention; the MLP has half the given width."""
    blocks = c.list_of(str, "block_types") or ["recurrent", "recurrent", "attention"]
    renamed = {"recurrent": "recurrent", "attention": SLIDING}
    if not renamed.keys() >= {*blocks}:
        c.fail("block_types", f"expected {' or '.join(renamed)}")
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

    sizes, width, residuals = latent(c), c.size("hidden_size"), c.get("attn_res_block_size")
    return decoder(
        c,
        logits_via_embedding=False,  # transformers does not read tie_word_embeddings
        layer_types=layer_types(c, kind, linear_attention="kimi_delta"),
        gdn_num_value_heads=inner.size("linear_num_heads"),
        gdn_value_head_dim=inner.size("linear_head_dim"),
        gdn_conv_kernel_dim=inner.size("linear_conv_kernel_dim"),
        gdn_low_rank_gates=1 if nested.get("use_full_rank_gate") is True else 2,
        attention_gate_width=sizes["v_head_dim"] if c.flag("mla_use_output_gate") else 0,
        moe_expert_input_dim=c.optional_size("routed_expert_hidden_size"),
        latent_norms=1,
        further_vectors=2 * width * (2 * c.size("num_hidden_layers") + 1) if residuals else 0,
        **sizes,
        **experts(c, c.size("first_k_dense_replace", 1, zero=True)),
    )


_KIMI = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@model_type("dory")
def dory(c: Fields) -> ModelConfig:
    """Layers in the middle run several times; weightless norms, gates, learned scales (nGPT)."""
    # A released file lists attention and MLP as separate layers.
    kinds = c.list_of(str, "layer_types") or []
    blocks = 2 if "mlp" in kinds else 1
    layers = c.size("num_hidden_layers") // blocks
    inner = c.with_values(num_hidden_layers=layers, layer_types=kinds[::blocks] or None)
    first, last = (c.size(f"n_{part}_layers", zero=True) // blocks for part in ("input", "output"))
    if (looped := layers - first - last) < 1:
        c.fail("n_input_layers", f"expected fewer than num_hidden_layers={layers} around the loop")
    sizes = heads(c)
    scales = 2 * (sizes["num_query_heads"] * sizes["head_dim"] + c.size("hidden_size"))
    return decoder(
        inner,
        normalization="none",
        attention_gate_width=sizes["head_dim"],
        layer_types=layer_types(inner, every(4, FULL, SLIDING)),
        layer_passes=(1,) * first + (c.size("n_recurrent_loops"),) * looped + (1,) * last,
        further_vectors=layers * (scales + 2 * c.size("intermediate_size")) + c.size("vocab_size"),
        **sizes,
    )


@model_type("hrm_text")
def hrm_text(c: Fields) -> ModelConfig:
    """Two stacks in nested cycles: H times L runs of one, H of the other; weightless norms.

    A gradient flows through the last `L_bp_cycles` of the L runs of each cycle: backward is less
    than twice forward.
    """
    high, low = c.size("H_cycles"), c.size("L_cycles")
    stack = c.size("num_layers_per_stack", c.size("num_hidden_layers"))
    given = c.list_of(int, "L_bp_cycles") or [2]
    graded = max(0, high - len(given)) + sum(min(number, low) for number in given[:high])
    inner = c.with_values(num_hidden_layers=2 * stack)
    sizes = heads(c)
    gates = sizes["num_query_heads"] * sizes["head_dim"]
    return decoder(
        inner,
        normalization="none",
        attention_gate_width=sizes["head_dim"],
        layer_passes=(high * low,) * stack + (high,) * stack,
        graded_passes=(graded,) * stack + (high,) * stack,
        further_vectors=c.size("hidden_size") + 2 * stack * gates * c.flag("attention_bias"),
        **sizes,
    )


@model_type("lfm2")
def lfm2(c: Fields) -> ModelConfig:
    """Gated short convolutions, attention in the layers of full_attn_idxs."""
    attended = c.list_of(int, "full_attn_idxs")
    hidden = c.size("block_ff_dim", c.size("intermediate_size"))
    if c.flag("block_auto_adjust_ff_dim", default=True):
        hidden = _adjusted(c, hidden)
    return _lfm2(
        c,
        layer_types=layer_types(c, lambda i: FULL if attended is None or i in attended else "conv"),
        mlp_dim=hidden,
    )


@model_type("lfm2_moe")
def lfm2_moe(c: Fields) -> ModelConfig:
    """Like lfm2, with experts after the first layers."""
    kinds = checked_length(c, "layer_types", c.list_of(str, "layer_types") or [])
    return _lfm2(c, layer_types=kinds, **experts(c, "num_dense_layers"))


def _lfm2(c: Fields, **changes: Any) -> ModelConfig:
    return decoder(
        c,
        attention_bias=False,
        qk_norm="head",
        conv_kernel=c.size("conv_L_cache"),
        conv_bias=c.flag("conv_bias"),
        logits_via_embedding=c.flag("tie_embedding", default=c.flag("tie_word_embeddings")),
        **changes,
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
    """Mamba-1, and one block in every n-th layer: shared, as transformers ties embeddings."""
    width, layers = c.size("hidden_size"), c.size("num_hidden_layers")
    period, offset = c.size("attn_layer_period"), c.size("attn_layer_offset", zero=True)

    def hybrid(i: int) -> bool:
        return i == 2 or (i > 2 and (i - 3) % period == offset)

    return _zamba(
        c,
        [HYBRID if hybrid(i) else "mamba" for i in range(layers)],
        shared_blocks=1 if c.flag("tie_word_embeddings", default=True) else layers,
        head_dim=c.size("attention_head_dim", 2 * width // c.size("num_attention_heads")),
    )


@model_type("zamba2")
def zamba2(c: Fields) -> ModelConfig:
    """Mamba-2, and shared blocks in the layers listed as hybrid, each with adapters."""
    if not c.flag("tie_word_embeddings", default=True):  # each has then the adapters of all
        c.fail("tie_word_embeddings", "expected true: else transformers shares no block, either")
    width = c.size("hidden_size")
    hybrids = {6, 12, 18, 24, 30, 36, 42, 47, 51}
    return _zamba(
        c,
        [HYBRID if i in hybrids else "mamba" for i in range(54)],
        shared_blocks=c.size("num_mem_blocks"),
        shared_adapter_rank=c.size("adapter_rank"),
        shared_attention_adapters=c.flag("use_shared_attention_adapter"),
        head_dim=2 * width // c.size("num_attention_heads"),
        mlp_dim=c.size("intermediate_size", 4 * width),
        use_bias=c.flag("add_bias_linear"),
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
        **mamba_sizes(c),
        **values,
    )
