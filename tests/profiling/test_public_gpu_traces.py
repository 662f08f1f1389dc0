"""Two traces of AMD's GPUs against the tables that xprof 2.24.2 makes of them.

They are AMD-AGI/TraceLens' (MIT): an MLP and fused attention of TransformerEngine on an MI355X
(tests/test_data_jax_te_fused_attn_categorization), and a convolution on eight MI300X
(tests/traces/mi300/jax_conv_minimal_08).
"""

from __future__ import annotations

import lzma
from collections import defaultdict
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.profiling.profile import Profile, read_profile
from mfu_jax.profiling.timeline.platforms import read_devices
from mfu_jax.profiling.trace.xspace import Trace

DATA = Path(__file__).parents[1] / "data"

# Kernels, and microseconds of one: "occurrences" and "avg_time" of xprof's HLO stats.
ATTENTION = {
    "te_fused_attn_backward_ffi.18": (25, 93.2248),
    "te_fused_attn_backward_ffi.12": (25, 92.6056),
    "te_fused_attn_forward_ffi.10": (10, 106.9529),
    "te_fused_attn_forward_ffi.15": (10, 102.629),
    "gemm_fusion_dot": (5, 171.4656),
    "gemm_fusion_dot.7": (5, 118.689),
    "custom-call.1": (5, 116.921),
    "loop_reduce_fusion": (5, 44.5522),
    "wrapped_convert": (5, 3.8322),
}
CONVOLUTION = {
    "input_transpose_fusion": (40, 358.6035),
    "cudnn-conv.1": (79, 158.6280506329114),
    "loop_transpose_fusion": (40, 4.838),
}


def unpacked(name: str, folder: Path) -> Path:
    path = folder / "host.xplane.pb"
    path.write_bytes(lzma.decompress((DATA / f"tracelens_{name}.xplane.pb.xz").read_bytes()))
    return path


@pytest.mark.parametrize(
    ("name", "xprof"), [("mi355x_attention", ATTENTION), ("mi300x_convolution", CONVOLUTION)]
)
def test_kernels_are_those_of_xprofs_tables(
    name: str, xprof: dict[str, tuple[int, float]], tmp_path: Path
) -> None:
    seconds: dict[str, float] = defaultdict(float)
    kernels: dict[str, int] = defaultdict(int)
    for timeline, _ in read_devices([Trace(unpacked(name, tmp_path))]):
        for op, start, end in zip(timeline.ops, timeline.starts, timeline.ends, strict=True):
            of = timeline.names[op]
            if not of.is_kernel:
                seconds[of.name] += (end - start) / 1e12
                kernels[of.name] += 1
    for op, (occurrences, microseconds) in xprof.items():
        assert kernels[op] == occurrences
        assert seconds[op] == pytest.approx(occurrences * microseconds / 1e6, rel=1e-6)


@pytest.fixture
def attention(tmp_path: Path) -> Profile:
    return read_profile(unpacked("mi355x_attention", tmp_path), hardware="mi355x")


def test_a_call_of_several_kernels_is_one_run_with_its_flops_once(attention: Profile) -> None:
    batch, heads, length, width = 2, 16, 2048, 128
    product = 2 * batch * heads * (length * (length + 1) // 2) * width  # causal
    rows = {row.name: row for row in attention.table("op")}
    for op, products in (
        ("te_fused_attn_forward_ffi.10", 2),
        ("te_fused_attn_backward_ffi.18", 5),
    ):
        assert (rows[op].runs, rows[op].flops) == (1, products * product)
    # The backward kernels compute the scores again.
    executed = attention.program.costs.executed
    assert executed.rematerialized == 2 * product
    assert not executed.unaccounted
    matmul = 2 * batch * length * 2048 * 6144
    assert rows["gemm_fusion_dot"].flops == rows["custom-call.1"].flops == matmul
    assert executed.total == 14 * product + 6 * matmul
    assert attention.coverage == 1


def test_the_waterfall_sums_to_the_step(attention: Profile) -> None:
    bars = sum(bar.seconds for bar in attention.waterfall)
    assert bars == pytest.approx(attention.measured.step_seconds)


def test_kernels_and_copies_have_amds_names(tmp_path: Path) -> None:
    profile = read_profile(unpacked("mi300x_convolution", tmp_path), hardware="mi300x")
    assert len(profile.measured.devices) == 8
    rows = {row.name: row for row in profile.table("op")}
    # A graph's kernel has the name of its instruction, which other devices launched alone.
    assert "input_transpose_fusion_1" not in rows
    assert rows["input_transpose_fusion.1"].runs == pytest.approx(1, abs=0.1)
    assert rows["cudnn-conv.1"].runs == 1  # two kernels
    copies = [op for op in profile.measured.ops if op.op.kind == "memory copy"]
    assert {op.op.name.name for op in copies} == {"__amd_rocclr_copyBuffer"}


def test_a_gpu_without_a_name_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)expected hardware=NAME.*usually an AMD GPU"):
        read_profile(unpacked("mi300x_convolution", tmp_path))
