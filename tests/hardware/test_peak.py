"""The peak table: exact names, dense numbers, and errors that say how to go on."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.hardware.dtypes import DTYPES
from tests.support.messages import is_told
from tests.support.paths import DATA

INTERCONNECT = {
    *("ici_gbps_per_link", "ici_axes", "wraps_at", "nvlink_gbps", "devices_per_host"),
    *("dcn_gbps_per_device", "host_gbps_per_device", "host_gbps_taken"),
}


def test_every_row_has_a_source_known_keys_and_positive_numbers():
    text = Path(hardware.__file__).with_name("hardware.yml").read_text(encoding="utf-8")
    assert len(hardware.table()) == text.count("\n- name: ")
    for chip in hardware.table():
        assert chip.sources, chip.name
        assert chip.vendor, chip.name
        assert chip.confidence in ("high", "medium", "low"), chip.name
        assert {key.partition("_")[0] for key in chip.peak_tflops} <= set(DTYPES), chip.name
        assert chip.interconnect.keys() <= INTERCONNECT, chip.name
        units = [chip.usable_memory_gib, chip.clock_ghz, chip.matrix_unit]
        numbers = [*chip.peak_tflops.values(), *chip.interconnect.values()]
        numbers += [unit for unit in units if unit is not None]
        assert all(type(n) in (int, float) and 0 < n < math.inf for n in numbers), chip.name
        assert chip.memory_bytes > 2**30
        assert chip.memory_bandwidth_gbps > 50


def test_a_number_with_sources_of_its_own_is_in_its_row():
    for chip in hardware.table():
        fields = {name for name, value in vars(chip).items() if value not in (None, "", ())}
        assert chip.number_sources.keys() <= {*fields, *chip.peak_tflops}, chip.name
        assert all(chip.number_sources.values()), chip.name
    assert len(hardware.named("tpu8t").number_sources["fp4"]) == 1
    # What only says how a device is called is the source of no number.
    assert not [s for s in hardware.named("h100").sources if "get_device_name" in s]


def test_a_clock_is_that_of_the_rows_arithmetic():
    """Such as 132 SM*4096*1.83 GHz = 989.4."""
    for chip in hardware.table():
        clock = re.search(r"\*(\d\.\d+) GHz", chip.arithmetic)
        if clock and chip.clock_ghz is not None:
            assert chip.clock_ghz == float(clock[1]), chip.name
    assert hardware.named("h100").clock_ghz == 1.83


def test_the_memory_that_a_program_may_use_is_what_runs_printed():
    facts = {fact["id"]: fact for fact in json.loads((DATA / "memory_facts.json").read_text())}
    limits = facts["hbm-limits-printed"]["limits"]
    found = {name: hardware.named(name).usable_memory_bytes for name in limits}
    assert found == {name: int(gib * 2**30) for name, gib in limits.items()}
    assert (
        hardware.named("b300").usable_memory_bytes == hardware.named("b300").memory_bytes
    )  # nominal


def test_the_memory_of_gpus_is_what_cuda_reports():
    recorded = (DATA / "h100_target_config.txtpb").read_text()
    (size,) = re.findall(r"device_memory_size: (\d+)", recorded)
    assert hardware.named("h100").usable_memory_bytes == pytest.approx(int(size), rel=2e-4)
    # amd-agi/maxtext-slurm@198a4309c docs/b200-benchmark-report.md: 165.87 GiB at 0.93
    assert 0.93 * hardware.named("b200").usable_memory_gib == pytest.approx(165.87, abs=0.01)
    # JAX's limit on an H200 at 0.92, in a run of ours
    assert 0.92 * hardware.named("h200").usable_memory_bytes == pytest.approx(
        138_101_653_504, rel=1e-4
    )


def test_every_device_kind_finds_its_own_row():
    for chip in hardware.table():
        for kind in chip.device_kinds:
            if kind != "Metal":
                assert hardware.lookup(kind) is chip
            if kind.startswith("NVIDIA "):  # drivers before 470 leave the vendor out
                assert hardware.lookup(kind.removeprefix("NVIDIA ")) is chip


def test_every_name_and_alias_finds_its_own_row():
    for chip in hardware.table():
        for name in (chip.name, chip.name.lower(), *chip.aliases):
            assert hardware.named(name) is chip


# Dense FLOP/s written out as units × FLOPs a clock × clock; a sparse, per-package or vector figure
# would be off by a factor of 2 or more. L40S: NVIDIA's datasheet prints 362, not 366.
@pytest.mark.parametrize(
    "chip", [c for c in hardware.table() if c.arithmetic], ids=lambda c: c.name
)
def test_tensor_peak_is_the_product_of_units_and_clock(chip: hardware.Chip):
    left = chip.arithmetic.split("=")[0]
    factors = [float(x) for x in re.findall(r"(?<![A-Za-z])\d+\.?\d*(?:e\d+)?", left)]
    product = math.prod(factors) * (1e9 if "GHz" in left else 1) / 1e12
    cores = 2 if chip.name in ("TPU v2", "TPU v3") else 1  # the arithmetic is of the chip there
    listed = max(chip.peak_tflops.get("fp16", 0), chip.peak_tflops.get("bf16", 0)) * cores
    assert listed == pytest.approx(product, rel=0.013 if chip.name == "L40S" else 0.006)


# Each pair begins alike, which is where substring tables go wrong. Peaks from Google's and NVIDIA's
# own pages (docs.cloud.google.com/tpu/docs, product datasheets, without sparsity).
@pytest.mark.parametrize(
    ("kind", "bf16_tflops"),
    [
        ("TPU v5", 459),
        ("TPU v5 lite", 197),
        ("TPU v6 lite", 918),
        ("TPU v4", 275),
        ("TPU7x", 2307 / 2),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI250X", 383 / 2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peak_by_device_kind(kind: str, bf16_tflops: float):
    peak = hardware.resolve_peak(kind, "bfloat16")
    assert peak.tflops_per_sec == pytest.approx(bf16_tflops, rel=2e-3)
    assert (peak.kind, peak.dtype) == ("table", "bf16")


@pytest.mark.parametrize(
    ("kind", "precision", "tflops"),
    [
        ("TPU v5", None, 459),  # one bf16 pass
        ("TPU v5", "high", 459 / 3),
        ("TPU v5", "highest", 459 / 6),
        ("NVIDIA H100 80GB HBM3", "default", 494.7),  # TF32
        ("NVIDIA H100 80GB HBM3", "tensorfloat32", 494.7),
        ("NVIDIA H100 80GB HBM3", "float32", 66.9),
        ("Tesla V100-SXM2-16GB", "default", 15.7),  # has no TF32
        ("AMD Instinct MI250X", "default", 47.9),  # the matrix unit's float32
        ("NVIDIA H100 80GB HBM3", "BF16_BF16_F32_X3", 989.4 / 3),
        ("TPU v5", "BF16_BF16_F32", 459),
        ("NVIDIA H100 80GB HBM3", "F32_F32_F32", 66.9),
    ],
)
def test_float32_matmuls_follow_the_precision(kind: str, precision: str | None, tflops: float):
    peak = hardware.resolve_peak(kind, "float32", precision=precision)
    assert peak.tflops_per_sec == pytest.approx(tflops)


def test_the_source_says_which_number_was_taken():
    source = hardware.resolve_peak("TPU v5", "f32", precision="highest").source
    assert source == "table: TPU v5p, fp32 as 6 bf16 passes"
    assert hardware.resolve_peak("NVIDIA H200", "f32").source == "table: H200 SXM, fp32 as tf32"


def test_an_unknown_precision_matters_to_float32_alone():
    assert (
        hardware.resolve_peak("TPU v5", "bf16", precision="ANY_F8_ANY_F8_F32").tflops_per_sec == 459
    )
    with pytest.raises(UserError, match="matmul precision 'ANY_F8_ANY_F8_F32' is not known"):
        hardware.resolve_peak("TPU v5", "f32", precision="ANY_F8_ANY_F8_F32")


def test_dtype_names_of_numpy_jax_and_hlo_mean_the_same():
    import jax.numpy as jnp

    for same in (
        ["bf16", "bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")],
        ["f32", "float32", "fp32"],
    ):
        assert len({hardware.canonical_dtype(name) for name in same}) == 1
    assert hardware.canonical_dtype("f8e4m3fn") == hardware.canonical_dtype("float8_e5m2") == "fp8"
    with pytest.raises(UserError, match="no matmul peak"):
        hardware.canonical_dtype("bool")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("NVIDIA B400", "nearest: 'NVIDIA B300'"),
        ("TPU v9", "mfu-jax hardware --list"),
        ("NVIDIA H100 80GB HBM3 extra", "no known peak"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG slice of A100 80GB SXM"),
        ("Metal", "'Apple M2 Max'"),
        ("AMD Radeon Graphics", "'MI300X'"),
        ("", "no device and no hardware"),
    ],
)
def test_an_unknown_device_kind_is_an_error_with_a_way_out(kind: str, says: str):
    with pytest.raises(UserError) as error:
        hardware.resolve_peak(kind, "bf16")
    assert says in str(error.value)
    assert "peak_tflops_per_device=" in str(error.value)
    assert is_told(str(error.value))


def test_compute_capability_tells_rocm_chips_apart_where_it_can():
    assert hardware.lookup("AMD Radeon Graphics", "gfx908").name == "MI100"
    with pytest.raises(UserError, match="'MI350X', 'MI355X'"):
        hardware.lookup("AMD Radeon Graphics", "gfx950")


def test_a_dtype_without_a_peak_is_an_error_that_lists_the_others():
    with pytest.raises(
        UserError, match=r"(?s)A100 80GB SXM has no listed fp8 peak; it lists .*bf16"
    ):
        hardware.resolve_peak("NVIDIA A100-SXM4-80GB", "fp8")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast", "", True, 197e12])
def test_an_override_that_is_no_peak_is_refused(value: object):
    with pytest.raises(UserError, match="peak_tflops_per_device="):
        hardware.resolve_peak("TPU v5", "bf16", peak_tflops_per_device=value)  # type: ignore[arg-type]


def test_the_flag_wins_over_the_name_and_the_name_over_the_device():
    flag = hardware.resolve_peak("TPU v5", "bf16", peak_tflops_per_device=100, hardware="h100")
    name = hardware.resolve_peak("TPU v5", "bf16", hardware="h100")
    assert (flag.flops_per_sec, flag.kind) == (100e12, "flag")
    assert (name.flops_per_sec, name.source) == (989.4e12, "table: H100 SXM, bf16 (hardware=h100)")


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("H100-PCIe", "H100 PCIe"),
        ("nvidia h200", "H200 SXM"),
        ("rtx4090", "GeForce RTX 4090"),
        ("3090", "GeForce RTX 3090"),
        ("tpu v5", "TPU v5p"),
        ("TPU v5 lite", "TPU v5e"),
        ("ironwood", "TPU7x (Ironwood)"),
        ("l4", "L4"),
        ("7900 xtx", "Radeon RX 7900 XTX"),
    ],
)
def test_people_may_name_a_chip_as_they_do(name: str, chip: str):
    assert hardware.named(name).name == chip


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("6000", "'RTX 6000 Ada', 'RTX PRO 6000 Blackwell Workstation'"),
        ("mi300", "'MI300A', 'MI300X'"),
        ("v5", "'TPU v5e', 'TPU v5p'"),
        ("b400", "nearest: "),
        ("a100 pcie", "'A100 40GB PCIe', 'A100 80GB PCIe'"),
        ("", "not known"),
    ],
)
def test_an_ambiguous_or_unknown_name_lists_candidates(name: str, says: str):
    with pytest.raises(UserError) as error:
        hardware.named(name)
    assert says in str(error.value)


@pytest.mark.full
def test_a_lookup_imports_neither_jax_nor_numpy():
    code = (
        "import sys; from mfu_jax import hardware; hardware.resolve_peak('TPU v5', 'bf16');"
        "hardware.named('h100'); print({'jax', 'flax', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
