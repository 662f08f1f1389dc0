"""The analytic count against MaxText's own numbers, a traced count, and arithmetic by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from types import SimpleNamespace

import pytest

from mfu_jax import calculate_tflops_per_device, calculate_tokens_per_device, flops_breakdown
from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.totals import model_flops_per_device
from tests.support.paths import DATA

GOLDEN = json.loads((DATA / "maxtext_sample.json").read_text())
# Rows where MaxText's own count is complete for these families; no tolerance but float rounding.
DENSE_MODELS = ("llama2-7b", "mistral-7b", "gpt3-6b", "gemma-2b")
SMALL = {
    "vocab_size": 512,
    "num_decoder_layers": 4,
    "emb_dim": 64,
    "num_query_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "mlp_dim": 256,
    "mlp_activations": ("gelu",),
    "per_device_batch_size": 2,
    "max_target_length": 128,
}


def golden_config(row: dict) -> SimpleNamespace:
    return SimpleNamespace(**{**GOLDEN["configs"][row["model"]], **row})


@pytest.mark.parametrize("row", [r for r in GOLDEN["rows"] if r["model"] in DENSE_MODELS], ids=str)
def test_maxtext_convention_equals_maxtext(row):
    tflops = calculate_tflops_per_device(golden_config(row))
    assert tflops.total == pytest.approx(row["total_tflops"], rel=1e-12)
    assert tflops.learnable_weight == pytest.approx(row["learnable_weight_tflops"], rel=1e-12)
    assert tflops.attention == pytest.approx(row["attention_tflops"], rel=1e-12)


def test_small_transformer_equals_the_traced_and_executed_count():
    # Counted from the jaxpr and from the compiled program of the same model: 452,984,832.
    assert model_flops_per_device(SMALL, "dense").training == 452_984_832


def test_exact_counts_pairs_one_by_one():
    rows = flops_breakdown(SMALL, "exact")
    scores = sum(row.forward_flops for row in rows if row.kind == "attention")
    pairs = sum(1 for q in range(128) for k in range(128) if k <= q)
    assert scores == 2 * 4 * pairs * 2 * 2 * 4 * 16  # batch, layers, pairs, FMA, QK and PV, heads


def test_breakdown_sums_to_the_total():
    rows = flops_breakdown(SMALL, "maxtext")
    total = sum(row.training_flops for row in rows)
    assert calculate_tflops_per_device(SMALL, "maxtext").total == total / 1e12


def test_a_bundled_name_or_a_file_is_a_config_too(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 3, "n_positions": 64, "vocab_size": 100}
    config = {"model_type": "gpt2", **sizes}
    path.write_text(json.dumps(config))
    for source in (path, str(path)):
        assert calculate_tflops_per_device(source) == calculate_tflops_per_device(config)
    theirs = next(r for r in GOLDEN["rows"] if r["model"] == "llama2-7b")
    assert (theirs["per_device_batch_size"], theirs["max_target_length"]) == (1, 2048)
    ours = calculate_tflops_per_device("llama2-7b").total
    assert ours == pytest.approx(theirs["total_tflops"], rel=1e-12)


def test_megatron_counts_the_padded_vocabulary():
    step = {"per_device_batch_size": 1, "max_target_length": 16}
    plain = {**SMALL, "vocab_size": 250, **step}
    padded = {**plain, "make_vocab_size_divisible_by": 128}
    for name, changes in (("megatron", True), ("megatron_2021", True), ("maxtext", False)):
        more = model_flops_per_device(padded, name).training
        more -= model_flops_per_device(plain, name).training
        assert more == changes * 6 * 16 * SMALL["emb_dim"] * (256 - 250)


@pytest.mark.parametrize("error", [KeyError, ValueError, AttributeError])
def test_a_config_object_may_say_in_its_own_way_that_it_lacks_a_field(error):
    class Config:
        def __getattr__(self, name):
            if name in SMALL:
                return SMALL[name]
            raise error(name)

    assert calculate_tflops_per_device(Config()) == calculate_tflops_per_device(SMALL)


def test_megatron_counts_no_router():
    moe = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_mlp_dim": 32}
    fewer = model_flops_per_device(moe, "maxtext").forward
    fewer -= model_flops_per_device(moe, "megatron").forward
    assert fewer == 2 * 2 * 128 * 4 * (64 * 4)  # FMA, batch, length, layers, D × E


def test_logits_can_be_made_at_some_positions_only():
    # 452,984,832 with the head at all 128 positions, which is 2 · 256 · 64 · 512 of it forward
    one = model_flops_per_device({**SMALL, "logits_positions": 1}).training
    head = 3 * 2 * 256 * 64 * 512
    assert one == 452_984_832 - head + head // 128


def test_a_fractional_batch_stays_exact():
    half = {**SMALL, "per_device_batch_size": 0.5}
    assert model_flops_per_device(half).training * 4 == model_flops_per_device(SMALL).training
    assert calculate_tokens_per_device({**half, "max_target_length": 127}) == Fraction(127, 2)


def test_gradient_accumulation_multiplies_tokens_and_flops():
    four = {**SMALL, "gradient_accumulation_steps": 4}
    assert calculate_tokens_per_device(four) == 4 * 2 * 128
    assert model_flops_per_device(four).training == 4 * 452_984_832


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emb_dim": 0}, "emb_dim"),
        ({"num_query_heads": -4}, "num_query_heads"),
        ({"head_dim": "sixteen"}, "head_dim"),
        ({"head_dim": 16.5}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"per_device_batch_size": float("nan")}, "per_device_batch_size"),
        ({"sliding_windw_size": 64}, "sliding_window_size"),
        ({"decoder_block": "lama2"}, "llama2"),
    ],
)
def test_wrong_fields_are_named(change, message):
    with pytest.raises(UserError, match=message):
        flops_breakdown({**SMALL, **change})


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match="vocab_size"):
        flops_breakdown({k: v for k, v in SMALL.items() if k != "vocab_size"})


def test_an_unknown_convention_is_refused():
    with pytest.raises(UserError, match="'exact'"):
        flops_breakdown(SMALL, "exakt")
