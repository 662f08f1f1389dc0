"""Decoders that differ from Llama in a few values: one row for each.

A row names what differs from `common.decoder`. A value may be a function of the config's fields;
a positional argument is a function that returns several values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    GPT_STYLE,
    PLAIN_MLP,
    TRANSLATIONS,
    Translate,
    Where,
    checked_length,
    decoder,
    equal_heads,
    every,
    experts,
    first_of,
    has_rope,
    heads,
    latent,
    layer_types,
    refuse,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.latent import indexer, sparse_layers
from mfu_jax.flops.analytic.huggingface.mixtures import delta_net, qwen_experts
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig

FieldValues = Callable[[Fields], Mapping[str, Any]]
FieldValue = Callable[[Fields], Any]


def _llama(*groups: FieldValues, **values: Any) -> Translate:
    """Llama, with these differences."""

    def translate(c: Fields) -> ModelConfig:
        changes = {name: v(c) if callable(v) else v for name, v in values.items()}
        for group in groups:
            changes |= group(c)
        return decoder(c, **changes)

    return translate


def _gpt(*groups: FieldValues, **values: Any) -> Translate:
    """LayerNorm, a plain MLP, biases everywhere except in the head; with these differences."""
    return _llama(*groups, **{**GPT_STYLE, **values})


def _width_as_n_embed(translate: Translate) -> Translate:
    """Older files call the model's width so."""

    def older(c: Fields) -> ModelConfig:
        given = c.has("n_embed")
        return translate(c.with_values(hidden_size=c.size("n_embed")) if given else c)

    return older


def _size(name: str) -> FieldValue:
    return lambda c: c.size(name)


def _flag(name: str, default: bool = False) -> FieldValue:
    return lambda c: c.flag(name, default=default)


def _choice(name: str, chosen: Any, other: Any, default: bool = False) -> FieldValue:
    """One of two values, by a flag."""
    return lambda c: chosen if c.flag(name, default=default) else other


def _listed(default: Callable[[int], str]) -> FieldValue:
    """The file's ``layer_types``, or else ``default(i)`` for each layer i."""
    return lambda c: layer_types(c, default)


def _experts(where: Where = 0) -> FieldValues:
    """Experts in every layer, or in some."""
    return lambda c: experts(c, where)


def _late_windows(c: Fields) -> list[str]:
    """Windows, if used, from layer max_window_layers on."""
    used = c.flag("use_sliding_window", default=not c.knows("use_sliding_window"))
    windowed = used and c.optional_size("sliding_window")
    first = c.size("max_window_layers", zero=True) if windowed else c.size("num_hidden_layers")
    return layer_types(c, lambda i: SLIDING if i >= first else FULL)


def _interval_windows(c: Fields) -> list[str]:
    """Windows except in every n-th layer; if layers are listed, some files spell n "LLLG"."""
    windowed = c.optional_size("sliding_window") and not c.has("layer_types")
    interval = c.size("sliding_window_pattern", 0, zero=True) if windowed else 0
    return layer_types(c, every(interval, FULL, SLIDING) if interval else lambda _: FULL)


def _full_from_last(c: Fields) -> list[str]:
    """Full attention in every fourth layer, counted from the last."""
    last = c.size("num_hidden_layers") - 1
    return layer_types(c, lambda i: SLIDING if (last - i) % 4 else FULL)


def _sixth_or_last(c: Fields) -> list[str]:
    """Full attention in every sixth layer, and in the last one."""
    last = c.size("num_hidden_layers") - 1
    return layer_types(c, lambda i: FULL if i % 6 == 5 or i == last else SLIDING)


def _rope_free_windows(c: Fields) -> list[str]:
    """Windows, if used, in the layers without rotary positions."""
    windowed, rotary = (
        c.flag("use_sliding_window") and c.optional_size("sliding_window"),
        has_rope(c),
    )
    return layer_types(c, lambda i: SLIDING if windowed and not rotary(i) else FULL)


def _attention_types(c: Fields) -> list[str]:
    """``[[["global", "local"], 12]]``: each group of kinds with its number of repeats."""
    groups = c.get("attention_types")
    if groups is None:
        groups = [[["global", "local"], 12]]
    named = {"global": FULL, "local": SLIDING}
    try:
        kinds = [named[kind] for group, times in groups for _ in range(times) for kind in group]
    except (TypeError, ValueError, KeyError):
        c.fail("attention_types", 'expected lists such as [[["global", "local"], 12]]')
    return checked_length(c, "attention_types", kinds)


def _wider(multiple: int, name: str = "") -> FieldValue:
    """The width in this field, or else a multiple of the model's."""
    return lambda c: c.size(name, multiple * c.size("hidden_size"))


def _head_width(c: Fields) -> int:
    return heads(c)["head_dim"]


def _even_heads(c: Fields) -> dict[str, int]:
    if (sizes := heads(c))["num_kv_heads"] % 2:
        c.fail("num_key_value_heads", "expected an even number")
    return sizes


def _square_heads(c: Fields) -> dict[str, int]:
    sizes = heads(c)
    if sizes["num_query_heads"] * sizes["head_dim"] != c.size("hidden_size"):
        c.fail("head_dim", "expected hidden_size / num_attention_heads")
    return sizes


def _alone(c: Fields) -> dict[str, Any]:
    """A decoder that reads no encoder."""
    refuse(c, "add_cross_attention")
    return {}


def _falcon(c: Fields) -> dict[str, Any]:
    """One key/value head, several, or one per query head; norms depend on the kind of block."""
    sizes, grouped = equal_heads(c), c.flag("new_decoder_architecture")
    if grouped:
        sizes["num_kv_heads"] = c.size("num_kv_heads", sizes["num_query_heads"])
        if sizes["num_query_heads"] % sizes["num_kv_heads"]:
            c.fail("num_kv_heads", "expected a divisor of num_attention_heads")
    elif c.flag("multi_query", default=True):
        sizes["num_kv_heads"] = 1
    parallel = c.flag("parallel_attn", default=True)
    in_parallel = c.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    return {**sizes, "norms_per_layer": 2 if not parallel or in_parallel == 2 else 1}


_DENSE = {
    # A window in every layer if the config has one
    (
        "llama",
        "exaone",
        "granite",
        "granite4_vision_text",
        "granite_docling_text",
        "mistral",
        "ministral3",
        "phi3",
        "gemma",
        "internlm3",
        "iquestcoder",
    ): (_llama(bidirectional=lambda c: c.get("use_bidirectional_attention") is True)),
    ("ministral",): _llama(
        layer_types=lambda c: layer_types(
            c, lambda _: SLIDING if c.optional_size("sliding_window") else FULL
        )
    ),
    # A norm before each output projection, in attention and MLP
    ("bitnet",): _llama(
        further_vectors=lambda c: (
            c.size("num_hidden_layers") * (c.size("hidden_size") + c.size("intermediate_size"))
        )
    ),
    # Differential attention
    ("diffllama",): _llama(_even_heads, differential=True),
    ("smollm3",): _llama(layer_types=_rope_free_windows),
    # The output projection is square
    ("helium",): _llama(_square_heads, attention_output_bias=False),
    ("cwm",): _llama(layer_types=_listed(first_of(4, FULL, SLIDING))),
    ("granite_swa",): _llama(attention_sinks=True, layer_types=_listed(first_of(4, FULL, SLIDING))),
    ("hyperclovax",): _llama(norms_per_layer=_choice("use_post_norm", 4, 2)),
    ("hunyuan_v1_dense", "hunyuan_vl_text"): _llama(qk_norm="head"),  # after the rotary embedding
    ("nanochat",): _llama(mlp_activations=PLAIN_MLP, normalization="none"),
    ("nemotron", "jais2"): _llama(mlp_activations=PLAIN_MLP, normalization="layernorm"),
    ("cosmos3_edge_text",): _llama(mlp_activations=PLAIN_MLP),
    ("arcee",): _llama(mlp_activations=PLAIN_MLP),  # squared ReLU
    ("glm",): _llama(attention_output_bias=False),
    ("glm4v_text",): _llama(attention_bias=True, attention_output_bias=False, norms_per_layer=4),
    ("glm_ocr_text",): _llama(attention_bias=False, norms_per_layer=4),
    ("glm4",): _llama(attention_output_bias=False, norms_per_layer=4),
    ("exaone4",): _llama(qk_norm="head", layer_types=_interval_windows),
    # The norms on queries and keys have one scale per head
    ("stablelm",): _llama(
        lambda c: heads(c, derived=True),
        normalization="layernorm",
        attention_bias=_flag("use_qkv_bias"),
        attention_output_bias=False,
        norms_per_layer=_choice("use_parallel_residual", 1, 2),
        qk_norm=_choice("qk_layernorm", "all_heads", ""),
    ),
    ("seed_oss",): _llama(attention_output_bias=_flag("attention_out_bias")),
    ("ernie4_5", "paddleocr_vl_text"): _llama(
        attention_bias=_flag("use_bias"), use_bias=_flag("use_bias")
    ),
    ("olmo",): _llama(normalization="none"),
    ("olmo2",): _llama(qk_norm="all_heads"),
    ("olmo3",): _llama(qk_norm="all_heads", layer_types=_listed(every(4, FULL, SLIDING))),
    ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"): _llama(
        attention_bias=True, attention_output_bias=False, layer_types=_late_windows
    ),
    ("qwen3", "qwen3_vl_text"): _llama(qk_norm="head", layer_types=_late_windows),
    ("muse_glimmer_text",): _llama(
        norms_per_layer=4,
        attention_gate_width=_size("head_dim"),
        layer_types=_full_from_last,
    ),
    # xIELU has two learned scalars
    ("apertus", "apertus1p5_text"): _llama(
        mlp_activations=PLAIN_MLP, qk_norm="head", activation_weights=2
    ),
    # Attention and MLP in parallel after one norm
    ("cohere",): _llama(norms_per_layer=1, qk_norm=_choice("use_qk_norm", "all_heads", "")),
    ("cohere_compass_text",): _llama(norms_per_layer=1, layer_types=_listed(lambda _: FULL)),
    ("molmo2_text",): _llama(
        attention_output_bias=False,
        further_vectors=lambda c: c.optional_size("additional_vocab_size") * c.size("hidden_size"),
        qk_norm=lambda c: "head" if c.get("qk_norm_type") == "qwen3" else "all_heads",
    ),
    ("cohere2",): _llama(
        norms_per_layer=1,
        layer_types=lambda c: layer_types(
            c, every(c.size("sliding_window_pattern", 4), FULL, SLIDING)
        ),
    ),
    # ALiBi positions, norms and projections without bias
    ("mpt",): _llama(
        equal_heads,
        mlp_activations=PLAIN_MLP,
        attention_bias=False,
        mlp_dim=_wider(4),
    ),
    ("youtu", "minicpm3"): _llama(),
    ("qwen3_5_text",): _llama(delta_net),
}

_LEARNED = {"position_embedding": "learned", "trainable_position_size": _size("n_positions")}
_GPT = {
    ("gpt2", "gpt-sw3"): _gpt(equal_heads, _alone, mlp_dim=_wider(4, "n_inner"), **_LEARNED),
    ("gpt_bigcode",): _gpt(
        equal_heads,
        _alone,
        lambda c: {"num_kv_heads": 1} if c.flag("multi_query", default=True) else {},
        mlp_dim=_wider(4, "n_inner"),
        **_LEARNED,
    ),
    # Norms after the blocks, none at the end
    ("openai-gpt",): _gpt(equal_heads, mlp_dim=_wider(4), final_norm=False, **_LEARNED),
    # No bias on q, k and v; full and windowed layers as listed
    ("gpt_neo",): _gpt(
        equal_heads,
        attention_bias=False,
        attention_output_bias=True,
        position_embedding="learned",
        trainable_position_size=_size("max_position_embeddings"),
        mlp_dim=_wider(4, "intermediate_size"),
        sliding_window_size=_size("window_size"),
        layer_types=_attention_types,
    ),
    # Two extra rows in the table of positions; the token table may be narrower
    ("opt",): _gpt(
        equal_heads,
        attention_bias=_flag("enable_bias", default=True),
        use_bias=_flag("enable_bias", default=True),
        normalization=_choice("layer_norm_elementwise_affine", "layernorm", "none", default=True),
        final_norm=lambda c: (
            c.flag("do_layer_norm_before", default=True) and not c.flag("_remove_final_layer_norm")
        ),
        position_embedding="learned",
        trainable_position_size=lambda c: c.size("max_position_embeddings") + 2,
        token_width=_wider(1, "word_embed_proj_dim"),
        mlp_dim=_size("ffn_dim"),
    ),
    # Sinusoidal positions, which have no weights
    ("xglm",): _gpt(equal_heads, _alone, mlp_dim=_size("ffn_dim")),
    # ALiBi positions, a norm after the embedding
    ("bloom",): _width_as_n_embed(_gpt(equal_heads, embedding_norm=True, mlp_dim=_wider(4))),
    ("falcon",): _width_as_n_embed(
        _gpt(
            _falcon,
            attention_bias=_flag("bias"),
            use_bias=_flag("bias"),
            mlp_dim=_wider(4, "ffn_hidden_size"),
        )
    ),
    # Sinusoidal positions; biases everywhere, including the head
    ("ctrl",): _gpt(equal_heads, head_bias=True, mlp_dim=_size("dff")),
    # Learned positions, in a table with two extra rows
    ("biogpt",): _gpt(
        equal_heads,
        position_embedding="learned",
        trainable_position_size=lambda c: c.size("max_position_embeddings") + 2,
    ),
    # Attention (without bias) and MLP in parallel after one norm; the head has a bias
    ("gptj", "codegen"): _gpt(
        equal_heads,
        attention_bias=False,
        norms_per_layer=1,
        head_bias=True,
        mlp_dim=_wider(4, "n_inner"),
    ),
    # One bias in the whole model, on the last layer's attention output
    ("gpt_neox_japanese",): _gpt(
        equal_heads,
        attention_bias=False,
        use_bias=False,
        further_vectors=_size("hidden_size"),
        mlp_dim=lambda c: c.size("hidden_size") * c.size("intermediate_multiple_size"),
    ),
    # Two norms even if attention and MLP are parallel
    ("gpt_neox",): _gpt(equal_heads, attention_bias=_flag("attention_bias", default=True)),
    # Attention and MLP in parallel after one norm; biases everywhere, including the head
    ("phi",): _gpt(
        heads,
        norms_per_layer=1,
        head_bias=True,
        qk_norm=_choice("qk_layernorm", "head", ""),
        qk_norm_bias=_flag("qk_layernorm"),
    ),
    ("persimmon",): _gpt(
        equal_heads,
        qk_norm=_choice("qk_layernorm", "head", "", default=True),
        qk_norm_bias=_flag("qk_layernorm", default=True),
    ),
    ("starcoder2",): _gpt(
        heads,
        attention_bias=_flag("use_bias", default=True),
        use_bias=_flag("use_bias", default=True),
    ),
}

_LATER = _experts("first_k_dense_replace")
_LIGHTNING = "lightning_attention"
_LARA = ("linear_attention", SLIDING, "linear_attention", FULL, SLIDING)
_MIXTURES = {
    ("mixtral", "granitemoe", "granitemoeshared", "aria_text"): _llama(_experts()),
    ("granitemoe_swa",): _llama(
        _experts(),
        attention_sinks=True,
        layer_types=_listed(first_of(4, FULL, SLIDING)),
    ),
    ("hunyuan_v1_moe",): _llama(_experts(), qk_norm="head", shared_experts=1),
    ("minimax_m2", "olmoe", "flex_olmo"): _llama(_experts(), qk_norm="all_heads"),
    # Biases on router and experts; one sink per head
    ("gpt_oss",): _llama(
        _experts(),
        expert_bias=True,
        routed_bias=True,
        attention_sinks=True,
        layer_types=_listed(every(2, FULL, SLIDING)),
    ),
    ("solar_open",): _llama(
        _experts(),
        attention_output_bias=False,
        mlp_dim=0,
    ),
    ("hy_v3",): _llama(_experts(1), qk_norm="head"),
    ("dots1",): _llama(_LATER, qk_norm="head", layer_types=_late_windows),
    ("exaone_moe",): _llama(_LATER, qk_norm="head", layer_types=_interval_windows),
    ("kolibri1",): _llama(
        _experts(),
        norms_per_layer=4,
        qk_norm="head",
        mlp_dim=0,
        layer_types=_listed(every(5, FULL, SLIDING)),
    ),
    ("mellum",): _llama(_experts(), qk_norm="head", layer_types=_listed(lambda _: FULL)),
    ("glm4_moe", "glm4v_moe_text", "sarvam_moe"): _llama(
        lambda c: heads(c, floor=True),
        _LATER,
        attention_output_bias=False,
        qk_norm=_choice("use_qk_norm", "head", ""),
    ),
    # Three norms and two gates of the residual per layer; norms before and after narrower experts
    ("muse_spark_text",): _llama(
        _experts(),
        norms_per_layer=5,
        attention_gate_width=_size("head_dim"),
        layer_types=_full_from_last,
        moe_expert_input_dim=_size("moe_hidden_size"),
        latent_norms=2,
    ),
    # Like qwen3_next, with windows too, without the gates of attention and of the shared expert
    ("lara_mini",): _llama(
        delta_net,
        _experts(),
        lambda c: {
            "attention_output_gate": False,
            "mlp_dim": 0,
            "layer_types": layer_types(c, lambda i: _LARA[i % len(_LARA)]),
        },
    ),
    ("qwen3_next",): _llama(delta_net, qwen_experts),
    ("qwen3_5_moe_text",): _llama(delta_net, _experts(), shared_expert_gate=True, mlp_dim=0),
    ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"): _llama(
        qwen_experts,
        qk_norm="head",
        sliding_window_size=lambda c: (
            c.optional_size("sliding_window") if c.flag("use_sliding_window") else 0
        ),
    ),
    # A gate as wide as the heads; norms before and after; a bias helps select the experts
    ("afmoe",): _llama(
        _experts("num_dense_layers"),
        norms_per_layer=4,
        qk_norm="head",
        attention_gate_width=_head_width,
        layer_types=lambda c: layer_types(
            c, every(c.size("global_attn_every_n_layers"), FULL, SLIDING)
        ),
        routed_bias=True,
    ),
    # One gate with a bias per head; norms before and after each block
    ("beam",): _llama(
        _experts(3),
        norms_per_layer=4,
        qk_norm="head",
        attention_gate_width=_head_width,
        layer_types=_sixth_or_last,
        further_vectors=lambda c: c.size("num_hidden_layers") * heads(c)["num_query_heads"],
    ),
    # Alternating attention and lightning attention
    ("minimax",): _llama(
        _experts(),
        layer_types=lambda c: layer_types(
            c, lambda i: _LIGHTNING if i % 2 else FULL, linear_attention=_LIGHTNING
        ),
    ),
    ("deepseek_v2", "deepseek_v3", "mistral4", "sarvam_mla"): _llama(_LATER),
    ("deepseek_ocr2_text", "glm4_moe_lite"): _llama(_experts(1)),
    # An indexer selects each query's keys; transformers does not read mlp_bias
    ("deepseek_v32", "glm_moe_dsa"): _llama(_LATER, indexer, use_bias=False),
    # Gates after norms, and queries that also produce an output gate
    ("axk2",): _llama(
        lambda c: experts(c, sparse_layers(c)),
        indexer,
        norm_gate_rank=_size("gated_norm_rank"),
        gated_queries=True,
    ),
    # A gate and sinks; several residual streams
    ("hy_v4", "hy_v4_vl_text"): _llama(
        _experts(1),
        indexer,
        attention_gate_width=lambda c: latent(c)["v_head_dim"],
        attention_sinks=True,
        mhc_expansion_rate=_size("hc_mult"),
    ),
    # Windows do not hide what was read before decoding, which in training is everything.
    ("unlimited_ocr_text",): _llama(
        lambda c: experts(c, c.size("first_k_dense_replace", 1, zero=True)),
        lambda c: heads(c, floor=True, derived=True),
        sliding_window_size=0,
    ),
}

TABLES = (_DENSE, _GPT, _MIXTURES)
for _table in TABLES:
    for _names, _translate in _table.items():
        TRANSLATIONS.update(dict.fromkeys(_names, _translate))
