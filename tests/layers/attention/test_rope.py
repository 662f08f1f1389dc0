"""Stretched rotary positions against those of transformers (`record_hugging_face_rope.py`)."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from mfu_jax.layers.attention.rope import YarnRope, apply_rope
from mfu_jax.layers.families import blocks, model_spec

from mfu_jax.trainer.config import pyconfig
from tests.support.paths import DATA

RECORDED = json.loads((DATA / "hugging_face_rope.json").read_text(encoding="utf-8"))["models"]
LLAMA = {"rope_type": "llama3.1", "rope_max_timescale": 500_000}
DEEPSEEK = {"rope_type": "yarn"}
PAIRS = range(48)
# In the shape of microsoft/Phi-3-mini-128k-instruct's.
LONGROPE = {
    "rope_type": "longrope",
    "rope_short_factor": [1 + pair / 40 for pair in PAIRS],
    "rope_long_factor": [1 + pair**2 / 40 for pair in PAIRS],
    "rope_factor": 32.0,
    "original_max_position_embeddings": 4096,
    "max_target_length": 4096,
    "head_dim": 96,
}
# The trainer's keys for each recorded model.
KEYS = {
    "meta-llama/Llama-3.1-8B": LLAMA,
    "meta-llama/Llama-3.2-1B": LLAMA | {"rope_factor": 32.0},
    "google/gemma-3-4b-pt": {"rope_max_timescale": 1_000_000, "rope_linear_scaling_factor": 8.0},
    "deepseek-ai/DeepSeek-V3": DEEPSEEK,
    "deepseek-ai/DeepSeek-V2": DEEPSEEK | {"mscale": 0.707},
    "openai/gpt-oss-20b": {
        "rope_type": "yarn",
        "rope_max_timescale": 150_000,
        "rope_factor": 32.0,
        "rope_truncate": False,
        "rope_attention_scaling": True,
    },
    "dynamic NTK, longer than pretrained": {
        "rope_type": "dynamic",
        "rope_factor": 4.0,
        "original_max_position_embeddings": 2048,
        "max_target_length": 8192,
    },
    "LongRoPE, short": LONGROPE,
    "LongRoPE, long": LONGROPE | {"max_target_length": 131072},
}


@pytest.mark.parametrize("name", RECORDED)
def test_every_pair_turns_as_in_transformers(name: str) -> None:
    recorded = RECORDED[name]
    rope = blocks.rope(pyconfig.from_mapping({}, overrides=KEYS[name]))
    pairs = len(recorded["frequencies"])
    np.testing.assert_allclose(rope.frequencies(pairs), recorded["frequencies"], rtol=1e-6)
    assert rope.output_scale == pytest.approx(recorded["output_scale"])


@pytest.mark.parametrize("name", [name for name in RECORDED if "scores_scale" in RECORDED[name]])
def test_yarn_sharpens_the_scores_of_latent_attention(name: str) -> None:
    sizes = {"decoder_block": "deepseek", "attention_type": "mla", "num_decoder_layers": 1}
    config = pyconfig.from_mapping({}, overrides=sizes | KEYS[name])
    mixer = model_spec(config).layers[0].mixer
    assert mixer.nope_dim + mixer.rope_dim == RECORDED[name]["qk_head_dim"]
    assert mixer.pattern.scale == pytest.approx(RECORDED[name]["scores_scale"])


def test_a_stretched_position_turns_by_its_frequency() -> None:
    rope = YarnRope(timescale=100.0, factor=4.0, pretrained=64, scales_output=True)
    x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)  # one pair: it turns by one radian a token / 1
    turned = apply_rope(x, jnp.array([[3]]), rope)[0, 0, 0]
    scale = 0.1 * math.log(4) + 1
    angle = 3 * float(rope.frequencies(1)[0])
    assert turned.tolist() == pytest.approx([scale * math.cos(angle), scale * math.sin(angle)])


def test_only_global_layers_of_gemma3_are_stretched() -> None:
    keys = {"decoder_block": "gemma3", "num_decoder_layers": 6, "sliding_window_size": 8}
    stretch = {"rope_linear_scaling_factor": 8.0}
    config = pyconfig.from_mapping({}, overrides=keys | stretch)
    ropes = [layer.mixer.rope.factor for layer in model_spec(config).layers]
    assert ropes == [1.0] * 5 + [8.0]


def test_llama_can_be_told_not_to_stretch() -> None:
    config = pyconfig.from_mapping({}, overrides={**LLAMA, "rope_use_scale": False})
    assert blocks.rope(config).factor == 1
