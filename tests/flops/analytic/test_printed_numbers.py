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
