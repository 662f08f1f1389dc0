"""Every family, in tiny random sizes: the analytic count equals that of the traced model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.totals import model_flops_per_device
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.config import pyconfig
from tests.support.jax_versions import has_nnx_list
from tests.support.tiny_models import analytic, gradient

# Key → the values that are drawn from.
Sizes = Mapping[str, Sequence[Any]]

sizes = range(1, 10)
even = range(2, 9, 2)  # rotary positions take pairs

COMMON: Sizes = {
    "vocab_size": range(2, 31),
    "num_decoder_layers": range(1, 4),
    "emb_dim": sizes,
    "num_kv_heads": range(1, 4),
    "head_dim": even,
    "mlp_dim": sizes,
    "per_device_batch_size": range(1, 4),
    "max_target_length": range(1, 13),
    "logits_via_embedding": (False, True),
}
EXPERTS: Sizes = {
    "num_experts": range(2, 6),
    "num_experts_per_tok": range(1, 3),
    "moe_mlp_dim": sizes,
}
LATENT: Sizes = {
    "attention_type": ("mla",),
    "q_lora_rank": range(0, 6),
    "kv_lora_rank": sizes,
    "qk_nope_head_dim": sizes,
    "qk_rope_head_dim": even,
    "v_head_dim": sizes,
}
WINDOW: Sizes = {"sliding_window_size": range(1, 17)}
GLOBAL: Sizes = {"global_head_dim": even, "global_num_kv_heads": (1,)}

# family → its decoder_block, and sizes beside COMMON
FAMILIES: dict[str, tuple[str, Sizes]] = {
    "llama": (
        "llama2",
        {"mlp_activations": [("silu", "linear"), ("gelu",)]},
    ),
    "default": ("default", WINDOW),
    "mixtral": ("mixtral", EXPERTS),
    "gpt2": ("gpt2", {"use_bias": (False, True)}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "mtp_num_layers": range(0, 3)}),
    "olmo3": ("olmo3", WINDOW),
    "gpt_oss": ("gpt_oss", {**EXPERTS, **WINDOW}),
    "gemma2": ("gemma2", WINDOW),
    "gemma3": ("gemma3", {**WINDOW, "num_decoder_layers": range(1, 8)}),
    "llama4": (
        "llama4",
        {
            **EXPERTS,
            "shared_experts": range(0, 3),
            "interleave_moe_layer_step": range(1, 3),
            "chunk_attn_window_size": range(1, 17),
            "nope_layer_interval": range(1, 4),
        },
    ),
    "envy": (
        "envy",
        {**EXPERTS, "interleave_moe_layer_step": range(1, 3)},
    ),
    "deepseek": (
        "deepseek",
        {**LATENT, **EXPERTS, "first_num_dense_layers": range(0, 2)},
    ),
    "deepseek_sparse": (
        "deepseek",
        {
            **LATENT,
            "q_lora_rank": sizes,
            "use_indexer": (True,),
            "indexer_n_heads": range(1, 4),
            "indexer_head_dim": even,
            "indexer_topk": range(1, 4),
            "max_target_length": range(4, 13),
        },
    ),
    "deepseek_custom": (
        "deepseek",
        {
            **LATENT,
            "mhc_expansion_rate": range(2, 4),
            "engram_layers": ((0,),),
            "engram_num_heads": range(1, 3),
            "engram_head_dim": sizes,
            "engram_max_ngram_size": (3,),
            "engram_kernel_size": range(1, 5),
            "engram_vocab_bases": ((50, 50),),
        },
    ),
    "deepseek4": (
        "deepseek4",
        {
            **EXPERTS,
            "num_decoder_layers": (3,),
            "q_lora_rank": sizes,
            "o_groups": (1,),
            "o_lora_rank": sizes,
            "qk_rope_head_dim": (2,),
            "sliding_window_size": range(1, 17),
            "compress_ratios": list(itertools.permutations((0, 4, 7))),
            "indexer_topk": range(1, 4),
            "indexer_n_heads": range(1, 4),
            "indexer_head_dim": even,
            "mhc_expansion_rate": range(2, 4),
            "max_target_length": (28,),  # whole windows of 4 and of 7,
        },
    ),
    "qwen3_custom_moe": (
        "qwen3_custom_moe",
        {**EXPERTS, "attention_output_dim": (6,), "moe_expert_input_dim": (6,)},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **EXPERTS,
            "shared_experts": (1,),
            "inhomogeneous_layer_cycle_interval": range(1, 4),
            "gdn_num_key_heads": range(1, 3),
            "gdn_num_value_heads": [2, 4],
            "gdn_key_head_dim": sizes,
            "gdn_value_head_dim": sizes,
            "gdn_conv_kernel_dim": range(1, 5),
            "gdn_chunk_size": range(2, 6),
        },
    ),
    "gemma4": (
        "gemma4",
        {
            **WINDOW,
            **GLOBAL,
            "share_kv_projections": (True,),
            "num_decoder_layers": (7,),
        },
    ),
    "gemma4_experts": (
        "gemma4",
        {**WINDOW, **GLOBAL, **EXPERTS, "shared_experts": (1,)},
    ),
    "gemma4_small": (
        "gemma4_small",
        {
            **WINDOW,
            "num_decoder_layers": (13,),
            "num_kv_shared_layers": range(0, 7),
            "sliding_window_pattern": range(2, 7),
            "global_head_dim": even,
            "hidden_size_per_layer_input": sizes,
        },
    ),
}

# Which keys they pick depends on data: of these, the trace shows only that they are causal.
PICKED = ("deepseek_sparse", "deepseek4")


@pytest.mark.full(keep=["gpt2", "envy", "olmo3", "llama", "llama4", "gemma3"])
@has_nnx_list
@pytest.mark.parametrize("family", FAMILIES)
def test_analytic_equals_traced_forward_and_backward(family: str) -> None:
    rng = random.Random(family)
    block, fields = FAMILIES[family]
    values = {name: rng.choice(choices) for name, choices in {**COMMON, **fields}.items()}
    values["num_query_heads"] = values["num_kv_heads"] * rng.randint(1, 3)
    if "gdn_chunk_size" in values:
        values["max_target_length"] = values["gdn_chunk_size"] * rng.randint(1, 3)
    keys = {"decoder_block": block, "attention": "dot_product", **values}
    config = pyconfig.from_mapping({}, overrides=keys)
    step, arguments = gradient(config)
    traced = count_model_flops(step, *arguments)
    assert traced.total == analytic(config), values
    assert traced.unaccounted == ()
    if family not in PICKED and values["max_target_length"] > 1:
        for convention in ("exact", "maxtext"):
            kept = model_flops_per_device(as_model_config(config), convention).training
            assert traced.total_in(convention) == kept, (convention, values)


widths = st.integers(1, 9)


@pytest.mark.full
@settings(max_examples=4, deadline=None, derandomize=True)
@given(side=st.integers(1, 4), heads=st.integers(1, 3), dim=widths, hidden=widths, layers=widths)
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
            y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w(f"{i}/o", width, width)
            x = x + gate[:, None] * y
            y = x * (1 + rest[1][:, None]) + rest[0][:, None]
            y = jax.nn.gelu(y @ w(f"{i}/wi", width, hidden)) @ w(f"{i}/wo", hidden, width)
            x = x + rest[2][:, None] * y
        shift, scale = jnp.split(c @ w("mod", width, 2 * width), 2, -1)
        x = (x * (1 + scale[:, None]) + shift[:, None]) @ w("out", width, 32)
        return jnp.sum(x**2)

    s = SimpleNamespace(**config.flat())
    labels = jax.ShapeDtypeStruct((2, side * side), "int32")
    weights: dict[str, Any] = {}

    def discover(labels):
        def weight(name, *size):
            weights[name] = jax.ShapeDtypeStruct(size, "float32")
            return jnp.zeros(size)

        return dit(s, weight, labels)

    jax.eval_shape(discover, labels)
    loss = jax.value_and_grad(lambda w, labels: dit(s, lambda name, *_: w[name], labels))
    traced = count_model_flops(loss, weights, labels)
    assert model_flops_per_device(config, "dense") == (traced.forward, traced.total)
