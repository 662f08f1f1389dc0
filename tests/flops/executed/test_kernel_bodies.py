"""Kernels read from their bodies: without a grid, with any name, on tensor cores."""

from __future__ import annotations

import functools
import lzma
import re

import pytest

from mfu_jax.flops.executed.counting import ExecutedCount, executed_flops
from mfu_jax.flops.executed.kernels.bodies.attributes import mlir_integer, mlir_string
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.paths import RECORDED


@functools.lru_cache(maxsize=8)
def recorded_text(name: str) -> str:
    """The HLO text of a recorded program."""
    return lzma.decompress((RECORDED / f"{name}.hlo.xz").read_bytes()).decode()


@functools.cache
def count(name: str) -> ExecutedCount:
    return executed_flops(recorded_text(name))


@reads_recorded_kernels
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_kernels_without_a_grid_run_once_whatever_their_names_are(chip: str) -> None:
    executed = count(f"{chip}_misnamed")
    one = 2 * programs.SIZE**3
    assert executed.kernels == {"TopK": one, "Pin": 3 * one, "threefry2x32_mlp": 2 * one}
    assert executed.total == 6 * one
    assert executed.unaccounted == ()


CALL = """HloModule step
ENTRY main {{
  x = f32[8,16] parameter(0)
  ROOT {name} = f32[8,32] custom-call(x), custom_call_target="{target}"
}}"""


@pytest.mark.parametrize("name", ["TopK", "Pin", "Sharding", "threefry2x32_mlp", "CreateBuffer"])
def test_a_name_makes_no_kernel_free(name: str) -> None:
    (item,) = executed_flops(CALL.format(name=f"{name}.1", target="their_kernel")).unaccounted
    assert item.name == "their_kernel"


@pytest.mark.parametrize("target", ["TopK", "Pin", "Sharding", "cu_threefry2x32_ffi"])
def test_xlas_own_targets_that_multiply_nothing_are_free(target: str) -> None:
    executed = executed_flops(CALL.format(name="custom-call.1", target=target))
    assert (executed.total, executed.unaccounted) == (0, ())


@reads_recorded_kernels
def test_wgmma_in_a_warp_specialised_pipeline_of_clusters() -> None:
    executed = count("h100_wgmma")
    assert executed.total == 2 * programs.M * programs.N * programs.K
    assert executed.by_dtype == {"bf16": executed.total}
    assert executed.unaccounted == ()


@reads_recorded_kernels
def test_wgmma_in_causal_attention() -> None:
    # 64 queries by 64 keys: 1 + 2 + 3 + 4 of 16 blocks, for scores and for values.
    blocks = programs.BATCH * programs.HEADS * 10
    executed = count("h100_wgmma_attention")
    assert executed.total == 2 * blocks * (2 * 64 * 64 * programs.HEAD_DIM)
    assert executed.unaccounted == ()


@reads_recorded_kernels
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("h100_wgmma", ("module = ", "modules = ")),
        ("h100_wgmma", (r"ML\EFR", r"ML\EFS")),
        ("h100_triton", ("grid_x = ", "grid_w = ")),
        ("h100_triton", (r"ML\EFR", r"ML\EFS")),
        ("h100_wgmma", (r"wgmma.mma_async.sync.aligned", r"wgmma.mma_async.sp.sync.aligned")),
    ],
)
def test_a_body_that_cannot_be_read_is_listed(name: str, changed: tuple[str, str]) -> None:
    old, new = changed
    text = recorded_text(name)
    assert old in text
    executed = executed_flops(text.replace(old, new))
    assert executed.total == 0
    assert all("kernel_flops=" in item.reason for item in executed.unaccounted)
    assert len(executed.unaccounted) == len(re.findall(r"= \S.* custom-call\(", text))


def test_attributes_in_mlirs_notation() -> None:
    tail = r'backend_config={grid_x = 8 : i32, ir = "ML\EFR\5C\22\\n", name = "ir"}'
    assert mlir_string(tail, "ir") == b'ML\xefR\\"\\n'
    assert mlir_string(tail, "name") == b"ir"
    assert mlir_integer(tail, "grid_x") == 8
    assert (mlir_string(tail, "module"), mlir_integer(tail, "grid_y")) == (None, None)


@reads_recorded_kernels
def test_cudnns_fp8_attention() -> None:
    batch, length, heads, width = programs.FP8_SHAPE
    matmul = 2 * batch * heads * (length * (length + 1) // 2) * width
    executed = count("h100_cudnn_fp8")
    assert executed.forward == 2 * matmul
    assert executed.backward == 4 * matmul
    assert executed.rematerialized == matmul  # the scores again
    assert set(executed.by_dtype) == {"f8e4m3fn"}
    assert executed.unaccounted == ()
