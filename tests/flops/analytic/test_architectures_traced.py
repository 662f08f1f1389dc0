"""Every family, in tiny random sizes: the analytic count equals the traced count of a JAX model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.totals import flops_breakdown, model_flops_per_device
from tests.support import architecture_models as models
from tests.support import architecture_parts as parts

sizes = st.integers(1, 9)

COMMON = {
    "vocab_size": st.integers(2, 30),
    "num_decoder_layers": st.integers(1, 3),
    "emb_dim": sizes,
    "num_kv_heads": st.integers(1, 3),
    "head_dim": sizes,
    "mlp_dim": sizes,
    "per_device_batch_size": st.integers(1, 3),
    "max_target_length": st.integers(1, 12),
    "logits_via_embedding": st.booleans(),
}
EXPERTS = {
    "num_experts": st.integers(2, 5),
    "num_experts_per_tok": st.integers(1, 2),
    "moe_mlp_dim": sizes,
}
LATENT = {
    "attention_type": st.just("mla"),
    "q_lora_rank": st.integers(0, 5),
    "kv_lora_rank": sizes,
    "qk_nope_head_dim": sizes,
    "qk_rope_head_dim": sizes,
    "v_head_dim": sizes,
}
WINDOW = {"sliding_window_size": st.integers(1, 16)}
GLOBAL = {"global_head_dim": sizes, "global_num_kv_heads": st.just(1)}

# family → (decoder_block, JAX model, fields, fixed fields)
FAMILIES = {
    "llama": (
        "llama2",
        models.uniform,
        {"mlp_activations": st.sampled_from([("silu", "linear"), ("gelu",)])},
    ),
    "mixtral": ("mixtral", models.uniform, EXPERTS),
    "gpt2": ("gpt2", models.uniform, {"use_bias": st.booleans()}),
    "qwen3_moe": ("qwen3_moe", models.uniform, {**EXPERTS, "mtp_num_layers": st.integers(0, 2)}),
    "olmo3": ("olmo3", models.uniform, WINDOW),
    "gpt_oss": ("gpt_oss", models.uniform, {**EXPERTS, **WINDOW}),
    "gemma2": ("gemma2", models.gemma2, WINDOW),
    "gemma3": ("gemma3", models.uniform, {**WINDOW, "num_decoder_layers": st.integers(1, 7)}),
    "llama4": (
        "llama4",
        models.interleaved_experts,
        {
            **EXPERTS,
            "shared_experts": st.integers(0, 2),
            "interleave_moe_layer_step": st.integers(1, 2),
            "chunk_attn_window_size": st.integers(1, 16),
            "nope_layer_interval": st.integers(1, 3),
        },
    ),
    "envy": (
        "envy",
        models.interleaved_experts,
        {**EXPERTS, "interleave_moe_layer_step": st.integers(1, 2)},
    ),
    "deepseek": (
        "deepseek",
        models.deepseek,
        {**LATENT, **EXPERTS, "first_num_dense_layers": st.integers(0, 1)},
    ),
    "deepseek_sparse": (
        "deepseek",
        models.deepseek,
        {
            **LATENT,
            "q_lora_rank": sizes,
            "use_indexer": st.just(True),
            "indexer_n_heads": st.integers(1, 3),
            "indexer_head_dim": sizes,
            "indexer_topk": st.integers(1, 3),
            "max_target_length": st.integers(4, 12),
        },
    ),
    "deepseek_custom": (
        "deepseek",
        models.deepseek,
        {
            **LATENT,
            "mhc_expansion_rate": st.integers(2, 3),
            "engram_layers": st.just((0,)),
            "engram_num_heads": st.integers(1, 2),
            "engram_head_dim": sizes,
            "engram_max_ngram_size": st.just(3),
            "engram_kernel_size": st.integers(1, 4),
            "engram_vocab_bases": st.just((50, 50)),
        },
    ),
    "deepseek4": (
        "deepseek4",
        models.deepseek4,
        {
            **EXPERTS,
            "num_decoder_layers": st.just(3),
            "q_lora_rank": sizes,
            "o_groups": st.just(1),
            "o_lora_rank": sizes,
            "sliding_window_size": st.integers(1, 16),
            "compress_ratios": st.permutations((0, 4, 7)).map(tuple),
            "indexer_topk": st.integers(1, 3),
            "indexer_n_heads": st.integers(1, 3),
            "indexer_head_dim": sizes,
            "mhc_expansion_rate": st.integers(2, 3),
            "max_target_length": st.integers(7, 17),
        },
    ),
    "qwen3_custom_moe": (
        "qwen3_custom_moe",
        models.qwen3_custom_moe,
        {**EXPERTS, "attention_output_dim": st.just(6), "moe_expert_input_dim": st.just(6)},
    ),
    "qwen3_next": (
        "qwen3_next",
        models.qwen3_next,
        {
            **EXPERTS,
            "shared_experts": st.just(1),
            "inhomogeneous_layer_cycle_interval": st.integers(1, 3),
            "gdn_num_key_heads": st.integers(1, 2),
            "gdn_num_value_heads": st.sampled_from([2, 4]),
            "gdn_key_head_dim": sizes,
            "gdn_value_head_dim": sizes,
            "gdn_conv_kernel_dim": st.integers(1, 4),
        },
    ),
    "gemma4": (
        "gemma4",
        models.gemma4,
        {
            **WINDOW,
            **GLOBAL,
            "share_kv_projections": st.just(True),
            "num_decoder_layers": st.just(7),
        },
    ),
    "gemma4_experts": (
        "gemma4",
        models.gemma4,
        {**WINDOW, **GLOBAL, **EXPERTS, "shared_experts": st.just(1)},
    ),
    "gemma4_small": (
        "gemma4_small",
        models.gemma4_small,
        {
            **WINDOW,
            "num_decoder_layers": st.just(13),
            "num_kv_shared_layers": st.integers(0, 6),
            "global_head_dim": sizes,
            "hidden_size_per_layer_input": sizes,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_analytic_equals_traced_forward_and_backward(family, data):
    block, model, fields = FAMILIES[family]
    values = {name: data.draw(strategy, name) for name, strategy in {**COMMON, **fields}.items()}
    values["num_query_heads"] = values["num_kv_heads"] * data.draw(st.integers(1, 3), "groups")
    config = ModelConfig.from_mapping({"decoder_block": block, **values})
    assume(config.experts.num_experts_per_tok <= config.experts.num_experts)
    traced = models.trace_training(model, config)
    rows = flops_breakdown(config, "dense")
    assert sum(row.forward_flops for row in rows) == traced.forward
    assert model_flops_per_device(config, "dense").training == traced.total


@settings(max_examples=4, deadline=None, derandomize=True)
@given(side=st.integers(1, 4), heads=st.integers(1, 3), dim=sizes, hidden=sizes, layers=sizes)
def test_a_diffusion_transformer(side, heads, dim, hidden, layers):
    width = heads * dim
    config = ModelConfig.from_mapping(
        {
            "decoder_block": "dit",
            "vocab_size": 11,
            "num_decoder_layers": layers,
            "emb_dim": width,
            "num_query_heads": heads,
            "mlp_dim": hidden,
            "image_size_for_vit": 2 * side,
            "patch_size_for_vit": 2,
            "num_channels_for_vit": 4,
            "max_target_length": side * side,
            "per_device_batch_size": 2,
        }
    )

    def dit(s, w, labels):
        patches, times = jnp.ones((2, side * side, 16)), jnp.ones((2, 256))
        x = patches @ w("patches", 16, width)
        c = jax.nn.silu(times @ w("t0", 256, width)) @ w("t2", width, width)
        c = jax.nn.silu(c + w("classes", 11, width)[labels[:, 0]])
        for i in range(layers):
            shift, scale, gate, *rest = jnp.split(c @ w(f"{i}/mod", width, 6 * width), 6, -1)
            y = x * (1 + scale[:, None]) + shift[:, None]
            q, k, v = (
                (y @ w(f"{i}/{name}", width, width)).reshape(2, -1, heads, dim) for name in "qkv"
            )
            y = parts.softmax_attention(q, k, v).reshape(x.shape) @ w(f"{i}/o", width, width)
            x = x + gate[:, None] * y
            y = x * (1 + rest[1][:, None]) + rest[0][:, None]
            y = parts.dense_mlp(w, f"{i}/m", y, hidden=hidden, gated=False)
            x = x + rest[2][:, None] * y
        shift, scale = jnp.split(c @ w("mod", width, 2 * width), 2, -1)
        x = (x * (1 + scale[:, None]) + shift[:, None]) @ w("out", width, 32)
        return jnp.sum(x**2)

    traced = models.trace_training(dit, config)
    assert model_flops_per_device(config, "dense") == (traced.forward, traced.total)
