"""`scale=tiny`: a model with its sizes divided and its pattern of layers kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mfu_jax.util.yaml_files import read_mapping

_FILE = Path(__file__).with_name("tiny.yml")
# Bytes of text.
_VOCABULARY = 256
_WIDTH = 64
# For images that are not square: 6 × 9 patches.
_SIDES = [24, 36]
_QUERY_HEADS = 4
_REPEATS = 2


def scaled_down(model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model, each divided to a few dozen.

    Args:
        model: MaxText's names → values of a bundled model.

    Returns:
        The same keys. Every kind of layer is kept, in the model's order, and twice where a
        pattern repeats.
    """
    small, table = dict(model), read_mapping(_FILE)
    for key, limit in table["at_most"].items():
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
    return small | _layers(model, table)


def _layers(model: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
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
    given = (model[key] for key in table["period_keys"] if model.get(key, 0) > 1)
    period = next(given, table["periods"].get(block, 1))
    first = min(model.get("first_num_dense_layers", 0), 1)
    return {"num_decoder_layers": min(layers, first + _REPEATS * period)}
