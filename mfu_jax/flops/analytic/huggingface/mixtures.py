"""Decoders with experts, and Llama 4's and Qwen 3.5's vision towers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    TRANSLATIONS,
    changed_layers,
    checked_length,
    decoder,
    every,
    experts,
    has_rope,
    heads,
    layer_types,
    model_type,
    needs_trace,
    tied_text,
    vision_encoder,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import (
    BLOCK_SPARSE,
    CHUNKED,
    FULL,
    INDEXED,
    NGRAM_MEMORY,
    SLIDING,
)
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.exact import is_prime


@model_type("qwen4_exp_text")
def qwen4_exp_text(c: Fields) -> ModelConfig:
    """Like qwen3_5_moe_text; block-sparse attention, residual streams, tables of n-grams.

    A query also sees the tokens of the last, unfinished block, which are not counted here.
    """
    sparse = dict.fromkeys((FULL, INDEXED), BLOCK_SPARSE)
    interval = c.size("full_attention_interval", 4)
    kinds = layer_types(c, every(interval, BLOCK_SPARSE, "linear_attention"), **sparse)
    memories = sorted(set(c.list_of(int, "ple_layer_ids") or []))
    if memories and not 0 < memories[0] <= memories[-1] <= len(kinds):
        c.fail("ple_layer_ids", f"expected layers from 1 to {len(kinds)}")
    for layer in memories:
        kinds[layer - 1] = f"{NGRAM_MEMORY}+{kinds[layer - 1]}"
    return TRANSLATIONS["qwen3_5_moe_text"](c.with_values(layer_types=None)).replace(
        layer_types=kinds,
        norms_per_layer=0,
        final_norm=False,
        mhc_expansion_rate=c.size("hc_count"),
        stream_rank=c.size("hc_lowrank"),
        indexer_n_heads=c.size("indexer_n_heads"),
        indexer_head_dim=c.size("indexer_head_dim"),
        indexer_topk=c.size("indexer_budget"),
        indexer_pool=c.size("indexer_compress_ratio"),
        **(_ngram_tables(c, len(memories)) if memories else {}),
    )


def _ngram_tables(c: Fields, layers: int) -> dict[str, int]:
    """Heads of the n-gram memory; each has a table of the next prime number of rows."""
    heads = c.size("heads_per_ngram") * (c.size("ngram_size") - 1)
    width = c.size("ple_embed_dim", c.size("hidden_size"))
    if not heads or width % heads:
        c.fail("ple_embed_dim", f"expected a multiple of {heads}, its heads")
    multiple, base = c.size("make_ngram_vocab_size_divisible_by"), c.size("ngram_vocab_size_base")
    primes = filter(is_prime, itertools.count(base))
    rows = [sum(itertools.islice(primes, heads)) for _ in range(layers)]
    return {
        "engram_num_heads": heads,
        "engram_head_dim": width // heads,
        "engram_kernel_size": c.size("ple_conv_kernel_size"),
        "ngram_rows": sum(-(-row // multiple) * multiple for row in rows),
    }


def delta_net(c: Fields) -> dict[str, Any]:
    """Qwen's gated delta nets, and gated attention in every n-th layer."""
    if c.size("linear_num_value_heads") % (key_heads := c.size("linear_num_key_heads")):
        c.fail("linear_num_value_heads", f"expected a multiple of linear_num_key_heads={key_heads}")
    interval = c.size("full_attention_interval", 4)
    return {
        "qk_norm": "head",
        "attention_output_gate": True,
        "layer_types": layer_types(c, every(interval, FULL, "linear_attention")),
        "gdn_num_key_heads": c.size("linear_num_key_heads"),
        "gdn_num_value_heads": c.size("linear_num_value_heads"),
        "gdn_key_head_dim": c.size("linear_key_head_dim"),
        "gdn_value_head_dim": c.size("linear_value_head_dim"),
        "gdn_conv_kernel_dim": c.size("linear_conv_kernel_dim"),
    }


def qwen_experts(c: Fields) -> dict[str, Any]:
    """Experts in every n-th layer, except in mlp_only_layers; a shared one, if any, is gated."""
    if not c.optional_size("num_experts"):
        return {}
    dense, step = c.list_of(int, "mlp_only_layers") or [], c.size("decoder_sparse_step")
    return {
        "shared_expert_gate": c.knows("shared_expert_intermediate_size"),
        **experts(c, lambda i: i not in dense and (i + 1) % step == 0),
    }


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
        routed_bias=True,
        **experts(c, lambda i: (i + 1) % step == 0 and first <= i <= last),
    )


@model_type("ernie4_5_vl_moe_text")
def ernie4_5_vl_moe_text(c: Fields) -> ModelConfig:
    """Like ernie4_5_moe; as many further experts, which only images use, have another width."""
    widths = c.list_of(int, "moe_intermediate_size") or [1536, 512]
    if len(widths) != 2:
        c.fail("moe_intermediate_size", "expected two numbers, for text and for images")
    return decoder(
        c,
        attention_bias=c.flag("use_bias"),
        use_bias=c.flag("use_bias"),
        routed_bias=True,
        idle_moe_mlp_dim=widths[1],
        **experts(c.with_values(moe_intermediate_size=widths[0]), 1),
    )


@model_type("step3p5")
def step3p5(c: Fields) -> ModelConfig:
    """One gate per head; windowed layers have their own number of heads; a shared expert."""
    layers = c.size("num_hidden_layers")
    # Published files also list the prediction modules.
    for name in ("layer_types", "mlp_layer_types"):
        c = c.with_values(**{name: (c.list_of(str, name) or [])[:layers] or None})
    kinds, other = layer_types(c, lambda _: FULL), c.get("attention_other_setting")
    if not isinstance(other, Mapping | None):
        c.fail("attention_other_setting", "expected an object")
    own = c.with_values(**(other or {}))
    query_heads = c.size("num_sliding_attention_heads", own.size("num_attention_heads"))
    windowed = changed_layers(c, kinds, SLIDING) or c.with_values(num_attention_heads=query_heads)
    return decoder(
        c,
        qk_norm="head",
        attention_gate_width=1,
        layer_types=kinds,
        in_windows=list(heads(windowed).items()) if SLIDING in kinds else (),
        **experts(c, _numbered(c, "moe_layers_enum", range(3, layers))),
    )


def _numbered(c: Fields, name: str, default: Iterable[int]) -> Callable[[int], bool]:
    """Whether a layer's number is in a list, or in a text such as ``3,4,5``."""
    given = c.get(name, default)
    try:
        found = {int(i) for i in (given.split(",") if isinstance(given, str) else given)}
    except (TypeError, ValueError):
        c.fail(name, "expected numbers of layers, such as '3,4,5'")
    return found.__contains__


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
        **experts(c, lambda i: i not in skipped and (i + 1) % step == 0),
    )


@model_type("laguna")
def laguna(c: Fields) -> ModelConfig:
    """One gate per head or channel; a shared expert; a bias helps select the experts."""
    name, kinds = "num_attention_heads_per_layer", layer_types(c, lambda _: FULL)
    default = [c.size("num_attention_heads")] * len(kinds)
    counts = checked_length(c, name, c.list_of(int, name) or default)
    of_kind = dict(zip(kinds, counts, strict=True))
    if [of_kind[kind] for kind in kinds] != counts:
        c.fail(name, "expected one number for all layers of a kind")
    attention, windowed = (
        heads(c.with_values(num_attention_heads=of_kind.get(kind, counts[0])))
        for kind in (FULL, SLIDING)
    )
    return decoder(
        c,
        qk_norm="head",
        attention_gate_width=1 if c.get("gating") in (True, "per-head") else attention["head_dim"],
        layer_types=kinds,
        in_windows=list(windowed.items()),
        routed_bias=True,
        **experts(c, 1),
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
        in_windows=[("num_kv_heads", doubled), ("attention_sinks", 1)],
        value_head_dim=c.size("v_head_dim"),
        sliding_window_size=window + 1 if window else c.size("sliding_window"),
        layer_types=layer_types(c, lambda i: FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING),
        **experts(c, 1),
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
        **experts(c, lambda i: sparse is None or sparse[i : i + 1] != [0]),
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
        **experts(c, dense),
    )


@model_type("llama4_text")
def llama4_text(c: Fields) -> ModelConfig:
    """Chunked attention except in every n-th layer; experts plus a shared one where listed."""
    step, sparse = c.size("interleave_moe_layer_step"), c.list_of(int, "moe_layers")
    is_chunked = has_rope(c)
    return decoder(
        c,
        layer_types=layer_types(c, lambda i: CHUNKED if is_chunked(i) else FULL),
        chunk_attn_window_size=c.optional_size("attention_chunk_size"),
        mlp_dim=c.size("intermediate_size_mlp"),
        shared_experts=1,
        **experts(c, lambda i: i in sparse if sparse is not None else (i + 1) % step == 0),
    )


@model_type("emu3")
def emu3(c: Fields) -> ModelConfig:
    """The text model, as built by AutoModelForCausalLM."""
    return TRANSLATIONS["llama"](c.nested("text_config", "emu3_text_model"))


@model_type("llama4")
def llama4(c: Fields) -> ModelConfig:
    """Llama 4 and its vision tower; images_per_sequence and tiles_per_image: how many inputs."""
    vision = c.nested("vision_config", "llama4_vision_model")
    ratio = vision.get("pixel_shuffle_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        vision.fail("pixel_shuffle_ratio", "expected a number above 0, at most 1")
    sizes = vision_encoder(vision)
    # The head belongs to the text model, whose own config says whether it is tied.
    return llama4_text(c.nested("text_config", "llama4_text")).replace(
        vision_tower="llama4",
        vision_output_dim=vision.size("vision_output_dim"),
        projector_input_dim_for_vit=vision.size("projector_input_dim"),
        projector_output_dim_for_vit=vision.size("projector_output_dim"),
        pixel_shuffle_ratio_for_vit=ratio,
        tile_size_for_vit=sizes["image_size_for_vit"],
        **sizes,
    )


@model_type("qwen3_5", "qwen3_5_moe")
def qwen3_5(c: Fields) -> ModelConfig:
    """The text model, as built by AutoModelForCausalLM; with its vision tower if
    ``architectures`` says Qwen3_5ForConditionalGeneration.

    Images may have any size, given by image_size_for_vit; images_per_sequence is their number.
    """
    kind, names = f"{c.model_type}_text", c.list_of(str, "architectures") or []
    if not any(name.endswith("ForConditionalGeneration") for name in names):
        return TRANSLATIONS[kind](c.nested("text_config", kind))
    config = TRANSLATIONS[kind](tied_text(c, kind))
    vision = c.nested("vision_config", "qwen3_5_vision")
    vision.quotient("hidden_size", "num_heads")
    return config.replace(
        vision_tower="qwen3_5",
        patch_size_for_vit=vision.size("patch_size"),
        temporal_patch_size_for_vit=vision.size("temporal_patch_size"),
        num_channels_for_vit=vision.size("in_channels"),
        hidden_size_for_vit=vision.size("hidden_size"),
        intermediate_size_for_vit=vision.size("intermediate_size"),
        num_hidden_layers_for_vit=vision.size("depth"),
        num_position_embeddings_for_vit=vision.size("num_position_embeddings"),
        spatial_merge_size_for_vit=vision.size("spatial_merge_size"),
        out_hidden_size_for_vit=vision.size("out_hidden_size"),
    )
