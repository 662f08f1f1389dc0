"""The logits of transformers' models, recorded by `tests/support/record_hugging_face_logits.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mfu_jax.layers.decoder import Decoder
from mfu_jax.layers.vision.encoder import Images

from mfu_jax.trainer.config import pyconfig
from tests.support.floats import assert_differs_by_rounding
from tests.support.hugging_face_conversion import load_weights
from tests.support.hugging_face_weights import named_weight

RECORDED = Path(__file__).parents[1] / "data" / "hugging_face_logits.npz"
COMMON = {
    "vocab_size": 64,
    "emb_dim": 32,
    "mlp_dim": 48,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_decoder_layers": 2,
    "logits_via_embedding": False,
    "max_target_length": 24,
    "scan_layers": False,
}
TIED = {"logits_via_embedding": True, "query_pre_attn_scalar": 12.0, "sliding_window_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_mlp_dim": 48}
# family → its keys beside COMMON
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"decoder_block": "llama2"},
    "qwen3": {"decoder_block": "qwen3"},
    "gemma2": {
        "decoder_block": "gemma2",
        "num_decoder_layers": 1,  # pairs
        "mlp_activations": ["gelu", "linear"],
        **TIED,
    },
    "gemma3": {
        "decoder_block": "gemma3",
        "num_decoder_layers": 6,
        "mlp_activations": ["gelu", "linear"],
        "rope_max_timescale": 1_000_000,
        "local_rope_max_timescale": 10_000,
        **TIED,
    },
    "gemma4": {
        "decoder_block": "gemma4",
        "num_decoder_layers": 6,
        "mlp_activations": ["gelu", "linear"],
        "logits_via_embedding": True,
        "sliding_window_size": 8,
        "global_head_dim": 16,
        "global_num_kv_heads": 1,
        "share_kv_projections": True,
    },
    "olmo3": {"decoder_block": "olmo3", "num_decoder_layers": 4, "sliding_window_size": 8},
    "gpt2": {
        "decoder_block": "gpt2",
        "num_kv_heads": 4,
        "mlp_dim": 128,
        "mlp_activations": ["gelu"],
        "use_bias": True,
        "logits_via_embedding": True,
    },
    "mixtral": {"decoder_block": "mixtral", **EXPERTS},
    "gpt_oss": {
        "decoder_block": "gpt_oss",
        "mlp_activations": ["sigmoid", "linear"],
        "sliding_window_size": 8,
        **EXPERTS,
    },
    "llama4": {
        "decoder_block": "llama4",
        **EXPERTS,
        "num_decoder_layers": 4,
        "mlp_dim": 40,
        "num_experts_per_tok": 1,
        "shared_experts": 1,
        "interleave_moe_layer_step": 2,
        "chunk_attn_window_size": 8,
        "nope_layer_interval": 4,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "decoder_block": "deepseek",
        "attention_type": "mla",
        "num_decoder_layers": 3,
        "num_kv_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_mlp_dim": 20,
        "shared_experts": 1,
        "first_num_dense_layers": 1,
        "routed_bias": True,
        "routed_scaling_factor": 2.5,
        "n_routing_groups": 4,
        "topk_routing_group": 2,
    },
    "qwen3_next": {
        "decoder_block": "qwen3_next",
        "num_decoder_layers": 4,
        **EXPERTS,
        "moe_mlp_dim": 20,
        "shared_experts": 1,
        "inhomogeneous_layer_cycle_interval": 4,
        "gdn_num_key_heads": 2,
        "gdn_num_value_heads": 4,
        "gdn_key_head_dim": 8,
        "gdn_value_head_dim": 6,
        "gdn_chunk_size": 8,
    },
}

TOWER = {
    "images_per_sequence": 2,
    "patch_size_for_vit": 4,
    "hidden_size_for_vit": 32,
    "num_hidden_layers_for_vit": 2,
    "num_attention_heads_for_vit": 4,
}
SEEING: dict[str, dict[str, Any]] = {
    "gemma4": {
        "image_size_for_vit": [12, 48],
        "intermediate_size_for_vit": 48,
        "num_position_embeddings_for_vit": 16,
    },
    "gemma3": {"image_size_for_vit": 32, "intermediate_size_for_vit": 48},
    "llama4": {
        "tile_size_for_vit": 16,
        "intermediate_size_for_vit": 128,
        "pixel_shuffle_ratio_for_vit": 0.5,
        "projector_input_dim_for_vit": 40,
        "projector_output_dim_for_vit": 40,
    },
    "qwen3": {
        "image_size_for_vit": 16,
        "intermediate_size_for_vit": 48,
        "num_position_embeddings_for_vit": 9,
        "temporal_patch_size_for_vit": 2,
        "spatial_merge_size_for_vit": 2,
        "deepstack_visual_indexes_for_vit": [0, 1],
    },
}

FACTORS = {"rope_short_factor": [1.0, 1.1, 1.3, 2.0], "rope_long_factor": [1.0, 1.5, 4.0, 9.0]}
# How positions are stretched → the keys of a Llama of one layer
STRETCHED: dict[str, dict[str, Any]] = {
    "yarn": {
        "rope_type": "yarn",
        "rope_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_attention_scaling": True,
    },
    "dynamic": {
        "rope_type": "dynamic",
        "rope_factor": 2.0,
        "original_max_position_embeddings": 16,
    },
    **{
        f"longrope_{name}": {
            "rope_type": "longrope",
            "rope_factor": 4.0,
            "original_max_position_embeddings": pretrained,
            **FACTORS,
        }
        for name, pretrained in {"long": 16, "short": 32}.items()
    },
}


@pytest.mark.parametrize("stretch", STRETCHED)
def test_logits_at_stretched_positions_are_those_of_transformers(stretch: str) -> None:
    assert_logits(
        stretch, {**COMMON, **FAMILIES["llama"], "num_decoder_layers": 1, **STRETCHED[stretch]}
    )
    plain = recorded_of("longrope_short/logits" if stretch != "longrope_short" else "yarn/logits")
    assert np.abs(recorded_of(f"{stretch}/logits") - plain).max() > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("family", SEEING)
def test_logits_with_images_are_those_of_transformers(family: str) -> None:
    keys = {**COMMON, **FAMILIES[family], **TOWER, **SEEING[family]}
    found = {key: recorded_of(f"{family}_images/{key}") for key in ("pixels", "places")}
    assert_logits(f"{family}_images", keys, Images(*map(jnp.asarray, found.values())))


@pytest.mark.full(keep=["gemma2", "qwen3", "llama"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    assert_logits(family, {**COMMON, **FAMILIES[family]})


def recorded_of(name: str) -> np.ndarray:
    with np.load(RECORDED) as recorded:
        found: np.ndarray = recorded[name]
        return found


def assert_logits(name: str, keys: dict[str, Any], images: Images | None = None) -> None:
    """Our logits of a recorded model are those of transformers."""
    shapes = json.loads(str(recorded_of(f"{name}/shapes")))
    config = pyconfig.from_mapping({}, overrides=keys)
    model = nnx.eval_shape(
        lambda: Decoder(config, attention="dot_product", rngs=nnx.Rngs(params=0))
    )
    load_weights(
        model, name, {key: named_weight(key, tuple(shape)) for key, shape in shapes.items()}
    )
    tokens = jnp.asarray(recorded_of(f"{name}/tokens"))
    positions = jnp.arange(tokens.shape[1])[None]
    graph, weights = nnx.split(model)

    @jax.jit
    def logits(weights: Any) -> jax.Array:
        decoder = nnx.merge(graph, weights)
        outputs = decoder.outputs(tokens, positions, jnp.ones_like(tokens), images)
        return decoder.logits(outputs.hidden)

    assert_differs_by_rounding(logits, weights, recorded_of(f"{name}/logits"))
