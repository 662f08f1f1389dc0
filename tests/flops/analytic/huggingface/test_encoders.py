"""Towers of Gemma 3n and 4 from a config.json, against counts of the real PyTorch models.

The data file names its source. Gemma 4 averages tokens by a one-hot matmul, which is excluded.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.huggingface import from_hf_config
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import flops_breakdown
from tests.support.paths import DATA

READ = json.loads((DATA / "hf_towers.json").read_text("utf-8"))
ROWS = READ["rows"]
STEP = {"per_device_batch_size": 2, "max_target_length": 24}


def forward(config: dict[str, Any], layers: str = "", **step: Any) -> int:
    rows = flops_breakdown(from_hf_config({**config, **STEP, **step}), "dense")
    return sum(row.forward_flops for row in rows if row.layer.startswith(layers))


@pytest.mark.parametrize("row", [r for r in ROWS if "num_params" in r])
def test_gemma4_without_images_runs_no_tower_and_holds_its_weights(row: dict[str, Any]) -> None:
    assert forward(row["config"]) == row["text_flops"]
    assert count_parameters(row["config"]).total == row["num_params"]


@pytest.mark.parametrize("row", [r for r in ROWS if "image" in r])
def test_gemma4_vision_equals_the_counted_model(row: dict[str, Any]) -> None:
    image = row["image"]
    step = {"images_per_sequence": 1, "image_size_for_vit": image["size"]}
    ours = forward(row["config"], "vision", **step)
    assert ours == image["flops"] - image["pooling_flops"]


@pytest.mark.parametrize("row", [r for r in ROWS if "audio" in r])
def test_audio_equals_the_counted_model(row: dict[str, Any]) -> None:
    config, audio = row["config"], row["audio"]
    ours = forward(config, "audio", audio_frames_per_sequence=audio["frames"])
    if config["model_type"] == "gemma3n":
        ours -= forward(config, "audio/projector", audio_frames_per_sequence=audio["frames"])
    assert ours == audio["flops"]


@pytest.mark.parametrize("row", [r for r in ROWS if "tokens" in r.get("audio", {})])
def test_gemma3n_projects_what_is_left_of_the_audio(row: dict[str, Any]) -> None:
    audio = row["audio"]
    more = forward(row["config"], "audio/projector", audio_frames_per_sequence=audio["frames"])
    more -= forward(row["config"], "audio/projector")
    width = row["config"]["audio_config"]["hidden_size"]
    assert more == 2 * 2 * audio["tokens"] * width * 2048


def test_gemma3n_images_cost_mobilenet_and_a_projection() -> None:
    config = {"model_type": "gemma3n"}
    more = forward(config, images_per_sequence=3) - forward(config)
    # 256 tokens an image, 2048 wide, into a text model of width 2048; two sequences of 3 images.
    assert more == 2 * 3 * (READ["mobilenet"]["flops"] + 2 * 256 * 2048 * 2048)
    rows = flops_breakdown(from_hf_config({**config, **STEP, "images_per_sequence": 1}))
    stem = next(row for row in rows if row.component == "stem")
    assert stem.forward_flops == 2 * READ["mobilenet"]["stem_flops"]


def test_frozen_towers_have_no_backward_and_trained_ones_do() -> None:
    config = {**ROWS[0]["config"], **STEP, "audio_frames_per_sequence": 37}
    config |= {"images_per_sequence": 1, "image_size_for_vit": [16, 24]}
    for kind in ("vision", "audio"):
        for frozen, share in ((True, 1), (False, 3)):
            name = f"freeze_{kind}_encoder_params"
            rows = flops_breakdown(from_hf_config({**config, name: frozen}))
            layers = [row for row in rows if row.layer == f"{kind}/layers"]
            # Relative positions are constants, which need no gradient.
            layers = [row for row in layers if row.component != "attention/relative_proj"]
            assert {row.training_flops // row.forward_flops for row in layers} == {share}


@pytest.mark.parametrize("frozen", [True, False])
def test_training_gemma4_with_an_image_equals_the_counted_model(frozen: bool) -> None:
    row = ROWS[0]
    step = {"images_per_sequence": 1, "image_size_for_vit": row["image"]["size"]}
    config = {**row["config"], **STEP, **step, "freeze_vision_encoder_params": frozen}
    ours = sum(part.training_flops for part in flops_breakdown(config, "dense"))
    theirs = row["image"]["training_flops"]["frozen" if frozen else "trained"]
    # The one-hot matmul has one gradient, if any.
    assert ours == theirs - (1 if frozen else 2) * row["image"]["pooling_flops"]


@pytest.mark.parametrize("frozen", [True, False])
def test_training_gemma4_with_audio_equals_the_counted_model(frozen: bool) -> None:
    row = ROWS[0]
    sizes = row["config"]["audio_config"]
    step = {"audio_frames_per_sequence": row["audio"]["frames"]}
    config = {**row["config"], **STEP, **step, "freeze_audio_encoder_params": frozen}
    rows = [part for part in flops_breakdown(config, "dense") if part.layer.startswith("audio")]
    theirs = row["audio"]["training_flops"]["frozen" if frozen else "trained"]
    if not frozen:
        # PyTorch's counter takes the weights' gradient of a depthwise convolution for a full one:
        # 37 frames are 10 tokens, in each of two sequences.
        width, kernel = sizes["hidden_size"], sizes["conv_kernel_size"]
        depthwise = 2 * 2 * 10 * kernel * width * sizes["num_hidden_layers"]
        theirs -= depthwise * width - depthwise
    assert sum(part.training_flops for part in rows) == theirs


def test_maxtext_gemma4_has_the_same_tower_with_equal_heads() -> None:
    ours = load_model_config("gemma4-31b", {"images_per_sequence": 1})
    theirs = from_hf_config(
        {
            "model_type": "gemma4",
            "text_config": {"hidden_size": 5376},
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": 72,
            },
            "images_per_sequence": 1,
            "image_size_for_vit": [672, 960],
        }
    )
    vision = [
        [row for row in flops_breakdown(config) if row.layer.startswith("vision")]
        for config in (ours, theirs)
    ]
    assert vision[0] == vision[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vision_config": None, "images_per_sequence": 1}, "images_per_sequence=1"),
        ({"audio_config": None, "audio_frames_per_sequence": 9}, "audio_frames_per_sequence=9"),
        ({"images_per_sequence": 1}, "image_size_for_vit"),
        ({"vision_config": {"num_key_value_heads": 5}}, "vision_config.num_key_value_heads=5"),
        ({"audio_config": {"subsampling_conv_channels": [6]}}, "subsampling_conv_channels"),
        ({"audio_config": {"subsampling_conv_channels": [6, 4]}}, "subsampling_conv_channels"),
        ({"audio_config": {"hidden_size": 9}}, "audio_config.hidden_size=9"),
    ],
)
def test_what_a_tower_lacks_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        flops_breakdown({**ROWS[0]["config"], **changes})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "decides"),
    [("gemma3", "outer"), ("gemma4", "outer"), ("gemma3n", "outer"), ("llama4", "inner")],
)
def test_which_config_says_that_the_head_is_tied(model_type: str, decides: str) -> None:
    # As transformers 5.23 builds the models: the other config's field changes nothing.
    text = {"num_hidden_layers": 5, "vocab_size": 128, "num_kv_shared_layers": 0}
    text |= {"hidden_size": 64} | ({} if model_type == "gemma3n" else {"head_dim": 8})
    untied = count_parameters({"model_type": model_type, "text_config": text})
    changed = {
        "outer": {"tie_word_embeddings": model_type == "llama4", "text_config": text},
        "inner": {"text_config": {**text, "tie_word_embeddings": model_type == "llama4"}},
    }
    for place, config in changed.items():
        difference = count_parameters({"model_type": model_type, **config}).total - untied.total
        expected = (-128 * 64 if model_type == "llama4" else 128 * 64) if place == decides else 0
        assert difference == expected
