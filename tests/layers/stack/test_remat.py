"""What each policy computes again, in FLOPs that the dimensions below give."""

from __future__ import annotations

import typing
from typing import Any

import jax
import pytest
from flax import nnx
from mfu_jax.layers.stack.remat import POLICIES, TENSORS

from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.keys import REMAT_NAMES
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import row_shapes
from mfu_jax.trainer.step import losses, state
from mfu_jax.util.values import field_types

L, B, S, V, D, F, N, h = 2, 2, 16, 64, 8, 24, 4, 4
TOKENS = B * S
QKV = L * 2 * TOKENS * D * 3 * N * h
SCORES = VALUES = L * 2 * B * N * S * S * h
OUT = L * 2 * TOKENS * N * h * D
MLP_IN = L * 2 * (2 * TOKENS * D * F)

# A tensor that is kept is not made again; the MLP's last product is never read again. Softmax's
# gradient wants the scores, and the output projection's wants the context.
AGAIN = {
    "full": QKV + SCORES + VALUES + OUT + MLP_IN,
    "minimal": SCORES + VALUES,
    "minimal_with_context": SCORES,
    "minimal_flash": SCORES,
    "save_dot_with_context_except_mlp": SCORES + MLP_IN,
    "save_dot_except_mlpwi": SCORES + VALUES + MLP_IN,
    "save_dot_except_mlp": SCORES + VALUES + MLP_IN,
    "save_qkv_proj": SCORES + VALUES + OUT + MLP_IN,
    "save_out_proj": QKV + SCORES + VALUES + MLP_IN,
    "qkv_proj_offloaded": SCORES + VALUES + OUT + MLP_IN,
    "minimal_offloaded": SCORES + VALUES,
}
CUSTOM = {
    "context": "offload",
    "query_proj": "device",
    "key_proj": "offload",
    "value_proj": "device",
    "decoder_layer_input": "offload",
}


def again(**keys: Any) -> int:
    sizes = {
        "num_decoder_layers": L,
        "vocab_size": V,
        "emb_dim": D,
        "mlp_dim": F,
        "num_query_heads": N,
        "num_kv_heads": N,
        "head_dim": h,
        "max_target_length": S,
        "attention": "dot_product",
    }
    config = pyconfig.from_mapping({}, overrides={**sizes, **keys})
    graph, params = nnx.split(nnx.eval_shape(lambda: state.make_model(config, 0)))
    rows = row_shapes(config)
    batch = {key: jax.ShapeDtypeStruct((B, *row.shape), row.dtype) for key, row in rows.items()}
    gradient = jax.value_and_grad(losses.objective, has_aux=True)
    return count_model_flops(
        lambda p, b: gradient(p, nnx.State({}), (), graph, b, config), params, batch
    ).rematerialized


@pytest.mark.parametrize("policy", AGAIN)
def test_a_policy_computes_again_what_it_does_not_keep(policy: str) -> None:
    assert again(remat_policy=policy) == AGAIN[policy]


def test_each_tensor_has_a_key_of_its_own() -> None:
    assert again(remat_policy="custom", **CUSTOM) == SCORES + OUT + MLP_IN


def test_the_layers_and_the_config_know_the_same_policies_and_tensors() -> None:
    assert set(REMAT_NAMES) == set(TENSORS)
    assert set(typing.get_args(field_types(Config)["remat_policy"])) == set(POLICIES)


def test_saved_after_their_rotation_queries_and_keys_are_projected_again_only_for_a_norm() -> None:
    keys = {"remat_policy": "save_qkv_proj", "remat_after_rope": True}
    assert again(**keys) == AGAIN["save_qkv_proj"]
    # Values are saved as they are; a norm's gradient reads what it normalised.
    assert again(**keys, use_qk_norm=True) == AGAIN["save_qkv_proj"] + QKV * 2 // 3
    assert again(remat_policy="save_qkv_proj", use_qk_norm=True) == AGAIN["save_qkv_proj"]


def test_a_pattern_as_a_whole_computes_again_what_its_first_layer_hands_on() -> None:
    keys = {
        "decoder_block": "qwen3_next",
        "num_decoder_layers": 2 * L,
        "inhomogeneous_layer_cycle_interval": 2,
        "gdn_num_key_heads": N,
        "gdn_num_value_heads": N,
        "gdn_key_head_dim": h,
        "gdn_value_head_dim": h,
        "gdn_chunk_size": S,
        "remat_policy": "full",
    }
    mlp_out = L * 2 * TOKENS * F * D
    assert again(**keys, remat_patterns=True) - again(**keys) == mlp_out
