"""The same three steps on a TPU and on a GPU: every bar by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mfu_jax.dumps import ModelFlops
from mfu_jax.errors import UserError
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.report.text import render
from tests.support import accelerator_traces as traces
from tests.support.accelerator_traces import MATMUL_FLOPS, NORM_BYTES
from tests.support.written_profiles import dot, written_profile

US = 1e-6
V5E, H100 = 197e12, 989.4e12  # dense bf16 FLOP/s, by their makers' data sheets


def profile_of(folder: Path, kind: str, *planes: traces.Plane) -> Profile:
    traces.write_program(folder, kind)
    traces.write_trace(folder, traces.host(), *planes)
    return read_profile(folder)


@pytest.mark.parametrize(
    ("kind", "plane", "peak"),
    [("TPU v5 lite", traces.tpu, V5E), ("NVIDIA H100 80GB HBM3", traces.gpu, H100)],
)
def test_every_bar(
    kind: str, plane: Callable[[], traces.Plane], peak: float, tmp_path: Path
) -> None:
    profile = profile_of(tmp_path, kind, plane())
    assert profile.measured.step_seconds == pytest.approx(100 * US)
    assert profile.measured.steps == 2
    assert profile.coverage == 1
    shortest = MATMUL_FLOPS / peak
    expected = {
        "idle: in the step's call": 5 * US,  # before the second and the third step
        "idle: between calls": 17 * US,
        "exposed communication: all-gather over model": 10 * US,
        "memory-bound and vector work": 8 * US,
        "matmuls below peak": 60 * US - 2 * shortest,
        "rematerialised": shortest,
        "MFU": shortest,
    }
    assert {bar.name: bar.seconds for bar in profile.waterfall} == pytest.approx(expected)
    assert [bar.name for bar in profile.waterfall] == list(expected)
    between = profile.waterfall[1]
    assert between.scopes["$loader.py:3 sleep"] == pytest.approx(17 * US)
    assert profile.waterfall[3].scopes == pytest.approx({"norm": 8 * US})
    assert profile.mfu == pytest.approx(shortest / (100 * US))


def test_idle_time_is_unexplained_if_the_trace_has_no_call_of_the_step(tmp_path: Path) -> None:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.tpu())
    profile = read_profile(tmp_path)
    assert sum("mark each call" in note for note in profile.notes) == 1
    assert not {one.cause for one in profile.advice} & {"slow data", "host-bound loop"}


def test_rows_of_a_tpu(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, "TPU v5 lite", traces.tpu())
    rows = {row.name: row for row in profile.table("op")}
    matmul, norm = rows["fusion.1"], rows["fusion.3"]
    assert (matmul.flops, matmul.runs, matmul.bound_by) == (MATMUL_FLOPS, 1, "matmuls")
    assert matmul.mfu == matmul.hfu == pytest.approx(MATMUL_FLOPS / V5E / (30 * US))
    assert (rows["fusion.2"].mfu, rows["fusion.2"].hfu) == (0, matmul.hfu)
    assert (norm.flops, norm.hbm_bytes, norm.bound_by) == (0, NORM_BYTES, "memory")
    assert norm.bandwidth_share == pytest.approx(NORM_BYTES / 819e9 / (8 * US))
    start, done = rows["gather-start.1"], rows["gather-done.1"]
    assert (start.runs, done.runs) == (1, 1)  # what is under way beside them is no further run
    assert (start.seconds, done.seconds) == (0, pytest.approx(10 * US))
    assert done.bound_by == "communication"
    phases = {row.name: row.seconds for row in profile.table("phase")}
    assert phases["rematerialized"] == pytest.approx(30 * US)


def test_several_devices_and_hosts_are_averaged(tmp_path: Path) -> None:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu(), traces.tpu(1), name="host0")
    traces.write_trace(tmp_path, traces.host(), traces.tpu(late=1), name="host1")
    profile = read_profile(tmp_path)
    devices = [device.device for device in profile.measured.devices]
    assert devices == ["host0 TPU:0", "host0 TPU:1", "host1 TPU:0"]
    assert "100.000 µs, mean of 2 steps on each of 3 devices" in render(profile, by=())
    assert profile.measured.step_seconds == pytest.approx(100 * US)
    assert sum(bar.seconds for bar in profile.waterfall) == pytest.approx(100 * US)
    idle = sum(bar.seconds for bar in profile.waterfall if bar.name.startswith("idle"))
    assert idle == pytest.approx(22 * US)


def test_ops_without_an_instruction_are_a_bar_by_kind(tmp_path: Path) -> None:
    plane = traces.gpu()
    mystery = [("mystery_kernel_12", (80 + 100 * step) * 10**6, 10**7, {}) for step in range(3)]
    plane.line("Stream #8(Compute)", mystery)
    profile = profile_of(tmp_path, "NVIDIA H100 80GB HBM3", plane)
    bars = {bar.name: bar.seconds for bar in profile.waterfall}
    assert bars["ops without an instruction: mystery_kernel"] == pytest.approx(10 * US)
    assert profile.coverage == pytest.approx(78 / 88)
    assert any("has no instruction: mystery_kernel 10.000 µs" in note for note in profile.notes)
    assert sum(bars.values()) == pytest.approx(100 * US)


def test_a_library_kernel_is_joined_by_its_order(tmp_path: Path) -> None:
    """Between the fusion before it and the matmul after it, one instruction is not seen."""
    plane = traces.gpu(gemm=["sm90_xmma_gemm_bf16_tn"])
    profile = profile_of(tmp_path / "one", "NVIDIA H100 80GB HBM3", plane)
    rows = {row.name: row for row in profile.table("op")}
    assert profile.coverage == 1
    assert rows["fusion.1"].flops == MATMUL_FLOPS
    assert rows["fusion.1"].seconds == pytest.approx(30 * US)


def test_two_kernels_for_one_instruction_stay_unknown(tmp_path: Path) -> None:
    plane = traces.gpu(gemm=["sm90_xmma_gemm_bf16_tn", "splitKreduce_kernel"])
    profile = profile_of(tmp_path, "NVIDIA H100 80GB HBM3", plane)
    assert profile.coverage == pytest.approx(48 / 78)


def test_matmuls_of_vector_units_are_vector_work(tmp_path: Path) -> None:
    """Beyond their shortest time, which is the model's."""
    name = 'metadata={op_name="jit(step)/jvp(head)/dot_general"}'
    body = (
        f"%outer (a: bf16[512,512]) -> bf16[512,512] {{\n  %a = bf16[512,512] parameter(0)\n"
        f"  ROOT %m = bf16[512,512] multiply(%a, %a), {name}\n}}\n"
    )
    lines = [
        "  %x = bf16[512,512] constant({...})",
        "  %outer.1 = bf16[512,512] fusion(%x), kind=kLoop, calls=%outer",
    ]
    profile = written_profile(tmp_path, lines, {"outer.1": 1e-5}, computations=body)
    shortest = 2 * 512 * 512 / H100
    bars = {bar.name: bar.seconds for bar in profile.waterfall}
    assert bars == pytest.approx(
        {"memory-bound and vector work": 1e-5 - shortest, "MFU": shortest}, abs=1e-11
    )


def test_what_the_ledger_does_not_explain_is_named(tmp_path: Path) -> None:
    """Two equal matmuls, of which the model has one."""
    name, one = "forward mlp/dot_general", 2 * 512 * 512 * 512
    model = ModelFlops(per_device=one, convention="exact", is_whole=True, operations={name: one})
    lines = [dot("up", 512, 512, 512), dot("down", 512, 512, 512)]
    profile = written_profile(tmp_path, lines, {"up": 1e-5, "down": 1e-5}, model=model)
    assert profile.program.ledger.residual == one
    assert any(f"more FLOPs than the model has of: {name} ({one:,})" in n for n in profile.notes)


def test_damaged_traces_are_one_line_and_a_hint_or_a_profile(tmp_path: Path) -> None:
    traces.write_program(tmp_path, "TPU v5 lite")
    traces.write_trace(tmp_path, traces.host(), traces.tpu())
    (file,) = tmp_path.rglob("*.xplane.pb")
    whole, random = file.read_bytes(), Random(0)
    answers = []
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(random.choice((1, 1, 4))):
            content[random.randrange(len(content))] = random.randrange(256)
        file.write_bytes(content)
        answers.append(points_or_error(file))
    profiles = [answer for answer in answers if isinstance(answer, float)]
    assert profiles == pytest.approx([100.0] * len(profiles))
    assert len(profiles) > 3
    hints = [answer.split("\n")[1:] for answer in answers if isinstance(answer, str)]
    assert all(
        len(lines) <= 1 and all(line.startswith("hint: ") for line in lines) for lines in hints
    )


def points_or_error(file: Path) -> float | str:
    try:
        return sum(bar.mfu_points for bar in read_profile(file).waterfall)
    except UserError as error:
        return str(error)
