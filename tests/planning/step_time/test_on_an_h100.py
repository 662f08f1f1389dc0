"""Plans beside what an H100 did: GPT-2 124M's step, its attention and its odd vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.dumps import load
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.planning.compilation.gpu_autotuning import autotuned
from mfu_jax.planning.result.planner import make_plan
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.targets import parse_target

DATA = Path(__file__).parents[2] / "data"
MEASURED_SECONDS = 0.1055  # median of 38 steps, untraced
MEASURED_BYTES = 11_571_349_248  # the allocator's peak
TARGET = parse_target(hardware="h100", devices=1)


@pytest.fixture(scope="module")
def records() -> dict[str, InstructionRecord]:
    return dict(instruction_costs(load(DATA / "h100_gpt2.mfu")).records)


def test_the_plan_of_the_program_that_ran() -> None:
    plan = make_plan(load(DATA / "h100_gpt2.mfu"), TARGET)
    assert plan.step_time_seconds == pytest.approx(MEASURED_SECONDS, rel=0.1)
    assert plan.step_time_bound_seconds < MEASURED_SECONDS
    low, high = plan.step_time_range
    assert low < MEASURED_SECONDS < high
    assert plan.memory_peak_bytes == pytest.approx(MEASURED_BYTES, rel=0.05)


def test_what_would_help_most() -> None:
    """An even vocabulary brings 14.7 ms by the trace's advice. Without a mask, a layer's attention,
    forward twice and backward once, takes 0.175 + 0.864 ms instead of 0.349 + 1.282."""
    saved = {
        change.change: change.saves_seconds
        for change in make_plan(load(DATA / "h100_gpt2.mfu"), TARGET).changes
    }
    odd, mask = (
        next(seconds for words, seconds in saved.items() if name in words)
        for name in ("multiple of 8 (50257 → ", "without a mask")
    )
    assert odd == pytest.approx(0.0147, rel=0.2)
    assert mask == pytest.approx(12 * (0.349 + 1.282 - 0.175 - 0.864) / 1e3, rel=0.3)


@pytest.mark.parametrize(
    ("name", "milliseconds"),  # of one kernel, in the trace
    [
        ("dot_product_attention_fwd.5", 0.2962),  # masked, 1,024 tokens, heads of 64
        ("dot_product_attention_bwd.8", 0.8085),
        ("gemm_fusion_dot.21", 10.593),  # sums over 50,257 tokens
        ("gemm_fusion_dot.22", 8.467),
        ("custom-call.1", 0.1827),  # 768 × 3,072: in cuBLAS
    ],
)
def test_kernels_take_what_they_took(
    records: dict[str, InstructionRecord], name: str, milliseconds: float
) -> None:
    (duration,) = Durations(target=TARGET, efficiencies=Efficiencies()).of(records[name])
    assert duration.seconds * 1e3 == pytest.approx(milliseconds, rel=0.35)


def test_several_gpus_share_power_and_multiprocessors(
    records: dict[str, InstructionRecord],
) -> None:
    shares = Efficiencies(matmul=0.8, shared_matmul=0.4)
    alone, shared = (
        next(iter(Durations(target=target, efficiencies=shares).of(records["custom-call.1"])))
        for target in (TARGET, parse_target(hardware="h100", devices=8))
    )
    assert shared.seconds == pytest.approx(2 * alone.seconds, rel=0.02)


TRITON, SLICES = "xla_gpu_enable_triton_gemm", "xla_gpu_enable_dynamic_slice_fusion"
DOT = (
    "%0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0], precision = "
    "[DEFAULT, DEFAULT] : (tensor<8192x768xbf16>, tensor<768x{}xbf16>) -> tensor<8192x{}xbf16>"
)


@pytest.mark.parametrize(
    ("platform", "vocabulary", "flags", "options"),
    [
        ("cuda", 50304, "", {TRITON: False, SLICES: False}),
        ("cuda", 50257, "", {SLICES: False}),  # XLA then finds Triton's kernels faster
        ("cuda", 50304, f"--{TRITON}=true", {SLICES: False}),
        ("tpu", 50304, "", {}),
    ],
)
def test_matmuls_are_cublas_unless_a_dimension_is_odd(
    platform: str,
    vocabulary: int,
    flags: str,
    options: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    text = DOT.format(vocabulary, vocabulary)
    assert autotuned({"platform": platform}, text) == options
