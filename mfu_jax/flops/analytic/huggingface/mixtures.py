"""Decoders with experts as wide as given, and Llama 4's and Qwen 3.5's vision towers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    TRANSLATIONS,
    decoder,
    every,
    experts,
    layer_types,
    model_type,
    moe_where,
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


@model_type("phimoe")
def phimoe(c: Fields) -> ModelConfig:
    """LayerNorm; the head may have a bias; the router (SparseMixer) always picks two experts."""
    if c.size("num_experts_per_tok") != 2:
        c.fail("num_experts_per_tok", "expected 2, which the model's router always picks")
    return decoder(
        c,
        normalization="layernorm",
        head_bias=c.flag("lm_head_bias"),
        feed_forward_types=("moe",) * c.size("num_hidden_layers"),
        **experts(c, "num_local_experts", "intermediate_size"),
    )


@model_type("qwen2_moe")
def qwen2_moe(c: Fields) -> ModelConfig:
    """A bias on q, k and v; experts plus a gated shared one."""
    windowed = c.flag("use_sliding_window") and c.optional_size("sliding_window")
    first = c.size("max_window_layers", zero=True) if windowed else 0
    return decoder(
        c,
        attention_bias=c.flag("qkv_bias", default=True),
        attention_output_bias=False,
        layer_types=layer_types(c, lambda i: SLIDING if i % 2 == 0 and i < first else FULL),
        **qwen_experts(c, shared=True),
    )


@model_type("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
def qwen3_moe(c: Fields) -> ModelConfig:
    """Norms on queries and keys; no shared expert."""
    windowed = c.flag("use_sliding_window")
    return decoder(
        c,
        qk_norm="head",
        sliding_window_size=c.optional_size("sliding_window") if windowed else 0,
        **qwen_experts(c, shared=False),
    )


@model_type("qwen3_5_moe_text")
def qwen3_5_moe_text(c: Fields) -> ModelConfig:
    """Like qwen3_next, with experts in every layer."""
    return decoder(
        c,
        mlp_dim=0,
        feed_forward_types=("moe",) * c.size("num_hidden_layers"),
        shared_experts=1,
        shared_expert_dim=c.size("shared_expert_intermediate_size"),
        shared_expert_gate=True,
        **experts(c, "num_experts"),
        **delta_net(c),
    )


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
    return qwen3_5_moe_text(c.with_values(layer_types=None)).replace(
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
    primes = (n for n in itertools.count(base) if n > 1 and all(n % d for d in _divisors(n)))
    rows = [sum(itertools.islice(primes, heads)) for _ in range(layers)]
    return {
        "engram_num_heads": heads,
        "engram_head_dim": width // heads,
        "engram_kernel_size": c.size("ple_conv_kernel_size"),
        "ngram_rows": sum(-(-row // multiple) * multiple for row in rows),
    }


def _divisors(number: int) -> range:
    return range(2, math.isqrt(number) + 1)


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


def qwen_experts(c: Fields, *, shared: bool) -> dict[str, Any]:
    """Experts in every n-th layer, except in mlp_only_layers."""
    dense = c.list_of(int, "mlp_only_layers") or []
    step = c.size("decoder_sparse_step")
    number = c.optional_size("num_experts")
    values: dict[str, Any] = {
        "feed_forward_types": moe_where(
            c, lambda i: number > 0 and i not in dense and (i + 1) % step == 0
        ),
        **(experts(c, "num_experts") if number else {}),
    }
    if shared and number:
        values["shared_experts"] = 1
        values["shared_expert_dim"] = c.size("shared_expert_intermediate_size")
        values["shared_expert_gate"] = True
    return values


@model_type("llama4_text")
def llama4_text(c: Fields) -> ModelConfig:
    """Chunked attention except in every n-th layer; experts plus a shared one where listed."""
    interval, step = c.size("no_rope_layer_interval", 4), c.size("interleave_moe_layer_step")
    rotary = c.list_of(int, "no_rope_layers")
    sparse = c.list_of(int, "moe_layers")

    def kind(i: int) -> str:
        has_rope = rotary[i] if rotary and i < len(rotary) else (i + 1) % interval != 0
        return CHUNKED if has_rope else FULL

    return decoder(
        c,
        layer_types=layer_types(c, kind),
        chunk_attn_window_size=c.optional_size("attention_chunk_size"),
        mlp_dim=c.size("intermediate_size_mlp"),
        feed_forward_types=moe_where(
            c, lambda i: i in sparse if sparse is not None else (i + 1) % step == 0
        ),
        shared_experts=1,
        **experts(c, "num_local_experts", "intermediate_size"),
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


@model_type("qwen3_5")
def qwen3_5(c: Fields) -> ModelConfig:
    """The text model, as built by AutoModelForCausalLM; with its vision tower if
    ``architectures`` says Qwen3_5ForConditionalGeneration.

    Images may have any size, given by image_size_for_vit; images_per_sequence is their number.
    """
    return _qwen(c, "qwen3_5_text", TRANSLATIONS["qwen3_5_text"])


@model_type("qwen3_5_moe")
def qwen3_5_moe(c: Fields) -> ModelConfig:
    """Like qwen3_5, with experts."""
    return _qwen(c, "qwen3_5_moe_text", qwen3_5_moe_text)


def _qwen(c: Fields, kind: str, text: Callable[[Fields], ModelConfig]) -> ModelConfig:
    names = c.list_of(str, "architectures") or []
    if not any(name.endswith("ForConditionalGeneration") for name in names):
        return text(c.nested("text_config", kind))
    config = text(tied_text(c, kind))
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
