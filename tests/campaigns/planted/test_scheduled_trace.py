"""Traces of XLA's schedule, and what the advice makes of them: programs whose times are arithmetic.

v5e: 1.5 GHz, 197e12 FLOP/s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.dumps.program import ProgramDump, Topology
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.targets import parse_target
from mfu_jax.profiling.profile import Profile, read_profile
from tests.campaigns.planted.scheduled_trace import write_scheduled

V5E = parse_target(topology="v5e:2x4")
MILLISECOND = 1_500_000  # cycles
TRIPS = 3
TIMES = 2  # as long as the matmul, that the update takes
M, K, N = 8192, 4096, 8192
MATMUL = 2 * M * K * N / (0.7 * 197e12)  # seconds


def _cycles(number: int) -> str:
    return f'"window_config":{{"estimated_cycles":"{number}"}}'


_LOOP = f"""HloModule jit_train_step, is_scheduled=true

%add (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %sum = f32[8] add(%p, %p)
}}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %inner = f32[8] fusion(%x), kind=kLoop, calls=%add, backend_config={{{_cycles(MILLISECOND)}}}
  ROOT %next = (s32[], f32[8]) tuple(%i, %inner)
}}

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[], f32[8]) parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (w: f32[8]) -> (s32[], f32[8]) {{
  %w = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %first = f32[8] fusion(%w), kind=kLoop, calls=%add, backend_config={{{_cycles(2 * MILLISECOND)}}}
  %begin = (s32[], f32[8]) tuple(%zero, %first)
  ROOT %loop = (s32[], f32[8]) while(%begin), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{TRIPS}"}}}}
}}
"""  # noqa: E501

_MATMULS = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: bf16[M,K], y: bf16[K,N], z: TYPE[M,K], w: TYPE[K,N]) -> (bf16[M,N], TYPE[M,N]) {
  %x = bf16[M,K]{1,0:T(8,128)} parameter(0)
  %y = bf16[K,N]{1,0:T(8,128)} parameter(1)
  %z = TYPE[M,K]{1,0:T(8,128)} parameter(2)
  %w = TYPE[K,N]{1,0:T(8,128)} parameter(3)
  %even = bf16[M,N]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf, CYCLES
  %wide = TYPE[M,N]{1,0:T(8,128)} convolution(%z, %w), dim_labels=bf_io->bf, PRECISION, MORE
  ROOT %both = (bf16[M,N], TYPE[M,N]) tuple(%even, %wide)
}
"""


def scheduled(folder: Path, text: str) -> tuple[Profile, float]:
    program = ProgramDump(text=text, topology=Topology(device_kind="TPU v5 lite", devices=1))
    seconds = write_scheduled(folder, program, V5E)
    return read_profile(folder), seconds


def test_every_op_takes_xlas_cycles_as_often_as_it_runs(tmp_path: Path) -> None:
    profile, seconds = scheduled(tmp_path, _LOOP)
    assert seconds == pytest.approx((2 + TRIPS) * 1e-3)
    assert profile.measured.step_seconds == pytest.approx(seconds)
    assert profile.coverage == 1
    ops = {op.op.name.name: (op.runs, op.seconds) for op in profile.measured.ops if op.seconds}
    assert ops == {
        "first": (1, pytest.approx(2e-3)),
        "inner": (TRIPS, pytest.approx(TRIPS * 1e-3)),
    }
    assert not profile.advice


def _matmuls(dtype: str, passes: int, precision: str) -> str:
    cycles = round(MATMUL * 1.5e9)
    words = {
        "TYPE": dtype,
        "MORE": f"backend_config={{{_cycles(passes * cycles)}}}",
        "CYCLES": f"backend_config={{{_cycles(cycles)}}}",
        "PRECISION": f"operand_precision={{{precision},{precision}}}",
        "[M,K]": f"[{M},{K}]",
        "[K,N]": f"[{K},{N}]",
        "[M,N]": f"[{M},{N}]",
    }
    text = _MATMULS
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def test_float32_in_six_passes_gains_five_of_them(tmp_path: Path) -> None:
    faulty, step = scheduled(tmp_path / "faulty", _matmuls("f32", 6, "highest"))
    healthy, without = scheduled(tmp_path / "healthy", _matmuls("bf16", 1, "default"))
    assert step - without == pytest.approx(5 * MATMUL)
    assert [advice.cause for advice in faulty.advice] == ["float32 matmuls"]
    assert faulty.advice[0].gain_seconds == pytest.approx(step - without, rel=0.2)
    assert not healthy.advice


_BETWEEN_MATMULS = """HloModule jit_train_step, is_scheduled=true

%exponential (p: bf16[M,N]) -> bf16[M,N] {
  %p = bf16[M,N] parameter(0)
  ROOT %e = bf16[M,N] exponential(%p)
}

%negative (q: bf16[M,N]) -> bf16[M,N] {
  %q = bf16[M,N] parameter(0)
  ROOT %n = bf16[M,N] negate(%q)
}

ENTRY %main (x: bf16[M,K], y: bf16[K,N], z: bf16[N,K]) -> bf16[M,K] {
  %x = bf16[M,K]{1,0:T(8,128)} parameter(0)
  %y = bf16[K,N]{1,0:T(8,128)} parameter(1)
  %z = bf16[N,K]{1,0:T(8,128)} parameter(2)
  %up = bf16[M,N]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf, MATMUL
  %one = bf16[M,N]{1,0:T(8,128)} fusion(%up), kind=kLoop, calls=%exponential, EACH
  %two = bf16[M,N]{1,0:T(8,128)} fusion(%one), kind=kLoop, calls=%negative, EACH
  ROOT %down = bf16[M,K]{1,0:T(8,128)} convolution(%two, %z), dim_labels=bf_io->bf, MATMUL
}
""".replace("MATMUL", f"backend_config={{{_cycles(round(MATMUL * 1.5e9))}}}")

_UPDATE = f"""HloModule jit_train_step, is_scheduled=true

%update (p: f32[4096,8192]) -> f32[4096,8192] {{
  %p = f32[4096,8192] parameter(0)
  ROOT %n = f32[4096,8192] negate(%p)
}}

ENTRY %main (w: f32[4096,8192], x: bf16[512,4096], y: bf16[4096,8192]) -> (f32[4096,8192], bf16[512,8192]) {{
  %w = f32[4096,8192] parameter(0)
  %x = bf16[512,4096]{{1,0:T(8,128)}} parameter(1)
  %y = bf16[4096,8192]{{1,0:T(8,128)}} parameter(2)
  %up = bf16[512,8192]{{1,0:T(8,128)}} convolution(%x, %y), dim_labels=bf_io->bf, backend_config={{{_cycles(MILLISECOND)}}}
  %moved = f32[4096,8192] fusion(%w), kind=kLoop, calls=%update, backend_config={{{_cycles(TIMES * MILLISECOND)}}}
  ROOT %both = (f32[4096,8192], bf16[512,8192]) tuple(%moved, %up)
}}
"""  # noqa: E501


def test_a_tpus_matmuls_take_a_chain_between_them_in(tmp_path: Path) -> None:
    text = _BETWEEN_MATMULS.replace("EACH", f"backend_config={{{_cycles(MILLISECOND)}}}")
    for word, size in {"M,N": (M, N), "M,K": (M, K), "K,N": (K, N), "N,K": (N, K)}.items():
        text = text.replace(f"[{word}]", f"[{size[0]},{size[1]}]")
    profile, _ = scheduled(tmp_path, text)
    assert [advice.cause for advice in profile.advice] == ["unfused elementwise chain"]
    assert profile.advice[0].gain_seconds == pytest.approx(2e-3)


def test_an_optimizer_that_takes_most_of_a_step_wants_a_larger_batch(tmp_path: Path) -> None:
    profile, _ = scheduled(tmp_path, _UPDATE)
    assert [advice.cause for advice in profile.advice] == ["small batch"]
    assert profile.advice[0].gain_seconds == pytest.approx(TIMES * 1e-3 * (1 - 1 / 8))


def test_scores_of_a_tpu_have_their_batch_folded_into_windows() -> None:
    """[4, 2048, 8, 128] queries and keys, as XLA writes them for a v6e."""
    text = """HloModule m
ENTRY %main (q: bf16[4,2048,8,128], k: bf16[4,2048,8,128]) -> bf16[4,8,2048,2048] {
  %q = bf16[4,2048,8,128] parameter(0)
  %k = bf16[4,2048,8,128] parameter(1)
  ROOT %s = bf16[4,8,2048,2048] convolution(%q, %k), window={size=4x8 stride=3x7 lhs_dilate=4x8}, \
dim_labels=0b1f_0o1i->01bf
}"""
    shape = instruction_costs(text).records["s"].shape
    assert shape.matmul == (4 * 8, 2048, 2048, 128)
