"""Serving: prefill and decode against arithmetic by hand and against each other."""

from __future__ import annotations

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.serving import decode_cost, prefill_cost
from mfu_jax.flops.analytic.totals import model_flops_per_device

# Llama 3 8B: weights that a token multiplies = all but the embedding table and the 65 norms.
LLAMA3_8B_MATMUL_WEIGHTS = 8_030_261_248 - 128256 * 4096 - 65 * 4096


def test_decode_is_two_flops_a_weight_and_four_a_cached_head_value():
    cost = decode_cost(load_model_config("llama3-8b"), 1000, batch=3)
    attention = 32 * 4 * 32 * 128 * 1000  # layers, QK and PV, heads, head width, keys
    assert cost.flops == 3 * (2 * LLAMA3_8B_MATMUL_WEIGHTS + attention)
    assert cost.weight_bytes == 2 * (LLAMA3_8B_MATMUL_WEIGHTS + 65 * 4096)
    assert cost.cache_read_bytes == 3 * 32 * 2 * 8 * 128 * 1000 * 2
    assert cost.cache_write_bytes == 3 * 32 * 2 * 8 * 128 * 2


def test_prefill_is_the_forward_pass_of_training():
    config = load_model_config("mixtral-8x7b")
    cost = prefill_cost(config, 300, batch=2, all_logits=True)
    step = config.replace(max_target_length=300, per_device_batch_size=2)
    assert cost.flops == model_flops_per_device(step, "exact").forward
    last = prefill_cost(config, 300, batch=2)
    assert cost.flops - last.flops == 2 * 2 * 299 * 4096 * 32000


@pytest.mark.parametrize(
    "model", ["llama3-8b", "gemma3-4b", "gpt-oss-20b", "llama4-17b-16e", "qwen3-next-80b-a3b"]
)
def test_decoding_a_prompt_token_by_token_costs_its_prefill(model):
    config = load_model_config(model, {"sliding_window_size": 5} if "gemma" in model else {})
    decoded = sum(decode_cost(config, n).flops for n in range(1, 13))
    assert decoded == prefill_cost(config, 12, all_logits=True).flops


def test_a_window_bounds_the_cache_and_what_is_read():
    config = load_model_config("gpt-oss-20b")  # half of 24 layers see 128 tokens
    long = decode_cost(config, 10_000)
    per_key = 2 * 8 * 64 * 2
    assert long.cache_read_bytes == 12 * (10_000 + 128) * per_key
    assert prefill_cost(config, 10_000).cache_write_bytes == 12 * (10_000 + 128) * per_key


def test_latent_attention_keeps_the_latent():
    config = load_model_config("deepseek3-671b")
    assert decode_cost(config, 100).cache_read_bytes == 61 * (512 + 64) * 100 * 2
    grown = decode_cost(config, 101).flops - decode_cost(config, 100).flops
    assert grown == 61 * 2 * 128 * (512 + 64 + 512)


def test_a_recurrent_state_does_not_grow():
    config = load_model_config("qwen3-next-80b-a3b")
    read = [decode_cost(config, n).cache_read_bytes for n in (100, 200)]
    # 12 of 48 layers attend: 2 key-value heads of 256
    assert read[1] - read[0] == 12 * 100 * 2 * 2 * 256 * 2
    state = 36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert read[0] - 12 * 100 * 2 * 2 * 256 * 2 == state * 2


def test_experts_are_read_once_they_are_used():
    config = load_model_config("mixtral-8x7b")
    one, many = decode_cost(config, 10), decode_cost(config, 10, batch=1000)
    expert = 3 * 4096 * 14336 * 32 * 2
    assert many.weight_bytes - one.weight_bytes == pytest.approx(6 * expert, rel=1e-9)


def test_reused_keys_are_read_and_not_written():
    config = load_model_config("gemma4-e2b")
    cost = decode_cost(config, 50)
    widths = [512 if (i + 1) % 5 == 0 else 256 for i in range(35)]
    assert cost.cache_read_bytes == sum(2 * width * 50 * 2 for width in widths)
    assert cost.cache_write_bytes == sum(2 * width * 2 for width in widths[:15])


def test_wrong_lengths_are_named():
    with pytest.raises(UserError, match="context_length"):
        decode_cost(load_model_config("llama3-8b"), 0)
    with pytest.raises(UserError, match="batch"):
        prefill_cost(load_model_config("llama3-8b"), 8, batch=-1)
