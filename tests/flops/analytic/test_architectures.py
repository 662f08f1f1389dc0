"""Every MaxText family against MaxText's own formulas and against its real models, traced.

`maxtext_sample.json` and `maxtext_traced.json` name their origin. Where MaxText's formula leaves
something out, the traced model decides.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from mfu_jax import calculate_tflops_per_device, flops_breakdown
from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import model_flops_per_device
from mfu_jax.util.yaml_files import model_names
from tests.support.maxtext import WRONG, WRONG_WEIGHTS
from tests.support.paths import DATA

GOLDEN = json.loads((DATA / "maxtext_sample.json").read_text())
ALL_MODELS = json.loads((DATA / "maxtext_all_models.json").read_text())
TRACED = json.loads((DATA / "maxtext_traced.json").read_text())

# Lookups that the traced model does as one-hot matmuls: token and position tables, rows.
ONE_HOT_ROWS = {"gpt3-6b": 16384, "gpt3-22b": 16384, "gpt3-175b": 16384, "gpt3-52k": 2048}
# The traced grouped matmul pads each call's T·k rows to tiles of this many.
EXPERT_TILE = 512


def row_id(row: dict) -> str:
    return f"{row['model']}-{row['max_target_length']}"


def weight_flops(config, *, experts: bool) -> int:
    return sum(
        row.forward_flops
        for row in flops_breakdown(config)
        if row.kind == "weight" and ("moe/experts" in row.component) == experts
    )


def one_hot_lookup_flops(config, rows: int, tokens: int) -> int:
    return 2 * tokens * (config.vocab_size + rows) * config.emb_dim


@pytest.mark.parametrize(
    "row", [row for row in GOLDEN["rows"] if row["model"] not in WRONG], ids=row_id
)
def test_bundled_files_equal_maxtext_where_it_is_right(row):
    step = ("per_device_batch_size", "max_target_length", "gradient_accumulation_steps")
    config = load_model_config(row["model"], {key: row[key] for key in step})
    tflops = calculate_tflops_per_device(config, "maxtext")
    assert tflops.total == pytest.approx(row["total_tflops"], rel=1e-12)
    assert tflops.learnable_weight == pytest.approx(row["learnable_weight_tflops"], rel=1e-12)
    assert tflops.attention == pytest.approx(row["attention_tflops"], rel=1e-12)


@pytest.mark.parametrize("model", ALL_MODELS["models"])
def test_every_model_equals_maxtext_or_is_known_to_differ(model):
    equal = []
    for length, theirs in zip(
        ALL_MODELS["max_target_lengths"], ALL_MODELS["models"][model], strict=True
    ):
        ours = calculate_tflops_per_device(load_model_config(model, {"max_target_length": length}))
        weight = ours.learnable_weight == pytest.approx(theirs[0], rel=1e-12)
        assert weight == (model not in WRONG_WEIGHTS)
        equal.append(weight and ours.attention == pytest.approx(theirs[1], rel=1e-12))
    assert all(equal) == (model not in WRONG)


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=row_id)
def test_resolved_configs_equal_the_bundled_files(row):
    step = ("per_device_batch_size", "max_target_length", "gradient_accumulation_steps")
    values = {**GOLDEN["configs"][row["model"]], **{key: row[key] for key in step}}
    defaults = {"indexer_n_heads": 64, "indexer_head_dim": 128}  # MaxText's base.yml
    ours = calculate_tflops_per_device(SimpleNamespace(**defaults, **values))
    named = load_model_config(row["model"], {key: row[key] for key in step})
    bundled = calculate_tflops_per_device(named)
    assert ours.learnable_weight == bundled.learnable_weight
    if row["model"] != "olmo3-7b":  # the sample's fields leave its window out
        assert ours == bundled


@pytest.mark.parametrize("model", ["mixtral-8x7b", "llama4-17b-16e", "qwen3-30b-a3b"])
def test_maxtext_writes_minus_one_for_what_it_does_not_use(model):
    # base.yml: no capacity, no latent expert width, no learned positions.
    absent = {"capacity_factor": -1.0, "moe_expert_input_dim": -1, "trainable_position_size": -1}
    config = load_model_config(model)
    assert load_model_config(config.flat() | absent) == config
    assert as_model_config(SimpleNamespace(**(config.flat() | absent))) == config


@pytest.mark.parametrize("row", GOLDEN["traced"], ids=lambda r: r["model"])
def test_weights_equal_the_traced_model(row):
    length = row["max_target_length"]
    config = load_model_config(row["model"], {"max_target_length": length})
    traced = round(row["traced_forward_weight_tflops"] * 1e12)
    experts = weight_flops(config, experts=True)
    if experts:
        rows = length * config.experts.num_experts_per_tok
        experts = experts * math.ceil(rows / EXPERT_TILE) * EXPERT_TILE // rows
    extra = 0
    if row["model"] in ONE_HOT_ROWS:
        extra = one_hot_lookup_flops(config, ONE_HOT_ROWS[row["model"]], length)
    if config.decoder_block == "qwen3_next":
        # Its convolution pads both ends and cuts off the K − 1 results past the sequence.
        kernel = config.linear_attention.gdn_conv_kernel_dim
        convolution = sum(
            row.forward_flops for row in flops_breakdown(config) if row.component.endswith("/conv")
        )
        extra = convolution * (kernel - 1) // length
    assert weight_flops(config, experts=False) + experts + extra == traced


@pytest.mark.parametrize("model", TRACED["models"])
def test_weights_outside_experts_equal_the_traced_model(model):
    length = TRACED["max_target_length"]
    config = load_model_config(model, {"max_target_length": length})
    ours = weight_flops(config, experts=False)
    if model in ONE_HOT_ROWS:
        ours += one_hot_lookup_flops(config, ONE_HOT_ROWS[model], length)
    assert ours == TRACED["models"][model]["weight_flops"]


@pytest.mark.parametrize("row", GOLDEN["traced"], ids=lambda r: r["model"])
def test_parameters_equal_the_real_model(row):
    assert count_parameters(load_model_config(row["model"])).total == row["num_params"]


@pytest.mark.parametrize("model", model_names())
def test_every_bundled_model_is_counted(model):
    config = load_model_config(model)
    assert calculate_tflops_per_device(config).total > 0
    assert count_parameters(config).active <= count_parameters(config).total


def test_dit_xl_2_has_its_published_parameters():
    # facebookresearch/DiT: DiT-XL/2, 675,129,632 with its fixed position table
    config = ModelConfig.from_mapping(
        {
            "decoder_block": "dit",
            "vocab_size": 1001,
            "num_decoder_layers": 28,
            "emb_dim": 1152,
            "num_query_heads": 16,
            "mlp_dim": 4608,
            "image_size_for_vit": 32,
            "patch_size_for_vit": 2,
            "num_channels_for_vit": 4,
            "max_target_length": 256,
        }
    )
    assert count_parameters(config).total == 675_129_632


GLM5 = {
    "decoder_block": "glm5",
    "vocab_size": 154880,
    "emb_dim": 6144,
    "num_decoder_layers": 78,
    "num_query_heads": 64,
    "num_kv_heads": 64,
    "mlp_dim": 12288,
    "moe_mlp_dim": 2048,
    "first_num_dense_layers": 3,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_experts": 1,
    "routed_bias": True,
    "attention_type": "mla",
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "use_indexer": True,
    "indexer_n_heads": 32,
    "indexer_head_dim": 128,
    "indexer_topk": 2048,
    "max_target_length": 4096,
}


def test_glm_5_2_in_maxtexts_names_counts_as_its_config_json() -> None:
    """57 of its 78 layers have no indexer: no weights of one, and no FLOPs."""
    pattern = "FFF" + 18 * "SSSF" + "SSS"
    maxtext = {**GLM5, "use_index_share": True, "index_share_pattern": pattern}
    theirs = {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3}
    theirs["max_target_length"] = 4096
    for convention in ("maxtext", "exact", "dense"):
        ours = model_flops_per_device(maxtext, convention)
        assert ours == model_flops_per_device(theirs, convention)
    saved = model_flops_per_device(GLM5).forward - model_flops_per_device(maxtext).forward
    indexer = 32 * 128 * 2048 + 6144 * 128 + 6144 * 32
    assert saved == 57 * 2 * (4096 * indexer + (32 * 128 + 32) * 4096**2)
    with pytest.raises(UserError, match="index_share_pattern='FS': expected F or S for each of 78"):
        model_flops_per_device({**maxtext, "index_share_pattern": "FS"})


def test_hy3_in_maxtexts_names_counts_as_its_config_json() -> None:
    maxtext = {
        "decoder_block": "hy3",
        "vocab_size": 120832,
        "emb_dim": 4096,
        "num_decoder_layers": 80,
        "num_query_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_dim": 13312,
        "moe_mlp_dim": 1536,
        "first_num_dense_layers": 1,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "shared_experts": 1,
        "use_qk_norm": True,
        "max_target_length": 4096,
    }
    theirs = {"model_type": "hy_v3", "max_target_length": 4096}
    assert model_flops_per_device(maxtext) == model_flops_per_device(theirs)
    assert count_parameters(maxtext) == count_parameters(theirs)
