"""Vision and audio towers against MaxText's formulas and its real models."""

from __future__ import annotations

import jax
import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import (
    calculate_prefill_tflops_per_device,
    calculate_tflops_per_device,
    calculate_tflops_training_per_device,
    flops_breakdown,
)

# MaxText e591f30's own functions, one image of one tile, in FLOPs: (weights, attention).
MAXTEXT_TOWERS = {
    ("gemma3-4b", True): (3_377_568_153_600, 2_087_354_105_856),
    ("gemma3-4b", False): (10_123_644_764_160, 6_262_062_317_568),
    ("llama4-17b-16e", True): (963_956_244_480, 63_751_908_352),
    ("llama4-17b-16e", False): (2_855_629_946_880, 191_255_725_056),
}


@pytest.mark.parametrize(("model", "frozen"), MAXTEXT_TOWERS)
def test_a_tower_equals_maxtext_but_for_gradients_that_nothing_needs(model, frozen):
    config = load_model_config(
        model, {"images_per_sequence": 1, "freeze_vision_encoder_params": frozen}
    )
    rows = [row for row in flops_breakdown(config, "maxtext") if row.layer.startswith("vision/")]
    weights = sum(row.training_flops for row in rows if row.kind == "weight")
    attention = sum(row.training_flops for row in rows if row.kind == "attention")
    # MaxText bills the gradient of the projector's frozen input, or else of the pixels. Gemma 3's
    # has a norm in front, whose weights need it.
    entry = "vision/projector" if frozen else "vision/patches"
    is_needed = frozen and model.startswith("gemma3")
    not_needed = sum(r.forward_flops for r in rows if r.layer == entry and not is_needed)
    assert (weights + not_needed, attention) == MAXTEXT_TOWERS[model, frozen]


@pytest.mark.parametrize(
    ("model", "parameters"),
    # traced from the models that maxtext 0.2.5 builds
    [("qwen3-vl-30b-a3b", 31_070_754_032), ("qwen3-omni-30b-a3b", 31_719_205_488)],
)
def test_parameters_of_towers_equal_the_real_models(model, parameters):
    assert count_parameters(load_model_config(model)).total == parameters


def test_gemma3_with_its_tower_has_the_published_number_of_parameters():
    # google/gemma-3-4b-pt: 4,300,079,472, with 64 more rows in its vocabulary.
    config = load_model_config("gemma3-4b", {"use_multimodal": True, "vocab_size": 262208})
    assert count_parameters(config).total == 4_300_079_472


def test_a_text_family_has_no_tower():
    with pytest.raises(UserError, match="use_multimodal"):
        flops_breakdown(load_model_config("llama3-8b", {"images_per_sequence": 1}))
    with pytest.raises(UserError, match="use_multimodal"):
        count_parameters(load_model_config("llama3-8b", {"use_multimodal": True}))


def test_a_text_step_needs_no_sizes_of_the_tower():
    sizes = {"vocab_size": 64, "num_decoder_layers": 1, "emb_dim": 8, "num_query_heads": 2}
    text = {**sizes, "head_dim": 4, "mlp_dim": 8, "decoder_block": "qwen3"}
    assert flops_breakdown({**text, "use_multimodal": True}) == flops_breakdown(text)
    with pytest.raises(UserError, match="spatial_merge_size_for_vit"):
        count_parameters({**text, "use_multimodal": True})


def test_text_only_rows_of_a_multimodal_model_are_the_text_model():
    config = load_model_config("qwen3-vl-2b")
    text = load_model_config("qwen3-vl-2b", {"use_multimodal": False})
    assert flops_breakdown(config) == flops_breakdown(text)


def test_maxtext_names_return_what_maxtext_returns(capsys):
    config = load_model_config("llama2-7b", {"per_device_batch_size": 4, "max_target_length": 8192})
    total, weight, attention = calculate_tflops_training_per_device(config)
    assert total == pytest.approx(1510.1105012736, rel=1e-12)  # MaxText's number
    assert (total, weight, attention) == calculate_tflops_per_device(config)
    assert "1510.11" in capsys.readouterr().out
    prefill = calculate_prefill_tflops_per_device(6_738_415_616, 1024, config, log=False)
    # MaxText: 2·N·T, and half of 4·H·L·h·T², over the devices
    devices = jax.device_count()
    assert prefill.learnable_weight == 2 * 6_738_415_616 * 1024 / 1e12 / devices
    assert prefill.attention == 2 * 32 * 32 * 128 * 1024**2 / 1e12 / devices
