"""--trace: the real PyTorch models, counted on the meta device.

The data files were counted by torch's own flop_counter, with eager attention and without any code
of ours. Needs the extra ``trace-hf``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.huggingface import from_hf_config
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import flops_breakdown, model_flops_per_device
from mfu_jax.flops.masks import Causal, SlidingWindow, TopK
from tests.support.paths import DATA

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

import transformers

from mfu_jax.flops.pytorch import count_pytorch_model

# One type for each kind of attention interface, mask, and experts.
_TYPES = (
    "llama gpt2 gptj gemma2 cwm qwen3_next mixtral gpt_oss granitemoe glm4_moe_lite deepseek_v2 "
    "afmoe falcon bloom mpt opt jamba lfm2_moe nemotron_h recurrent_gemma rwkv vaultgemma "
    "inkling_text inkling2_text zaya"
).split()


def read(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DATA / name).read_text(encoding="utf-8"))["rows"]
    return rows


# Their classes fill a row of the table that a small vocabulary does not have, or read images; the
# length of T5's source is another there.
_NOT_BUILT = ("smollm3", "glm", "glm4", "phi3", "vit", "clip", "whisper", "t5")


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in (*read("hf_variants.json"), *read("hf_looped.json"))
        if "training_flops" in row and row["model_type"] not in _NOT_BUILT
    ],
    ids=lambda row: row["model_type"],
)
def test_training_equals_forward_and_backward_of_the_real_model(row: dict[str, Any]) -> None:
    """Also where cycles run under no_grad (hrm_text), so that backward is not twice forward."""
    rows = count_pytorch_model({"model_type": row["model_type"], **row["config"]}, row["seq"]).rows(
        row["batch"], "dense"
    )
    assert sum(part["forward_flops"] for part in rows) == row["forward_flops"]
    # The row leaves convolutions out: torch's formula for their backward pass ignores groups.
    convolutions = 3 * row.get("convolution_flops", 0)
    assert sum(part["training_flops"] for part in rows) == row["training_flops"] + convolutions


def test_an_indexer_that_no_loss_reaches_has_no_backward_pass() -> None:
    row = last_variant("deepseek_v32")
    config = {"model_type": "deepseek_v32", **row["config"]}
    backward = {
        part.backward
        for part in count_pytorch_model(config, 24).matmuls
        if "indexer" in part.module
    }
    assert backward == {0}


def last_variant(model_type: str) -> dict[str, Any]:
    rows = json.loads((DATA / "hf_variants.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["model_type"] == model_type][-1]


def forward(config: dict[str, Any], length: int, counting: Any) -> Any:
    matmuls = count_pytorch_model(config, length).matmuls
    return sum(part.forward_flops(counting) for part in matmuls)


@pytest.mark.parametrize("model_type", _TYPES)
def test_forward_and_parameters_equal_those_of_torchs_own_counter(model_type: str) -> None:
    row = last_variant(model_type)
    counted = count_pytorch_model({"model_type": model_type, **row["config"]}, row["seq"])
    dense = sum(part.forward_flops("dense") for part in counted.matmuls)
    assert row["batch"] * dense == row["forward_flops"]
    assert counted.parameters == row["num_params"]
    assert counted.model_class == row["class"]


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "minimax", "granitemoehybrid"])
def test_a_scan_multiplies_activations(model_type: str) -> None:
    row = last_variant(model_type)
    config = {"model_type": model_type, **row["config"]}
    matmuls = count_pytorch_model(config, row["seq"]).matmuls
    scans = [part for part in matmuls if part.kind == "attention" and part.mask is None]
    assert row["batch"] * sum(part.forward_flops("dense") for part in scans) == row["scan_flops"]


def test_experts_taken_by_their_numbers_are_weights() -> None:
    config = {"model_type": "mixtral", **last_variant("mixtral")["config"]}
    matmuls = count_pytorch_model(config, 24).matmuls
    assert {p.kind for p in matmuls if p.module.endswith("experts")} == {"weight"}
    assert {p.module for p in matmuls if p.kind == "attention"} == {"model.layers.*.self_attn"}


@pytest.mark.parametrize("convention", ["exact", "maxtext"])
@pytest.mark.parametrize("model_type", ["llama", "vaultgemma", "cwm", "afmoe", "ministral"])
def test_pairs_of_masks_equal_those_of_the_formulas(model_type: str, convention: str) -> None:
    config = {"model_type": model_type, **last_variant(model_type)["config"]}
    wanted = model_flops_per_device({**config, "max_target_length": 24}, convention).forward
    assert forward(config, 24, convention) == wanted


def test_windows_and_causal_layers_are_told_apart() -> None:
    config = {"model_type": "cwm", **last_variant("cwm")["config"]}
    config |= {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}
    config |= {"sliding_window": 7}
    masks = {part.mask for part in count_pytorch_model(config, 24).matmuls if part.mask}
    assert masks == {Causal(), SlidingWindow(7)}


def test_an_indexer_keeps_its_number_of_keys() -> None:
    config = {"model_type": "glm_moe_dsa", **last_variant("glm_moe_dsa")["config"], "index_topk": 5}
    masks = {part.mask for part in count_pytorch_model(config, 24).matmuls if part.mask}
    assert masks == {TopK(5)}


def test_matmuls_of_two_activations_without_a_known_mask_are_named() -> None:
    config = {"model_type": "gpt_neo", **last_variant("gpt_neo")["config"]}
    notes = " ".join(count_pytorch_model(config, 24).notes)
    assert "in transformer.h.*.attn.attention count as they run, masked or not" in notes


def test_a_tower_that_does_not_run_is_named() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 4}
    small |= {"intermediate_size": 64}
    config = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 131, "pad_token_id": 0, **small},
        "vision_config": {"model_type": "clip_vision_model", **small},
        "image_token_index": 7,
    }
    counted = count_pytorch_model(config, 16)
    assert "vision" in " ".join(note for note in counted.notes if note.startswith("text only"))
    # One llama layer: q, k, v, o, two input matrices and one output matrix; QKᵀ and PV; the head.
    tokens, width, hidden = 16, 48, 64
    dense = 2 * tokens * (4 * width**2 + 3 * width * hidden + 2 * tokens * width + 131 * width)
    assert sum(part.forward_flops("dense") for part in counted.matmuls) == dense


def test_remote_code_is_refused_even_if_the_type_is_known() -> None:
    config = {"model_type": "llama", "auto_map": {"AutoModel": "modeling.Model"}}
    with pytest.raises(UserError, match=r"(?s)auto_map.*never run.*remove auto_map"):
        count_pytorch_model(config, 16)


def test_a_type_that_transformers_lacks_is_an_error() -> None:
    with pytest.raises(UserError, match="has no model_type 'llama9'"):
        count_pytorch_model({"model_type": "llama9"}, 16)


def test_a_model_that_reads_values_is_an_error_with_the_reason() -> None:
    small = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 131}
    with pytest.raises(UserError, match="without values: NotImplementedError"):
        count_pytorch_model({"model_type": "longcat_flash", **small, "n_routed_experts": 4}, 16)


_VARIED = {row["model_type"] for row in read("hf_variants.json")}


@pytest.mark.parametrize("model_type", sorted(_VARIED & set(transformers.CONFIG_MAPPING)))
def test_a_config_counts_the_same_after_transformers_has_saved_it(model_type: str) -> None:
    """Some types save a field under another name (bailing_hybrid's head_dim)."""
    row = last_variant(model_type)
    saved = transformers.AutoConfig.for_model(model_type, **row["config"]).to_json_string(
        use_diff=False
    )
    before, after = (
        from_hf_config({**config, "max_target_length": row["seq"]})
        for config in ({"model_type": model_type, **row["config"]}, json.loads(saved))
    )
    assert flops_breakdown(before) == flops_breakdown(after)
    assert count_parameters(before) == count_parameters(after)


def test_two_counts_in_one_process_are_the_same() -> None:
    config = {"model_type": "llama", **last_variant("llama")["config"]}
    assert count_pytorch_model(config, 24) == count_pytorch_model(config, 24)
