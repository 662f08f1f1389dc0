"""Counters beside counts: Nsight Compute's output, the join with a program, and the table.

The samples have the format of ``ncu --csv``; their numbers are those that an H100 showed
(tests/data/h100_counters.yaml), split over kernels by hand.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from scripts import results
from scripts import verify_on_gpu as verify
from tests.support.program_silicon import PROGRAMS
from tests.support.recorded import text_of

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
TF32 = "sm__ops_path_tensor_src_tf32_dst_fp32.sum"


def ncu(*launches: tuple[str, dict[str, int]]) -> str:
    """What ``ncu --csv`` prints, its messages included."""
    lines = ["==PROF== Connected to process 77 (/usr/bin/python3.11)", "warm", HEAD]
    for number, (kernel, found) in enumerate(launches):
        values = {BF16: 0, TF32: 0, verify.FFMA: 0, **found}
        for metric, value in values.items():
            lines.append(
                f'"{number}","77","python3.11","127.0.0.1","{kernel}","1","13","(384, 1, 1)",'
                f'"(132, 1, 1)","0","9.0","Command line profiler metrics","{metric}","",'
                f'"{value:,}"'
            )
    return "\n".join([*lines, "==PROF== Disconnected from process 77", ""])


def rows_of(name: str, *launches: tuple[str, dict[str, int]]) -> list[verify.KernelRow]:
    records = instruction_costs(text_of(f"h100_silicon_{name}")).records.values()
    return verify.compare(verify.read_counters(ncu(*launches)), records)


def test_metrics_are_summed_by_launch() -> None:
    found = verify.read_counters(ncu(("a", {BF16: 5_000, TF32: 7}), ("b", {verify.FFMA: 21})))
    assert found == [verify.Launch("a", 5_007, 0), verify.Launch("b", 0, 42)]
    assert [launch.flops for launch in found] == [5_007, 42]


def test_a_metric_that_a_gpu_lacks_is_nothing() -> None:
    text = ncu(("a", {BF16: 5})).replace('"0"\n', '"n/a"\n')
    assert verify.read_counters(text) == [verify.Launch("a", 5, 0)]


def test_output_without_a_table_says_what_ncu_said() -> None:
    with pytest.raises(SystemExit, match="ERR_NVGPUCTRPERM"):
        verify.read_counters("==ERROR== ERR_NVGPUCTRPERM - no permission to read counters")


def test_a_triton_fusion_is_found_by_its_name() -> None:
    (row,) = rows_of("odd", ("gemm_fusion_dot_general_1", {BF16: 9_663_676_416}))
    assert (row.counter, row.executed, row.difference) == (9_663_676_416, 6_905_976_000, 0)
    assert row.reason == "tiles, stated"


def test_a_loop_launches_its_kernel_as_often_as_it_runs() -> None:
    launch = ("gemm_fusion_dot_2", {BF16: 2 * 8 * 4096**2})
    (row,) = rows_of("decode", *[launch] * 8, ("loop_reduce_fusion", {verify.FFMA: 3}))
    assert (row.launches, row.counter, row.difference) == (8, 2_147_483_648, 0)


def test_attention_kernels_pair_with_their_calls_in_order() -> None:
    rows = rows_of(
        "attention",
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", {BF16: 73_014_444_032}),
        ("cudnn_generated_dot_do_o", {verify.FFMA: 12}),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", {BF16: 182_536_110_080}),
    )
    assert [row.reason for row in rows] == ["tiles, assumed"] * 2
    assert [row.difference for row in rows] == [0, 0]
    assert "bprop" in rows[1].kernel
    assert "(dot_product_attention_bwd" in rows[1].kernel


def test_kernels_that_do_not_pair_are_one_row() -> None:
    """The six strided and plain kernels, and a gradient in two launches."""
    launches = [("sm90_xmma_fprop_implicit_gemm", {BF16: 14_797_504_512})] * 2
    launches += [("sm90_xmma_wgrad_implicit_gemm", {BF16: 165_524_013_056 - 2 * 14_797_504_512})]
    (row,) = rows_of("convolutions", *launches)
    assert row.kernel == "convolution: 3 kernels of 8 calls"
    assert (row.counter, row.difference) == (165_524_013_056, 0)
    assert row.reason == "tiles, assumed; window positions on padding"


def library_program(flags: str = "") -> list[verify.InstructionRecord]:
    """One cuBLAS matmul of 4096 × 8192 × 2048."""
    numbers = (
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}'
    )
    text = f"""HloModule m

ENTRY %main (a: bf16[4096,2048], b: bf16[2048,8192]) -> bf16[4096,8192] {{
  %a = bf16[4096,2048]{{1,0}} parameter(0)
  %b = bf16[2048,8192]{{1,0}} parameter(1)
  %c = (bf16[4096,8192]{{1,0}}, s8[1024]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{{numbers}{flags}}}}}
  ROOT %out = bf16[4096,8192]{{1,0}} get-tuple-element(%c), index=0
}}
"""  # noqa: E501
    return list(instruction_costs(text).records.values())


def test_cublas_states_its_tile_in_the_kernels_name() -> None:
    """8,192 columns in 57 tiles of 144: what the counters of the MLP's fifth matmul show."""
    launches = [verify.Launch("nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TNT", 137_707_388_928, 0)]
    (row,) = verify.compare(launches, library_program())
    assert row.executed == 2 * 4096 * 8192 * 2048
    assert row.beyond == 2 * 4096 * (8208 - 8192) * 2048
    assert row.difference == 0
    assert row.reason == "tile of 144 × 128 in the kernel's name"


def test_calls_of_equal_size_pair_in_the_order_of_the_program() -> None:
    """Five matmuls of one MLP are 4096 × 2048 × 8192 each way round.

    On an H200 a tile of 144 was that of one with 8,192 rows or columns, which a join by size took
    for one of 2,048: 7,516,192,768 for 268,435,456 FLOPs beyond it.
    """
    (first,) = library_program()
    shape = first.shape.matmul
    assert shape is not None
    swapped = dataclasses.replace(first.shape, matmul=shape._replace(n=shape.k, k=shape.n))
    second = dataclasses.replace(first, name="other", shape=swapped)
    launches = [
        verify.Launch("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT", 137_438_953_472, 0),
        verify.Launch("nvjet_sm90_tst_144x128_64x6_1x2_h_bz_TNN", 137_707_388_928, 0),
    ]
    rows = verify.compare(launches, [second, first])
    assert [row.difference for row in rows] == [0, 0]
    assert rows[1].beyond == 268_435_456


def test_equal_fusions_run_one_kernel() -> None:
    """Five equal matmuls of a transformer's block ran one kernel on an H200."""
    text = text_of("h100_silicon_odd")
    line = next(line for line in text.splitlines() if "%gemm_fusion_dot_general.1 = " in line)
    name = 'deduplicated_name="gemm_fusion_dot_general.1" op_name='
    twin = line.replace("dot_general.1 = ", "dot_general.9 = ").replace("op_name=", name, 1)
    shared = verify.shared_kernels(f"{text}\n{twin}")
    assert shared == {"gemm_fusion_dot_general.9": "gemm_fusion_dot_general_1"}
    (record,) = (r for r in instruction_costs(text).records.values() if r.flops)
    records = [record, dataclasses.replace(record, name="gemm_fusion_dot_general.9")]
    launch = verify.Launch("gemm_fusion_dot_general_1", 9_663_676_416, 0)
    (row,) = verify.compare([launch] * 2, records, shared)
    assert (row.launches, row.executed, row.difference) == (2, 2 * 6_905_976_000, 0)


def test_full_float32_runs_without_tensor_cores() -> None:
    launches = [verify.Launch("sm80_xmma_gemm_f32f32_simt", 0, 2 * 4096 * 8192 * 2048 + 64)]
    (row,) = verify.compare(launches, library_program())
    assert (row.difference, row.reason) == (64, "no tensor cores: FFMA; not explained")


def test_what_pairs_with_nothing_is_a_difference() -> None:
    (missing,) = verify.compare([], library_program())
    assert (missing.difference, missing.reason) == (-missing.executed, "joined with nothing")
    (strange,) = verify.compare([verify.Launch("mystery", 9, 0)], [])
    assert (strange.difference, strange.reason) == (9, "joined with nothing")


def test_the_table_ends_with_the_sum() -> None:
    rows = [
        verify.KernelRow("a", 2, 10, 6, 3, "tiles, stated"),
        verify.KernelRow("b", 1, 5, 5, 0, "equal"),
    ]
    *_, whole = verify.table("mlp", rows)
    assert whole == {
        "program": "mlp",
        "kernel": "all",
        "launches": 3,
        "counter": 15,
        "executed": 11,
        "beyond it": 3,
        "difference": 1,
        "reason": "",
    }


def test_a_run_compiles_first_and_then_profiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU, a stand-in runs the commands: the second one under ncu."""
    commands: list[list[str]] = []

    def stand_in(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        commands.append(command)
        assert env["XLA_FLAGS"].endswith("--xla_gpu_enable_command_buffer=")
        assert env["JAX_COMPILATION_CACHE_DIR"]
        text = [word.partition("=")[2] for word in command if word.startswith("--text=")]
        for path in text:
            Path(path).write_text(text_of("h100_silicon_odd"))
        out = ncu(("gemm_fusion_dot_general_1", {BF16: 9_663_676_416}))
        return subprocess.CompletedProcess(command, 0, stdout=out)

    monkeypatch.setattr(subprocess, "run", stand_in)
    written: list[Any] = []
    monkeypatch.setattr(results, "publish", lambda *a, **k: written.append((a, k)))
    verify.main(["odd"])
    prepared, profiled = commands
    assert prepared[0] != "ncu"
    assert profiled[:2] == ["ncu", "--target-processes"]
    assert profiled[-1] == "--profiled"
    ((study, measured), options) = written[0]
    assert (study, options) == ("verify_on_gpu", {"is_written": False})
    ((row, whole),) = measured.values()
    assert row["difference"] == whole["difference"] == 0


def test_programs_are_standard_ones_or_a_users_own() -> None:
    for name, (step, arguments, _) in PROGRAMS.items():
        assert verify.program_of(name) == (step, arguments)


def test_a_users_program_is_compiled_and_its_text_kept(tmp_path: Path) -> None:
    text = tmp_path / "text"
    verify.main([f"{__name__}:own_program", f"--text={text}"])
    assert executed_flops(text.read_text()).total == 2 * 4**3


def own_program() -> tuple[Any, tuple[Any, Any]]:
    """A user's step and its arguments."""
    array = jax.ShapeDtypeStruct((4, 4), "float32")
    return (lambda a, b: a @ b), (array, array)


def tiny() -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """A step and its arguments."""
    return lambda a: a @ a, [jax.ShapeDtypeStruct((64, 64), "float32")]


def test_a_live_row_has_the_steps_of_the_program_and_no_counter_on_a_cpu() -> None:
    row = verify.live(f"{__name__}:tiny", 0.5)
    assert row["steps"] > 0
    assert 0 < row["HFU"] < 1
    assert row["active by counter"] == row["by count"] == "n/a"
