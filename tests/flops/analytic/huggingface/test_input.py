"""config.json as a user gives it: files, mappings, overrides, and their errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.commands.flops import main
from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.huggingface import from_hf_config, translated
from mfu_jax.flops.analytic.huggingface.common import TRANSLATIONS
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import (
    calculate_tflops_per_device,
    flops_breakdown,
    model_flops_per_device,
)
from tests.support.messages import is_told
from tests.support.paths import DOCS

TINY = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# By hand, each token: q and o 8 × 8, k and v 8 × 4, three 8 × 12, twice; logits 8 × 100.
TINY_WEIGHT_MACS = 2 * (2 * 64 + 2 * 32 + 3 * 96) + 800
# Table and head, and two norms a layer, one at the end.
TINY_PARAMETERS = TINY_WEIGHT_MACS + 800 + 5 * 8


def test_mapping_file_and_folder_give_the_same_count(tmp_path: Path) -> None:
    step = {"per_device_batch_size": 2, "max_target_length": 16}
    # Scores: 8 multiply-adds for each of QKᵀ and PV over 16² pairs, 2 layers, 2 sequences.
    forward = 2 * (2 * 16 * TINY_WEIGHT_MACS + 2 * 2 * 2 * 8 * 16**2)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sources = [
        {**TINY, **step},
        *(load_model_config(p, step) for p in (tmp_path, tmp_path / "config.json")),
    ]
    for source in sources:
        assert model_flops_per_device(source, "dense").forward == forward
        assert count_parameters(source).total == TINY_PARAMETERS
        assert calculate_tflops_per_device(source, "dense").total == 3 * forward / 1e12


def test_a_configuration_object_of_transformers_is_a_config() -> None:
    class LlamaConfig:
        model_type = "llama"

        def to_dict(self) -> dict[str, Any]:
            return TINY

    assert count_parameters(LlamaConfig()).total == TINY_PARAMETERS


def test_command_counts_a_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert main([str(path), "max_target_length=16", "convention=dense", "--json"]) in (0, None)
    answer = json.loads(capsys.readouterr().out)
    forward = 2 * (16 * TINY_WEIGHT_MACS + 2 * 2 * 8 * 16**2)
    assert answer["total_tflops"] == 3 * forward / 1e12


def test_null_is_called_as_in_json(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for text, kind in (("null", "null"), ("[]", "a list")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"expected a JSON object, got {kind}$"):
            load_model_config(path)


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"model_type": "qwen3", "max_window_layers": 28}, {}),  # use_sliding_window: false
        (
            {"model_type": "qwen3", "max_window_layers": 1, "use_sliding_window": True},
            {"sliding_window": 4096},
        ),
        ({"model_type": "smollm3"}, {}),
        ({"model_type": "mistral"}, {"sliding_window": 4096}),
    ],
)
def test_a_size_that_the_count_does_not_use_is_not_left_out(
    changes: dict[str, Any], left_out: dict[str, int]
) -> None:
    sizes = {
        **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
    assert translated({**sizes, **changes})[1] == left_out


def test_sizes_that_a_file_leaves_to_its_types_defaults_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    cut = {key: TINY[key] for key in ("model_type", "vocab_size", "hidden_size")}
    path.write_text(json.dumps({**cut, "num_attention_heads": 2}))
    main([str(path), "max_target_length=16", "mlp_dim=12", "--json"])
    said = capsys.readouterr()
    # LlamaConfig's own, of Llama 7B.
    sizes = "num_hidden_layers=32, intermediate_size=11008$"
    (note,) = json.loads(said.out)["notes"]
    for words in (note, said.err.strip()):
        assert re.search(f"llama's defaults, where no argument gives them: {sizes}", words)
    with pytest.warns(UserWarning, match=f"llama's defaults: {sizes}"):
        load_model_config(path)
    path.write_text(json.dumps(TINY))
    main([str(path), "--json"])
    assert not json.loads(capsys.readouterr().out)["notes"]


def test_overrides_change_the_count() -> None:
    one = load_model_config(TINY, {"num_decoder_layers": 1})
    assert count_parameters(one).total == TINY_PARAMETERS - (2 * 64 + 2 * 32 + 3 * 96 + 16)


@pytest.mark.parametrize("key", ["use_qk_norm", "capacity_factor", "encoder_length"])
def test_an_override_that_nothing_reads_is_reported(key: str) -> None:
    value = {"use_qk_norm": True, "capacity_factor": 1.25, "encoder_length": 7}[key]
    with pytest.warns(UserWarning, match=f"{key}={value} changes nothing"):
        load_model_config(TINY, {key: value, "max_target_length": 16, "mlp_dim": 12})


def test_logits_at_some_positions_only() -> None:
    some = load_model_config(TINY, {"logits_positions": 3, "max_target_length": 16})
    all_of_them = load_model_config(TINY, {"max_target_length": 16})
    missing = model_flops_per_device(all_of_them).forward - model_flops_per_device(some).forward
    assert missing == 2 * 13 * 8 * 100


def test_a_layer_more_than_is_listed_is_an_error() -> None:
    config = load_model_config(TINY, {"num_decoder_layers": 3})
    with pytest.raises(UserError, match="layer_types has 2 entries"):
        model_flops_per_device(config)


def test_a_field_may_have_another_name_of_the_model_type() -> None:
    short = from_hf_config({"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 3})
    long = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    assert from_hf_config({"model_type": "gpt2", **long}) == short


def test_channels_that_heads_do_not_share_equally_are_an_error() -> None:
    with pytest.raises(UserError, match="n_mamba_heads=3: expected a divisor of 5120"):
        from_hf_config({"model_type": "zamba2", "hidden_size": 2560, "n_mamba_heads": 3})


def test_gemma4_global_heads_by_their_own_field_or_layer_by_layer() -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 12}
    by_field = from_hf_config({**config, "global_head_dim": 128})
    listed = {"05": {"head_dim": 128}, "11": {"head_dim": 128}}
    assert from_hf_config({**config, "per_layer_config": listed}) == by_field
    with pytest.raises(UserError, match="per_layer_config"):
        from_hf_config({**config, "per_layer_config": {"4": {"head_dim": 128}}})


def test_older_spellings() -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "num_attention_heads": 4}
    assert from_hf_config({**bloom, "n_embed": 32}) == from_hf_config({**bloom, "hidden_size": 32})
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
    older = {"text_config": {}, "text_config_dict": sizes}
    assert from_hf_config({"model_type": "clip", **older}) == from_hf_config(
        {"model_type": "clip", "text_config": sizes}
    )
    kinds = ["sliding_attention", "full_attention"]
    exaone = {"model_type": "exaone4", "num_hidden_layers": 2, "layer_types": kinds}
    assert from_hf_config({**exaone, "sliding_window_pattern": "LLLG"}) == from_hf_config(exaone)


def test_null_is_not_absent() -> None:
    # Absent, Mistral has 8 key/value heads; null, as many as query heads.
    absent = from_hf_config({"model_type": "mistral"})
    null = from_hf_config({"model_type": "mistral", "num_key_value_heads": None})
    assert (absent.attention.num_kv_heads, null.attention.num_kv_heads) == (8, 32)


def test_windows_and_chunks_shorten_exact_attention() -> None:
    config = {**TINY, "model_type": "mistral", "sliding_window": 4, "max_target_length": 16}
    full = {**config, "sliding_window": None}
    # Pairs: 16·17/2 = 136, and in a window of 4 tokens 1 + 2 + 3 + 13·4 = 58.
    missing = model_flops_per_device(full, "exact").forward
    missing -= model_flops_per_device(config, "exact").forward
    assert missing == 2 * 2 * 2 * 8 * (136 - 58)
    both = [model_flops_per_device(c, "dense").forward for c in (full, config)]
    assert both[0] == both[1]


def test_bidirectional_windows_reach_to_both_sides() -> None:
    config = {
        **TINY,
        "model_type": "gemma3_text",
        "head_dim": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_bidirectional_attention": True,
        "max_target_length": 8,
    }
    causal = {**config, "use_bidirectional_attention": False}
    # 6 // 2 + 1 = 4: |i − j| < 4, that is 8 + 2·(7 + 6 + 5) pairs, and all 64.
    wide = model_flops_per_device(config, "exact").forward
    wide -= model_flops_per_device(causal, "exact").forward
    # Causal: a window of 6 has 1 + … + 5 + 3·6 = 33 pairs, the full layer 36.
    assert wide == 2 * 2 * 8 * (44 + 64 - 33 - 36)


@pytest.mark.parametrize(
    ("model_type", "full", "windowed"),
    # |i − j| ≤ 4: 12 + 2·(11 + 10 + 9 + 8) pairs of 12²; 0 ≤ i − j < 4: 1 + 2 + 3 + 9·4 of 12·13/2.
    [("modernbert", 144, 88), ("modernbert-decoder", 78, 42)],
)
def test_windows_of_modernbert_are_half_of_local_attention(
    model_type: str, full: int, windowed: int
) -> None:
    config = {**TINY, "model_type": model_type, "local_attention": 8, "max_target_length": 12}
    wide = {**config, "layer_types": ["full_attention"] * 2}
    missing = model_flops_per_device(wide, "exact").forward
    missing -= model_flops_per_device(config, "exact").forward
    # Layer 1 has a window; two products of width 8.
    assert missing == 2 * 2 * 8 * (full - windowed)


def test_a_bare_modernbert_has_neither_head_nor_its_matrix() -> None:
    config = {**TINY, "model_type": "modernbert"}
    bare = count_parameters({**config, "architectures": ["ModernBertModel"]}).total
    # A matrix, a norm and one bias per word; the tied table stays.
    assert count_parameters(config).total - bare == 8 * 8 + 8 + 100


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("qwen3", "linear_attention"),
        ("qwen3", "mamba2"),
        ("deepseek_v32", "block_sparse_attention"),
        ("gemma4_text", "conv"),
    ],
)
def test_layers_that_a_model_type_does_not_have_are_an_error(model_type: str, kind: str) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": [kind, "full_attention"]}
    given = {"model_type": model_type, "num_kv_shared_layers": 0, **layers}
    with pytest.raises(UserError, match=f"layer_types has '{kind}'"):
        model_flops_per_device(given)


def test_blocks_that_recurrent_gemma_does_not_have_are_an_error() -> None:
    given = {"model_type": "recurrent_gemma", "block_types": ["recurrent", "full_attention"]}
    with pytest.raises(UserError, match=r"block_types=.*expected recurrent or attention"):
        model_flops_per_device(given)


def test_the_bare_model_has_no_output_head() -> None:
    bare = count_parameters({**TINY, "architectures": ["LlamaModel"]})
    assert bare.total == TINY_PARAMETERS - 800


def test_prediction_modules_can_be_added() -> None:
    length = {"max_target_length": 16}
    config = load_model_config(TINY, length)
    base = model_flops_per_device(config)
    more = model_flops_per_device(load_model_config(TINY, {"mtp_num_layers": 1, **length}))
    assert more == model_flops_per_device(load_model_config(config, {"mtp_num_layers": 1}))
    layer = 16 * (2 * 64 + 2 * 32 + 3 * 96) + 2 * 8 * 16**2
    assert more.forward - base.forward == 2 * (layer + 16 * (2 * 8 * 8 + 800))


def test_the_chunked_scan_is_a_component_of_its_own() -> None:
    config = {"model_type": "qwen3_next", "num_hidden_layers": 1, "scan_chunk_size": 64}
    rows = {r.component: r for r in flops_breakdown({**config, "max_target_length": 128})}
    # A token and head: 64 · (3 · 128 + 2 · 128) inside the chunk, three passes over 128 × 128.
    macs = 32 * (64 * 5 * 128 + 3 * 128 * 128)
    assert rows["delta_net/core_chunked"].forward_flops == 2 * 128 * macs
    assert "delta_net/core" not in rows


def test_the_docs_list_every_model_type() -> None:
    page = DOCS / "huggingface.md"
    rows = page.read_text(encoding="utf-8").split("## Known model types")[1].split("Any other")[0]
    listed = [
        name
        for row in re.findall(r"^\| \w.*\|$", rows, re.M)
        for name in row.split("|")[2].split(",")
    ]
    assert sorted(name.strip() for name in listed) == sorted(TRANSLATIONS)


def test_unknown_model_type_tells_what_was_recognised_and_the_way_out() -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config({**TINY, "model_type": "lama"})
    for part in ("'lama'", "did you mean 'llama'", "hidden_size=8", "count_model_flops"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "wrapped",
    [
        {"model_type": "llava", "text_config": TINY},
        {"model_type": "of_next_year", "thinker_config": {"text_config": TINY}},
        # The wrapper says whether the head is tied.
        {"model_type": "llava", "text_config": {**TINY, "tie_word_embeddings": True}},
        {
            "model_type": "of_next_year",
            "tie_word_embeddings": True,
            "thinker_config": {"tie_word_embeddings": False, "text_config": TINY},
        },
    ],
)
def test_the_text_model_of_any_wrapper_is_counted_and_said_so(wrapped: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="its text model, llama: images, audio and other parts"):
        assert from_hf_config(wrapped) == from_hf_config(TINY)


def test_the_type_of_a_text_model_may_be_the_wrappers_with_text() -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 1024, "num_attention_heads": 8}
    with pytest.warns(UserWarning, match="its text model, qwen2_vl_text"):
        nested = from_hf_config({"model_type": "qwen2_vl", "text_config": sizes})
    with pytest.warns(UserWarning, match="its text model, qwen2_vl_text"):
        older = from_hf_config({"model_type": "qwen2_vl", **sizes})
    assert nested == older
    assert (nested.num_decoder_layers, nested.attention.head_dim) == (3, 128)


def test_images_of_a_wrapper_are_refused_not_left_out() -> None:
    with pytest.warns(UserWarning, match="llama"):
        config = from_hf_config({"model_type": "llava", "text_config": TINY})
    with pytest.raises(UserError, match="images_per_sequence=2"):
        flops_breakdown(config.replace(images_per_sequence=2))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava", "text_config": {"model_type": "unheard_of", "hidden_size": 8}},
        {"model_type": "llava", "text_config": {"hidden_size": 8}},
        {"model_type": "vision-text-dual-encoder", "text_config": {"model_type": "bert"}},
        {"model_type": "gemma4_assistant", "text_config": {"model_type": "gemma4_text"}},
    ],
)
def test_a_wrapper_without_a_known_text_decoder_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"(?s)is not known.*--trace counts the PyTorch model"):
        from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": -8}, "hidden_size=-8"),
        ({"hidden_size": "8"}, "hidden_size='8'"),
        ({"hidden_size": 8.0}, "hidden_size=8.0"),
        ({"hidden_size": float("nan")}, "hidden_size=nan"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": 10**400}, "hidden_size=1000"),
        ({"num_hidden_layers": 2**39}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": ["LlamaForRewardModel"]}, "architectures"),
        ({"max_target_length": 0}, "max_target_length"),
        ({"images_per_sequence": 1}, "images_per_sequence"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": [1, 2]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "x"]}, "layer_types"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 2}, "num_key_value_heads=1"),
        ({"model_type": "deepseek_v2", "num_key_value_heads": 2}, "num_experts_per_tok=None"),
        ({"model_type": "qwen3_5_text", "linear_num_value_heads": 5}, "linear_num_value_heads=5"),
        ({"model_type": "deepseek_v4", "num_key_value_heads": 1, "o_groups": 7}, "o_groups=7"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config=3"),
        ({"model_type": "gemma3", "text_config": {"head_dim": -1}}, "text_config.head_dim=-1"),
        ({"model_type": "clip", "vision_config": {"patch_size": 999}}, "vision_config.image_size"),
        ({"model_type": "jamba", "attn_layer_period": 0}, "attn_layer_period=0"),
        ({"model_type": "mamba2", "num_heads": 3}, "num_heads=3"),
        ({"model_type": "deepseek_v4", "compress_rates": [4]}, "compress_rates"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder"),
        ({"model_type": "helium", "head_dim": 5}, "head_dim=5"),
        ({"model_type": "llama4", "vision_config": {"pixel_shuffle_ratio": 0}}, "pixel_shuffle"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        calculate_tflops_per_device({**TINY, **changes})
    assert named in str(caught.value)
    assert is_told(str(caught.value))
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"hidden_size": 8}',
        '{"model_type": "llama", "hidden_size": NaN}',
        '{"model_type": "llama", "hidden_size": 1e999}',
        '{"model_type": "llama", "hidden_size": ' + "9" * 10_000 + "}",
        '{"model_type": "llama", "layers": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_hostile_files_are_user_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_model_config(path)
    assert is_told(str(caught.value))


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("minimax_m3_vl_text", "sparse_attention_config", {"sparse_index_dim": 64}),
        ("minimax_m3_vl_text", "layer_types", ["minimax_m3_sparse"] * 60),
    ],
)
def test_a_part_without_a_formula_is_refused_and_trace_is_named(
    model_type: str, field: str, value: object
) -> None:
    with pytest.raises(UserError, match=rf"(?s){field}=.*--trace counts"):
        from_hf_config({"model_type": model_type, field: value})


@pytest.mark.parametrize(
    ("model_type", "field"),
    [("inkling2_loop_text", "loop_num_passes"), ("dory", "n_recurrent_loops")],
)
def test_any_number_of_passes_counts_at_once(model_type: str, field: str) -> None:
    one, two, many = (
        model_flops_per_device(from_hf_config({"model_type": model_type, field: number})).forward
        for number in (1, 2, 2**39)
    )
    assert many == one + (2**39 - 1) * (two - one)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"loop_config": {"core_start": 5}}, "loop_layer_index_start=5: .* whole blocks of 6"),
        ({"loop_config": {"core_end": 30}}, "loop_layer_index_start=6: .* whole blocks of 6"),
        ({"loop_config": [6, 18]}, "loop_config=.6, 18.: expected an object"),
        ({"unpadded_vocab_size": 2**20}, "at most vocab_size=201024"),
    ],
)
def test_loops_that_inkling_does_not_have_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_hf_config({"model_type": "inkling2_loop_text", **config})


def test_inklings_first_files_have_a_text_config_without_a_type() -> None:
    with pytest.warns(UserWarning, match="counted as its text model, inkling_text"):
        config = from_hf_config({"model_type": "inkling_mm_model", "text_config": {}})
    assert config == from_hf_config({"model_type": "inkling_text"})


def test_a_nested_field_may_have_any_name() -> None:
    nested = {"attention_other_setting": {"self": 1, "num_attention_heads": 96}}
    plain = {"attention_other_setting": {"num_attention_heads": 96}}
    assert from_hf_config({"model_type": "step3p5", **nested}) == from_hf_config(
        {"model_type": "step3p5", **plain}
    )


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("step3p5", "moe_layers_enum", "3,four"),
        ("step3p5", "attention_other_setting", []),
        ("step3p5", "per_layer_config", {"1": {"num_attention_heads": 96}}),  # not a windowed layer
        ("dots3_note_text", "per_layer_config", {"2": {"v_head_dim": 64}}),  # nor all of them
        ("ernie4_5_vl_moe_text", "moe_intermediate_size", [1536]),
        ("diffusion_gemma", "tie_word_embeddings", False),
        ("zamba2", "tie_word_embeddings", False),
    ],
)
def test_what_contradicts_the_layers_of_a_type_is_an_error(
    model_type: str, field: str, value: object
) -> None:
    with pytest.raises(UserError, match=f"{field}=.*expected"):
        from_hf_config({"model_type": model_type, field: value})


def test_of_glm_5_2_57_layers_reuse_the_indexer_of_an_earlier_one() -> None:
    config = from_hf_config({"model_type": "glm_moe_dsa", "index_topk_freq": 4})
    assert config.num_decoder_layers == 78
    assert config.stack.layer_types.count("shared_index_attention") == 57


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "indexer_types"),
        (
            {"model_type": "glm_moe_dsa", "index_topk_pattern": "FX" * 39},
            "'X', expected full or sh",
        ),
        ({"model_type": "dory", "n_input_layers": 30}, "n_input_layers=30"),
        ({"model_type": "qwen4_exp_text"}, "indexer_n_heads=None"),
        ({"model_type": "qwen4_exp_text", "ple_layer_ids": [0]}, "ple_layer_ids=.0.: expected la"),
    ],
)
def test_layers_that_do_not_add_up_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_hf_config(changes)


def test_tables_of_n_grams_are_weights_but_no_flops() -> None:
    indexer = {"n_heads": 4, "head_dim": 64, "budget": 2048, "compress_ratio": 64}
    config = {f"indexer_{name}": value for name, value in indexer.items()}
    config |= {"model_type": "qwen4_exp_text", "max_target_length": 16}
    plain = count_parameters(config)
    with_tables = count_parameters({**config, "ple_layer_ids": [1]})
    # 16 heads, each a table of at least 20 million rows of 2,048 / 16 values
    assert with_tables.embedding - plain.embedding == pytest.approx(16 * 20e6 * 128, rel=1e-4)
    rows = flops_breakdown({**config, "ple_layer_ids": [1]})
    memory = sum(row.forward_flops for row in rows if row.component.startswith("ngram"))
    assert memory == 2 * 16 * (2048 * 4 * 2048 + 2048 * 2048 + 4 * 4 * 2048)


def test_the_text_model_of_kimi_k3_by_hand() -> None:
    """Two layers: delta attention with a dense MLP, then gated latent attention with experts."""
    attention = {"full_attn_layers": [2], "num_heads": 2, "head_dim": 4}
    text = {
        "model_type": "kimi_linear",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "linear_attn_config": {
            **attention,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 7,
        "routed_expert_hidden_size": 9,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 12,
    }
    with pytest.warns(UserWarning, match="kimi_k3 is counted as its text model, kimi_linear"):
        config = from_hf_config({"model_type": "kimi_k3", "text_config": text})
    config = config.replace(max_target_length=10)
    # q, k, v, output, its gate; beta; the decay's two matrices; convolution; the recurrence
    delta = 5 * 16 * 8 + 16 * 2 + (16 * 4 + 4 * 8) + 4 * 24 + 4 * 2 * 4 * 4
    latent = 16 * 6 + 6 * 3 * 6 + 16 * 7 + 5 * 3 * 8 + 2 * 3 * 4 * 16
    experts = 16 * 8 + 2 * 16 * 9 + 3 * 3 * 9 * 7 + 3 * 16 * 14
    scores = 3 * (6 + 4) * 10  # under every pair
    macs = delta + 3 * 16 * 20 + latent + experts + scores + 50 * 16
    assert model_flops_per_device(config, "dense").forward == 2 * 10 * macs
    routed = 3 * 9 * 7
    weights = delta - 4 * 2 * 4 * 4 + 3 * 16 * 20 + latent + experts + 5 * routed + 2 * 50 * 16
    vectors = (2 + 8) + 4 + (6 + 5) + 9  # decay; norms of the delta, the latents, and the experts
    norms = 5 * 16 + 2 * 16 * 5  # of layers and head; attention residuals
    assert count_parameters(config).total == weights + vectors + norms


def test_layers_listed_by_a_pattern_of_letters() -> None:
    kinds = from_hf_config({"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-"}).stack
    assert kinds.layer_types == ("mamba2", "none", "full_attention", "none")
    assert kinds.feed_forward_types == ("none", "moe", "none", "dense")


def test_experts_listed_by_a_number_for_each_layer() -> None:
    config = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 3}
    kinds = from_hf_config({**config, "moe_layer_freq": [0, 1, 1]}).stack.feed_forward_types
    assert kinds == ("dense", "moe", "moe")
