"""Traces of XLA's schedule, and what the advice makes of them: programs whose times are arithmetic.

v5e: matmuls at 0.92 of 197e12 FLOP/s, other fusions at 0.81 of 819e9 bytes/s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.dumps.program import ProgramDump, Topology
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.planning.targets import parse_target
from mfu_jax.profiling.profile import Profile, read_profile
from tests.campaigns.planted.scheduled_trace import write_scheduled
from tests.support.told_work import START, with_work

V5E = parse_target(topology="v5e:2x4")
TRIPS = 3
M, K, N = 8192, 4096, 8192
MATMUL = 2 * M * K * N / (0.92 * 197e12)  # seconds
FUSION_BYTES_PER_SEC = 0.81 * 819e9


_LOOP = f"""HloModule jit_train_step, is_scheduled=true

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %inner = f32[8] fusion(%x), kind=kLoop, calls=%work_1000
  ROOT %next = (s32[], f32[8]) tuple(%i, %inner)
}}

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[], f32[8]) parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (w: f32[8]) -> (s32[], f32[8]) {{
  %w = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %first = f32[8] fusion(%w), kind=kLoop, calls=%work_2000
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
  %even = bf16[M,N]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf
  %wide = TYPE[M,N]{1,0:T(8,128)} convolution(%z, %w), dim_labels=bf_io->bf, PRECISION
  ROOT %both = (bf16[M,N], TYPE[M,N]) tuple(%even, %wide)
}
"""


def scheduled(folder: Path, text: str) -> tuple[Profile, float]:
    program = ProgramDump(text=text, topology=Topology(device_kind="TPU v5 lite", devices=1))
    seconds = write_scheduled(folder, program, V5E)
    return read_profile(folder), seconds


def test_every_op_takes_its_time_as_often_as_it_runs(tmp_path: Path) -> None:
    profile, seconds = scheduled(tmp_path, with_work(_LOOP))
    assert seconds == pytest.approx((2 + TRIPS) * 1e-3)
    assert profile.measured.step_seconds == pytest.approx(seconds)
    assert profile.coverage == 1
    ops = {op.op.name.name: (op.runs, op.seconds) for op in profile.measured.ops if op.seconds}
    assert ops == {
        "first": (1, pytest.approx(2e-3)),
        "inner": (TRIPS, pytest.approx(TRIPS * 1e-3)),
    }
    assert not profile.advice


def _matmuls(dtype: str, precision: str) -> str:
    words = {
        "TYPE": dtype,
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
    faulty, step = scheduled(tmp_path / "faulty", _matmuls("f32", "highest"))
    healthy, without = scheduled(tmp_path / "healthy", _matmuls("bf16", "default"))
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
  %up = bf16[M,N]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf
  %one = bf16[M,N]{1,0:T(8,128)} fusion(%up), kind=kLoop, calls=%exponential
  %two = bf16[M,N]{1,0:T(8,128)} fusion(%one), kind=kLoop, calls=%negative
  ROOT %down = bf16[M,K]{1,0:T(8,128)} convolution(%two, %z), dim_labels=bf_io->bf
}
"""

_UPDATE = """HloModule jit_train_step, is_scheduled=true

%update (p: f32[4096,8192]) -> f32[4096,8192] {
  %p = f32[4096,8192] parameter(0)
  ROOT %n = f32[4096,8192] negate(%p)
}

ENTRY %main (w: f32[4096,8192], x: bf16[512,4096], y: bf16[4096,8192]) -> (f32[4096,8192], bf16[512,8192]) {
  %w = f32[4096,8192] parameter(0)
  %x = bf16[512,4096]{1,0:T(8,128)} parameter(1)
  %y = bf16[4096,8192]{1,0:T(8,128)} parameter(2)
  %up = bf16[512,8192]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf
  %moved = f32[4096,8192] fusion(%w), kind=kLoop, calls=%update
  ROOT %both = (f32[4096,8192], bf16[512,8192]) tuple(%moved, %up)
}
"""  # noqa: E501


def test_a_tpus_matmuls_take_a_chain_between_them_in(tmp_path: Path) -> None:
    text = _BETWEEN_MATMULS
    for word, size in {"M,N": (M, N), "M,K": (M, K), "K,N": (K, N), "N,K": (N, K)}.items():
        text = text.replace(f"[{word}]", f"[{size[0]},{size[1]}]")
    profile, _ = scheduled(tmp_path, text)
    assert [advice.cause for advice in profile.advice] == ["unfused elementwise chain"]
    each = START + 2 * 2 * M * N / FUSION_BYTES_PER_SEC  # bf16 in and out
    assert profile.advice[0].gain_seconds == pytest.approx(2 * each)


def test_an_optimizer_that_takes_most_of_a_step_wants_a_larger_batch(tmp_path: Path) -> None:
    profile, _ = scheduled(tmp_path, _UPDATE)
    assert [advice.cause for advice in profile.advice] == ["small batch"]
    update = START + 2 * 4 * 4096 * 8192 / FUSION_BYTES_PER_SEC  # float32 in and out
    assert profile.advice[0].gain_seconds == pytest.approx(update * (1 - 1 / 8))


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
