"""The peaks of a step, and the counts of a step that are measured against them, by hand."""

from __future__ import annotations

import dataclasses
import types
from fractions import Fraction
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.totals import flops_breakdown
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.hardware.step_peaks import find_peaks
from mfu_jax.instrumentation.assembly import setup_table
from mfu_jax.instrumentation.counts import StepFlops, analytic_model, given_model

# Dense TFLOP/s of an H100 SXM (NVIDIA's data sheet halves its sparse numbers), and GB/s.
BF16, FP8, TF32, BANDWIDTH = 989.4, 1978.9, 494.7, 3350
H100: Any = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
# One second of bf16, half a second of fp8, two seconds of float32, which runs as TF32.
MIXED = {
    "bf16": round(BF16 * 1e12),
    "f8e4m3fn": round(FP8 / 2 * 1e12),
    "f32": round(2 * TF32 * 1e12),
}


def step_of(by_dtype: dict[str, int], hbm_bytes: int = 0) -> StepFlops:
    total = sum(by_dtype.values())
    executed = ExecutedCount(forward=total, by_dtype=by_dtype, hbm_bytes=hbm_bytes)
    model = given_model(total)
    return StepFlops(
        model=model,
        executed=executed,
        xla_reported=None,
        ledger=compare_flops(model=model.per_device, executed=executed),
    )


def test_each_dtype_of_a_mixed_step_is_set_against_its_own_peak() -> None:
    step = step_of(MIXED, hbm_bytes=BANDWIDTH * 10**9 * 14 // 10)
    peaks = find_peaks(H100, {"bfloat16": 1})
    cost = step.cost(peaks, tokens_per_device=0)
    assert cost.executed_seconds == 3.5
    rates = cost.rates(7.0)
    assert rates["perf/hfu"] == 0.5
    assert rates["perf/mbu"] == pytest.approx(0.2)
    assert peaks.notes(MIXED) == ()


def test_a_step_in_one_dtype_that_is_not_the_models_has_the_peak_of_its_own() -> None:
    step = step_of({"f8e4m3fn": round(FP8 * 1e12)})
    peaks = find_peaks(H100, {"bf16": 1})
    assert step.cost(peaks, tokens_per_device=0).executed_seconds == 1.0


def test_a_dtype_that_the_compiler_widened_keeps_the_peak_of_the_models() -> None:
    step = step_of({"f32": 10**12})  # as XLA runs a bf16 matmul on a CPU
    model = dataclasses.replace(step.model, flops_by_dtype={"bfloat16": 10**12})
    step = dataclasses.replace(step, model=model)
    peaks = find_peaks(H100, {"bf16": 1})
    cost = step.cost(peaks, tokens_per_device=0)
    assert cost.executed_seconds == cost.model_seconds == 1 / BF16
    assert peaks.notes(step.timed_by_dtype) == ()


def test_a_dtype_without_a_peak_is_set_at_the_main_one_and_said() -> None:
    peaks = find_peaks(H100, {"bf16": 1})
    by_dtype = {"bf16": 3, "c64": 5}
    assert peaks.optimal_seconds(8, by_dtype) is None
    (note,) = peaks.notes(by_dtype)
    assert note.startswith("5 FLOPs in c64")


def test_a_note_on_peaks_starts_at_one_per_cent_of_the_flops() -> None:
    peaks = find_peaks(H100, {"bf16": 1})
    assert peaks.notes({"bf16": 99_995, "c64": 5}) == ()  # 0.005%
    assert peaks.notes({"bf16": 991, "c64": 9}) == ()
    assert len(peaks.notes({"bf16": 99, "c64": 1})) == 1


def test_the_users_peak_is_that_of_every_dtype() -> None:
    peaks = find_peaks(H100, {"bf16": 1}, peak_tflops_per_device=100.0)
    assert peaks.optimal_seconds(8, MIXED) is None
    assert (peaks.main.flops_per_sec, peaks.main.dtype) == (1e14, "bf16")
    assert peaks.notes(MIXED) == ()


def test_a_chip_that_is_in_no_table_is_an_error() -> None:
    unknown: Any = types.SimpleNamespace(device_kind="NVIDIA B400", compute_capability="13.0")
    with pytest.raises(UserError, match="B400"):
        find_peaks(unknown, {"bf16": 1})


# 2 layers, batch 3, sequence 8, 4 heads of 16: two matmuls over S² pairs, 2 FLOPs each, 3 passes.
CONFIG = {
    "vocab_size": 512,
    "num_decoder_layers": 2,
    "emb_dim": 64,
    "num_query_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "mlp_dim": 256,
    "mlp_activations": ["gelu"],
    "per_device_batch_size": 3,
    "max_target_length": 8,
    "dtype": "bfloat16",
}
DENSE_ATTENTION = 3 * 2 * (2 * 2 * 3 * 8 * 8 * 64)


def test_kernels_of_a_configs_attention_are_set_against_its_attention() -> None:
    model = analytic_model(CONFIG, convention="maxtext")
    assert model.attention == DENSE_ATTENTION // 2
    assert model.flops_by_dtype == {"bfloat16": 1}
    assert model.dense == sum(row.training_flops for row in flops_breakdown(CONFIG))
    # Kernels that compute three quarters of the pairs: a quarter of them beyond the convention's.
    kernels = DENSE_ATTENTION * 3 // 4
    weights = model.per_device - Fraction(model.attention)
    executed = ExecutedCount(forward=int(weights) + kernels, attention_kernels=kernels)
    ledger = compare_flops(
        model=model.per_device, dense=model.dense, attention=model.attention, executed=executed
    )
    assert [line.flops for line in ledger.lines[:2]] == [model.per_device, DENSE_ATTENTION // 4]
    assert ledger.residual == 0


def test_kernels_of_attention_are_not_set_against_the_state_of_linear_attention() -> None:
    delta_net = dict.fromkeys(("gdn_num_key_heads", "gdn_num_value_heads"), 2)
    delta_net |= dict.fromkeys(("gdn_key_head_dim", "gdn_value_head_dim"), 16)
    hybrid = {"decoder_block": "qwen3_next", "inhomogeneous_layer_cycle_interval": 2}
    model = analytic_model({**CONFIG, **hybrid, **delta_net, "gdn_conv_kernel_dim": 4})
    assert model.attention == DENSE_ATTENTION // 2 // 2  # one of two layers, half of its pairs


def test_a_cost_has_what_tiles_and_padding_add() -> None:
    """An H100 runs 9,663,676,416 FLOPs for a matmul of 4000 x 1111 x 777, of 6,905,976,000."""
    executed, counter = 2 * 4000 * 1111 * 777, 9_663_676_416
    count = ExecutedCount(
        forward=executed, by_dtype={"bf16": executed}, beyond={"tiles, stated": counter - executed}
    )
    step = dataclasses.replace(step_of({"bf16": executed}), executed=count)
    cost = step.cost(None, tokens_per_device=0)
    assert cost.hardware_flops_per_device == counter
    assert cost.tiles == pytest.approx(1.3993, abs=1e-4)


TPU7X: Any = types.SimpleNamespace(device_kind="TPU7x")


@pytest.mark.parametrize(
    ("flags", "state", "note"),
    [
        ("--xla_a=1 --xla_tpu_dvfs_p_state=7", "--xla_tpu_dvfs_p_state=7", ""),
        ("--xla_tpu_dvfs_p_state=3", "--xla_tpu_dvfs_p_state=3", "is --xla_tpu_dvfs_p_state=3;"),
        ("--xla_tpu_dvfs_p_state=7 --xla_tpu_dvfs_p_state=3", "--xla_tpu_dvfs_p_state=3", "is --"),
        ("--xla_tpu_dvfs_p_state_of_another=7", "default", "state is default; at the default"),
        ("", "default", "took 8 to 15% longer; set LIBTPU_INIT_ARGS=--xla_tpu_dvfs_p_state=7"),
    ],
)
def test_a_tpu7x_has_its_clock_state_in_the_set_up_and_is_told_what_it_leaves(
    flags: str, state: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    peaks = find_peaks(TPU7X, {"bf16": 1})
    table = setup_table(
        devices="8 × TPU7x",
        peaks=peaks,
        model=None,
        model_details="",
        tokens_per_device=0,
        flops_by_dtype={},
    )
    assert table["peak of one device"].endswith("bf16 at --xla_tpu_dvfs_p_state=7)")
    assert table["clock state"] == state
    assert note in table.get("note on the clock", "")
    assert bool(note) == ("note on the clock" in table)


def test_a_chip_with_one_clock_state_has_none_in_the_set_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_dvfs_p_state=7")
    assert find_peaks(H100, {"bf16": 1}).clock_state == ""
