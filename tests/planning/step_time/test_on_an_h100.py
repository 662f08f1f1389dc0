"""Plans beside what an H100 did: GPT-2 124M's step, its attention and its odd vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mfu_jax.dumps import load
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import InstructionRecord
from mfu_jax.planning.compilation.gpu_autotuning import autotuned
from mfu_jax.planning.result.planner import make_plan, planned_profile
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.targets import parse_target
from tests.support.recorded import text_of

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


def test_a_profile_has_every_instruction_that_takes_time() -> None:
    """One matmul of 50,257 took 10.6 ms in the trace; XLA reads microseconds."""
    program = load(DATA / "h100_gpt2.mfu")
    lines = planned_profile(program, TARGET, None).splitlines()
    form = re.compile(r'costs { name: "(.*)" cost_us: ([\d.]+) }')
    costs = {match[1]: float(match[2]) for line in lines if (match := form.fullmatch(line))}
    assert len(costs) == len(lines)
    assert costs["gemm_fusion_dot.21"] == pytest.approx(10_593, rel=0.2)
    assert all(f"%{name} = " in program.as_text() for name in costs)


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


@pytest.mark.parametrize(
    ("hardware", "batch", "tokens", "milliseconds"),
    [
        ("gb200", 2, 2048, 0.321 + 1.056),
        ("gb200", 2, 4096, 0.977 + 3.383),
        ("gb200", 2, 8192, 3.470 + 11.984),
        ("h200", 1, 2048, 0.330 + 1.271),
        ("h200", 1, 4096, 1.148 + 4.424),
        ("h200", 1, 8192, 4.278 + 16.162),
    ],
)
def test_attention_with_values_narrower_than_keys_takes_what_nvidia_published(
    hardware: str, batch: int, tokens: int, milliseconds: float
) -> None:
    """DeepSeek-V3's, forward and backward: 128 heads, keys of 192, values of 128, causal.

    NVIDIA/cudnn-frontend@3929da2e, benchmark/sdpa_benchmark_training/results.
    """
    text = text_of("h100_cudnn_narrow_values")
    sizes = {"[2,256,4,": f"[{batch},{tokens},128,", "[2,4,256": f"[{batch},128,{tokens}"}
    scores = '"2", "4", "256", "256"', f'"{batch}", "128", "{tokens}", "{tokens}"'
    for old, new in (*sizes.items(), scores):
        assert old in text
        text = text.replace(old, new)
    durations = Durations(
        target=parse_target(hardware=hardware, devices=1), efficiencies=Efficiencies()
    )
    records = dict(instruction_costs(text).records)
    kernels = [record for name, record in records.items() if "attention" in name]
    seconds = sum(duration.seconds for record in kernels for duration in durations.of(record))
    assert len(kernels) == 2
    assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.1)


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
