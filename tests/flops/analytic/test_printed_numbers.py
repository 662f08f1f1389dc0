"""Numbers that others print, in GFLOP a token, and what is counted here in the same convention."""

from __future__ import annotations

import pytest

from mfu_jax.flops.analytic.huggingface import from_hf_config
from mfu_jax.flops.analytic.inputs.overrides import load_model_config
from mfu_jax.flops.analytic.totals import flops_breakdown, model_flops_per_device
from mfu_jax.util.yaml_files import model_names

_MTP = {"mtp_num_layers": 1}
_MTP_PADDED = {**_MTP, "make_vocab_size_divisible_by": 256}


# By tpu-recipes, MaxText's logs and a fork's (Hy3), and Megatron-Bridge's performance pages.
@pytest.mark.parametrize(
    ("model", "length", "step", "convention", "printed"),
    [
        ("llama3.1-8b", 2**20, {}, "maxtext", 869.71),
        ("deepseek3-671b", 4096, {}, "maxtext", 250.5),
        ("deepseek3-671b", 8192, {}, "maxtext", 281.15),
        ("deepseek3-671b", 4096, _MTP_PADDED, "megatron_bridge", 260.01),
        ("qwen3-235b-a22b", 4096, {}, "maxtext", 148.3),
        ("kimi-k2-1t", 4096, {}, "megatron_bridge", 204.59),
        ("qwen3-30b-a3b", 4096, {}, "megatron_bridge", 23.0),
        ("hy_v3", 8192, {}, "maxtext", 153.28),
        ("gpt-oss-120b", 4096, {}, "megatron_bridge", 32.6),
        ("deepseek4-284b", 4096, _MTP, "megatron_bridge", 90.95),
    ],
)
def test_printed(
    model: str, length: int, step: dict[str, int], convention: str, printed: float
) -> None:
    found = load_model_config(model) if model in model_names() else hy3(length)
    config = found.replace(max_target_length=length, **step)
    ours = model_flops_per_device(config, convention).training / length / 1e9
    # V4's list of compression ratios for its prediction module is not printed: 0.2%.
    relative = 2e-3 if "deepseek4" in model else 8e-4
    assert float(ours) == pytest.approx(printed, rel=relative, abs=0.05)


# TFLOP/s and tokens/s in lines that MaxText logged; per chip or device, whose ratio is the same.
# AI-Hypercomputer/tpu-recipes@c8cfe2f, training/: trillium, v5p, ironwood; the last one is of
# MaxText@e591f30, docs/guides/monitoring_and_debugging/understand_logs_and_metrics.md. The oldest
# ones count all pairs.
@pytest.mark.parametrize(
    ("model", "length", "convention", "tflops_per_sec", "tokens_per_sec"),
    [
        ("llama3.1-8b", 8192, "dense", 413.433, 7138.890),
        ("llama3.1-70b", 8192, "dense", 462.297, 960.248),
        ("llama3.1-405b", 8192, "dense", 392.454, 149.482),
        ("mixtral-8x7b", 4096, "dense", 302.311, 3645.203),
        ("gpt3-175b", 2048, "dense", 397.246, 369.059),
        ("llama4-17b-128e", 8192, "dense", 160.005, 1321.725),
        ("llama3.1-70b", 8192, "maxtext", 1207.05, 2686.98),
        ("llama3.1-70b", 131072, "maxtext", 897.94, 963.03),
        ("deepseek3-671b", 4096, "maxtext", 730.60, 2917.15),
        ("deepseek2-16b", 2048, "maxtext", 134.924, 8672.758),
    ],
)
def test_logged(
    model: str, length: int, convention: str, tflops_per_sec: float, tokens_per_sec: float
) -> None:
    config = load_model_config(model, {"max_target_length": length})
    ours = model_flops_per_device(config, convention).training / length / 1e12
    assert float(ours) == pytest.approx(tflops_per_sec / tokens_per_sec, rel=1e-5)


def test_gemma3_was_logged_with_half_of_each_windows_pairs() -> None:
    """349.442 TFLOP/s at 4,477.768 tokens/s: MaxText halved S·W, as it halves S².

    tpu-recipes@c8cfe2f, training/trillium/Gemma3-12B-MaxText, of tpu-recipes-v0.1.5.
    """
    length, window = 32768, 1024
    config = load_model_config("gemma3-12b", {"max_target_length": length})
    windows = {True: 0, False: 0}
    for row in flops_breakdown(config, "maxtext"):
        windows[row.layer == "local_layers" and row.has_pairs] += row.training_flops
    kept = length * window - window**2 // 2
    logged = windows[False] + windows[True] * length * window // (2 * kept)
    assert float(logged / length) == pytest.approx(349.442e12 / 4477.768, rel=1e-5)


def hy3(length: int):
    return from_hf_config({"model_type": "hy_v3", "max_target_length": length})


def test_hy3_at_4096_was_printed_with_the_weights_of_its_prediction_module_only() -> None:
    """138.86 at 4,096 tokens: neither the module's logits nor its scores are in it.

    The same fork's 153.28 at 8,192 is the model without the module.
    """
    plain = model_flops_per_device(hy3(4096), "maxtext").training
    module = sum(
        row.training_flops
        for row in flops_breakdown(hy3(4096).replace(**_MTP), "maxtext")
        if row.layer == "multi_token_prediction"
        if row.kind == "weight" and not row.component.endswith(("logits", "router"))
    )
    assert float(plain + module) / 4096 / 1e9 == pytest.approx(138.86, abs=0.005)
