"""`scale=tiny`: a model with its sizes divided and its pattern of layers kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Bytes of text.
_VOCABULARY = 256
_WIDTH = 64
# Size → its maximum; ratios between sizes of one kind may change.
_AT_MOST = {
    "head_dim": 16,
    "mlp_dim": 128,
    "moe_mlp_dim": 64,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window_size": 32,
    "chunk_attn_window_size": 32,
    "global_head_dim": 32,
    "global_num_kv_heads": 1,
    "attention_output_dim": 32,
    "moe_expert_input_dim": 32,
    "indexer_n_heads": 2,
    "indexer_head_dim": 16,
    "indexer_topk": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "gdn_key_head_dim": 16,
    "gdn_value_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": _VOCABULARY,
    "engram_num_heads": 2,
    "engram_head_dim": 16,
    "n_routing_groups": 4,
    "topk_routing_group": 2,
    "first_num_dense_layers": 1,
    "image_size_for_vit": 32,
    "tile_size_for_vit": 16,
    "patch_size_for_vit": 4,
    "hidden_size_for_vit": 32,
    "intermediate_size_for_vit": 128,  # for Llama 4, four patches
    "num_hidden_layers_for_vit": 2,
    "num_attention_heads_for_vit": 4,
    "num_position_embeddings_for_vit": 16,
    "out_hidden_size_for_vit": _WIDTH,
    "projector_input_dim_for_vit": 48,
    "projector_output_dim_for_vit": 48,
}
# For images that are not square: 6 × 9 patches.
_SIDES = [24, 36]
_QUERY_HEADS = 4
# Layers after which a family's pattern repeats, where its sizes do not tell.
_PERIODS = {"gemma3": 6, "gemma4": 6, "olmo3": 4, "gpt_oss": 2}
_REPEATS = 2


def scaled_down(model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model, each divided to a few dozen.

    Args:
        model: MaxText's names → values of a bundled model.

    Returns:
        The same keys. Every kind of layer is kept, in the model's order, and twice where a
        pattern repeats.
    """
    small = dict(model)
    for key, limit in _AT_MOST.items():
        if key in small:
            is_one = isinstance(small[key], int)
            small[key] = min(small[key], limit) if is_one else _SIDES
    small["vocab_size"], small["emb_dim"] = _VOCABULARY, _WIDTH
    small["num_query_heads"] = _QUERY_HEADS
    if "num_kv_heads" in model:
        group = model["num_query_heads"] // model["num_kv_heads"]
        small["num_kv_heads"] = max(1, _QUERY_HEADS // group)
    if "engram_vocab_bases" in model:
        small["engram_vocab_bases"] = [_VOCABULARY for _ in model["engram_vocab_bases"]]
    if deep := model.get("deepstack_visual_indexes_for_vit"):
        small["deepstack_visual_indexes_for_vit"] = list(range(len(deep)))[:_REPEATS]
    return small | _layers(model)


def _layers(model: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers, and how many of them are special."""
    block, layers = model["decoder_block"], model["num_decoder_layers"]
    if block == "gemma4_small":
        period = model["sliding_window_pattern"]
        return {"num_decoder_layers": 2 * period, "num_kv_shared_layers": period}
    if ratios := model.get("compress_ratios"):
        # The first three layers differ; then one pair repeats.
        shown = min(layers, 3 + 2 * _REPEATS)
        return {"num_decoder_layers": shown, "compress_ratios": list(ratios[:shown])}
    if engrams := model.get("engram_layers"):
        return {"num_decoder_layers": min(layers, max(engrams) + 1)}
    period = _PERIODS.get(block, 1)
    if model.get("nope_layer_interval"):
        period = model["nope_layer_interval"]
    elif model.get("interleave_moe_layer_step", 1) > 1:
        period = model["interleave_moe_layer_step"]
    elif block in ("qwen3_next", "qwen3_5"):
        period = model["inhomogeneous_layer_cycle_interval"]
    first = min(model.get("first_num_dense_layers", 0), 1)
    return {"num_decoder_layers": min(layers, first + _REPEATS * period)}
