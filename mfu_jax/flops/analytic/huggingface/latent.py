"""Decoders with multi-head latent attention (MLA), dense or with experts; rules of DeepSeek V4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    changed_layers,
    checked_length,
    decoder,
    every,
    experts,
    has_rope,
    latent,
    layer_types,
    model_type,
    refuse,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import (
    BORROWED,
    FULL,
    INDEXED,
    NOPE,
    SHARED_INDEX,
    SLIDING,
)
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


@model_type("axk1")
def axk1(c: Fields) -> ModelConfig:
    """Like deepseek_v3, with a norm after the experts."""
    values = experts(c, sparse_layers(c))
    sparse = values["feed_forward_types"].count("moe")
    return decoder(c, **values, further_vectors=sparse * c.size("hidden_size"))


@model_type("dots3_note_text")
def dots3_note_text(c: Fields) -> ModelConfig:
    """Latent attention with an indexer, or windows with sizes of their own; one gate per head."""
    renamed = {}
    if c.has("use_dsa") or not c.has("per_layer_config"):
        sparse = c.flag("use_dsa", default=True)
        renamed = {FULL: INDEXED} if sparse else {INDEXED: FULL}
    windows = c.flag("use_sliding_window", default=True)
    indexed = indexer(
        c, lambda i: SLIDING if windows and i > 1 and i % 4 != 1 else INDEXED, **renamed
    )
    kinds, sizes = indexed["layer_types"], latent(c)
    in_windows = latent(changed_layers(c, kinds, SLIDING) or _dots_windows(c))
    # One more norm, of the rotary part of the keys
    rope = {True: in_windows["qk_rope_head_dim"], False: sizes["qk_rope_head_dim"]}
    return decoder(
        c,
        use_bias=False,  # transformers does not read mlp_bias
        attention_gate_width=1,
        in_windows=list(in_windows.items()),
        sliding_window_size=c.size("sliding_window", c.size("sliding_window_size", 512)),
        further_vectors=sum(rope[kind == SLIDING] for kind in kinds),
        shared_expert_dim=c.size(
            "moe_shared_expert_intermediate_size", c.size("shared_experts_intermediate_size")
        ),
        **sizes,
        **experts(c, sparse_layers(c)),
        **indexed,
    )


def _dots_windows(c: Fields) -> Fields:
    """The sizes of the windowed layers in published files, or else their defaults."""
    defaults = {
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1024,
        "kv_lora_rank": 1024,
        "head_dim": 256,
        "qk_nope_head_dim": 192,
        "v_head_dim": 128,
    }
    sizes = {name: c.size(f"swa_{name}", size) for name, size in defaults.items()}
    rope = c.size("swa_qk_rope_head_dim", sizes["head_dim"] - sizes["qk_nope_head_dim"])
    return c.with_values(qk_rope_head_dim=rope, **sizes)


def sparse_layers(c: Fields) -> Callable[[int], bool]:
    """Whether a layer has experts: from the first on every n-th, or as listed."""
    first = c.size("first_k_dense_replace", 1, zero=True)
    if isinstance(c.get("moe_layer_freq"), list | tuple):
        listed = c.list_of(int, "moe_layer_freq") or []
        return lambda i: i >= first and listed[i : i + 1] != [0]
    step = c.size("moe_layer_freq", 1)
    return lambda i: i >= first and i % step == 0


def indexer(
    c: Fields, default: Callable[[int], str] = lambda _: INDEXED, **renamed: str
) -> dict[str, Any]:
    """Layers with an indexer of their own, and for some types those that reuse an earlier one's."""
    kinds = layer_types(c, default, **renamed)
    if interval := _SHARING.get(c.model_type):
        own = _own_indexers(c, interval)
        kinds = [
            SHARED_INDEX if kind == INDEXED and not own[i] else kind for i, kind in enumerate(kinds)
        ]
    return {
        "layer_types": kinds,
        "use_indexer": True,
        "indexer_n_heads": c.size("index_n_heads"),
        "indexer_head_dim": c.size("index_head_dim"),
        "indexer_topk": c.size("index_topk"),
    }


# Types whose layers may reuse an indexer, and the interval of the layers with one of their own.
_SHARING = {
    **dict.fromkeys(("glm_moe_dsa", "glm5_next_text", "mistral_large4_text"), 1),
    **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), 4),
}


def _own_indexers(c: Fields, default: int) -> list[bool]:
    """Whether each layer has an indexer: listed, in a pattern such as FSSF, or every n-th."""
    name = "indexer_types" if c.has("indexer_types") else "index_topk_pattern"
    if given := list(c.get(name) or ()):
        if unknown := [kind for kind in given if kind not in ("full", "shared", "F", "S")]:
            c.fail(name, f"has {unknown[0]!r}, expected full or shared")
        return [kind in ("full", "F") for kind in checked_length(c, name, given)]
    interval = max(c.size("index_topk_freq", default, zero=True), 1)
    offset = c.size("index_skip_topk_offset", 2, zero=True)
    return [max(i - offset + 1, 0) % interval == 0 for i in range(c.size("num_hidden_layers"))]


@model_type("glm5_next_text")
def glm5_next_text(c: Fields) -> ModelConfig:
    """Kimi delta attention, and in every fourth layer latent attention to pooled keys; streams.

    A query also sees up to `index_kpool` - 1 tokens of the last, unfinished pool, not counted here.
    """
    kinds = indexer(
        c,
        every(4, INDEXED, "kimi_delta"),
        linear_attention="kimi_delta",
        full_attention=INDEXED,
    )
    return decoder(
        c,
        gdn_num_value_heads=c.size("linear_num_heads"),
        gdn_value_head_dim=c.size("linear_head_dim"),
        gdn_conv_kernel_dim=c.size("linear_conv_kernel_dim"),
        gdn_low_rank_gates=2,
        indexer_pool=c.size("index_kpool"),
        mhc_expansion_rate=c.size("hc_mult"),
        stream_mixing=True,
        **experts(c, 3),
        **kinds,
    )


@model_type("mistral_large4_text")
def mistral_large4_text(c: Fields) -> ModelConfig:
    """Latent attention with an indexer on the layer's input, in some layers without rotary keys.

    A layer may use an earlier one's latent. Queries are scaled by two weights a head, the indexer's
    too, whose input has a norm; the rotary frequencies are learned.
    """
    if c.has("num_experts"):
        c = c.with_values(n_routed_experts=c.size("num_experts"))
    layers, sizes, indexed, rotary = (
        c.size("num_hidden_layers"),
        latent(c),
        indexer(c),
        has_rope(c),
    )
    sources = c.list_of(int, "kv_source_layers") or list(range(layers))
    kinds = [
        f"{kind}{'' if rotary(i) else NOPE}{'' if source == i else BORROWED}"
        for i, (kind, source) in enumerate(
            zip(indexed["layer_types"], checked_length(c, "kv_source_layers", sources), strict=True)
        )
    ]
    of_indexer = 2 * (c.size("hidden_size") + indexed["indexer_n_heads"])
    return decoder(
        c,
        further_vectors=sum(kind.startswith(INDEXED) for kind in kinds) * of_indexer
        + 2 * layers * sizes["num_query_heads"]
        + sizes["qk_rope_head_dim"] // 2,
        **sizes,
        **experts(c, "first_k_dense_replace"),
        **{**indexed, "layer_types": kinds},
    )


@model_type("longcat_flash")
def longcat_flash(c: Fields) -> ModelConfig:
    """Two blocks of attention and MLP a layer, and beside the first experts for its input.

    Some experts compute nothing. If routing is uniform, their share of a token's is that of all.
    """
    layers = c.size("num_hidden_layers", 2 * c.size("num_layers")) // 2
    values = experts(c)
    idle = c.optional_size("zero_expert_num")
    share = Fraction(idle, idle + values["num_experts"])
    return decoder(
        c.with_values(num_hidden_layers=2 * layers),
        feed_forward_types=("dense+moe", "dense") * layers,
        mlp_dim=c.size("ffn_hidden_size"),
        routed_bias=c.flag("router_bias"),
        zero_experts=idle,
        zero_experts_per_tok=share * values["num_experts_per_tok"],
        **values,
    )


_SPARSE, _HEAVY, _WINDOW = (
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "sliding_attention",
)
# The ratio whose keys an indexer selects, in MaxText's list of ratios and in older configs.
_SPARSE_RATIO = 4


def grouped_outputs(c: Fields) -> dict[str, Any]:
    """Checks DeepSeek V4's groups of heads; an MLP with a bias is refused."""
    refuse(c, "mlp_bias")
    if c.size("num_attention_heads") * c.size("head_dim") % c.size("o_groups"):
        c.fail("o_groups", "expected a divisor of num_attention_heads · head_dim")
    return {}


def compress_ratios(c: Fields) -> tuple[int, ...]:
    """Tokens per compressed key, for each layer; 0: window only."""
    layers = c.size("num_hidden_layers")
    rates = c.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        c.fail("compress_rates", "expected an object")
    sparse = rates.get(_SPARSE, c.size("compress_rate_csa", _SPARSE_RATIO))
    heavy = rates.get(_HEAVY, c.size("compress_rate_hca", 128))
    if sparse != _SPARSE_RATIO or not isinstance(heavy, int) or heavy <= _SPARSE_RATIO:
        c.fail("compress_rates", f"expected {_SPARSE_RATIO} for {_SPARSE} and more for {_HEAVY}")
    of_kind = {_WINDOW: 0, _SPARSE: _SPARSE_RATIO, _HEAVY: heavy}
    kinds = c.list_of(str, "layer_types")
    if kinds is not None:
        if unknown := [kind for kind in kinds if kind not in of_kind]:
            c.fail("layer_types", f"has {unknown[0]!r}, expected {', '.join(of_kind)}")
        # Older configs also list the layers of the prediction modules.
        kinds = kinds[:layers]
        return tuple(of_kind[kind] for kind in checked_length(c, "layer_types", kinds))
    given = c.list_of(int, "compress_ratios")
    if given is not None:
        return tuple(checked_length(c, "compress_ratios", given[:layers]))
    return tuple(_SPARSE_RATIO if i > 1 and i % 2 else heavy for i in range(layers))


def hash_layers(c: Fields) -> int:
    """How many of the first layers route by a hash of the token."""
    layers = c.size("num_hidden_layers")
    kinds = c.list_of(str, "mlp_layer_types")
    if kinds is None:
        return min(c.size("num_hash_layers", 3, zero=True), layers)
    kinds = kinds[:layers]
    hashed = kinds.count("hash_moe")
    if set(kinds[:hashed]) - {"hash_moe"} or set(kinds[hashed:]) - {"moe"}:
        c.fail("mlp_layer_types", "expected hash_moe for the first layers, then moe")
    return hashed
