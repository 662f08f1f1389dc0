"""GPM counters by the real nvidia-ml-py, from a driver's library that the test compiles."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.hardware import counters, gpus
from mfu_jax.hardware.counters import GpmCounters, combined, counters_of_jax
from mfu_jax.hardware.gpus import Gpus
from mfu_jax.logger.health import hardware
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.sinks import JsonlSink
from tests.hardware.test_gpu_driver import UUIDS, record_until
from tests.support.logger_run import RUN_COST
from tests.support.nvml import GPU_IS_LOST, NAME, Driver, build

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build NVML"),
]
# The numbers of nvml.h.
SM, OCCUPANCY, TENSOR, DFMA, HMMA, IMMA, DRAM = 2, 3, 5, 6, 7, 9, 10
PCIE_TX, PCIE_RX, NVLINK_RX, NVLINK_TX = 20, 21, 60, 61


@pytest.fixture
def driver(nvml: Path) -> Iterator[Driver]:
    driver = Driver(nvml)
    driver.load([NAME] * 2)
    for gpu in range(2):
        for metric in (SM, OCCUPANCY, TENSOR, DFMA, HMMA, IMMA, DRAM, *range(20, 98)):
            for is_slice in (False, True):
                driver.count(gpu, metric, 0.0, is_slice=is_slice)
    before = driver.samples
    yield driver
    assert driver.samples == before


@pytest.fixture
def pynvml(driver: Driver) -> Any:
    return importlib.import_module("pynvml")


def readings(gpus: Gpus, times: int) -> list[dict[str, float]]:
    source = GpmCounters(gpus)
    found = [combined(source.read()) for _ in range(times)]
    source.close()
    return found


def test_a_pair_of_samples_makes_shares_and_bytes_per_second(driver: Driver, pynvml: Any) -> None:
    for gpu, rate in ((0, 60.0), (1, 40.0)):
        driver.count(gpu, TENSOR, rate)
        driver.count(gpu, PCIE_RX, 8.0)
    first = {SM: 80.0, OCCUPANCY: 12.5, HMMA: 55.0, IMMA: 5.0, DRAM: 25.0}
    for metric, rate in {**first, PCIE_TX: 0.5, NVLINK_TX: 100_000.0, NVLINK_RX: 50_000.0}.items():
        driver.count(0, metric, rate)
    nothing, found = readings(Gpus(pynvml, [0, 1]), 2)
    assert nothing == {}
    assert found == {
        name: pytest.approx(value, rel=1e-6)
        for name, value in {
            "hardware/tensor_active": 0.5,
            "hardware/tensor_hmma_active": 0.275,
            "hardware/tensor_imma_active": 0.025,
            "hardware/tensor_dfma_active": 0.0,
            "hardware/sm_active": 0.4,
            "hardware/sm_occupancy": 0.0625,
            "hardware/dram_active": 0.125,
            "hardware/pcie_tx_bytes_per_sec": 524_288.0,
            "hardware/pcie_rx_bytes_per_sec": 16_777_216.0,
            "hardware/nvlink_tx_bytes_per_sec": 104_857_600_000.0,
            "hardware/nvlink_rx_bytes_per_sec": 52_428_800_000.0,
        }.items()
    }


def test_each_reading_is_of_the_time_since_the_last_one(driver: Driver, pynvml: Any) -> None:
    source = GpmCounters(Gpus(pynvml, [1]))
    shares = []
    for rate in (10.0, 20.0, 70.0):
        driver.count(1, TENSOR, rate)
        shares.append(combined(source.read()).get("hardware/tensor_active"))
    source.close()
    assert shares == [None, pytest.approx(0.2), pytest.approx(0.7)]


def test_what_the_gpu_does_not_count_is_left_out(driver: Driver, pynvml: Any) -> None:
    driver.count(0, TENSOR, 30.0)
    driver.count(0, IMMA, -1.0)
    found = readings(Gpus(pynvml, [0]), 2)[1]
    assert "hardware/tensor_imma_active" not in found
    assert found["hardware/tensor_active"] == pytest.approx(0.3)


def test_counters_that_begin_again_are_no_share(driver: Driver, pynvml: Any) -> None:
    driver.count(0, TENSOR, 50.0)
    driver.count(0, HMMA, 50.0)
    source = GpmCounters(Gpus(pynvml, [0]))
    for _ in range(3):
        before = combined(source.read())
    driver.reset_counters(0)
    wrapped, after = combined(source.read()), combined(source.read())
    source.close()
    assert before["hardware/tensor_active"] == after["hardware/tensor_active"]
    assert "hardware/tensor_active" not in wrapped


def test_a_lost_gpu_needs_a_pair_again(
    driver: Driver, pynvml: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mfu_jax")
    driver.count(0, TENSOR, 50.0)
    source = GpmCounters(Gpus(pynvml, [0]))
    found = []
    for error in (0, 0, GPU_IS_LOST, 0, 0):
        driver.set(0, error=error)
        found.append(bool(combined(source.read())))
    source.close()
    assert found == [False, True, False, False, True]
    assert caplog.messages == ["the counters of GPU 0 are not known: GPU is lost"]


def test_a_driver_that_refuses_is_one_line(
    driver: Driver, pynvml: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = GpmCounters(Gpus(pynvml, [0]))
    driver.set(0, gpm=0)  # as if a profiler took the counters
    with caplog.at_level(logging.INFO, "mfu_jax"):
        assert [combined(source.read()) for _ in range(3)] == [{}] * 3
    source.close()
    assert caplog.messages == ["the counters of GPU 0 are not known: Not Supported"]


def test_a_slice_has_counters_of_its_own(
    driver: Driver, pynvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.set(1, mig=1)
    driver.count(1, TENSOR, 90.0)
    driver.count(1, TENSOR, 40.0, is_slice=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS[1].replace("GPU", "MIG"))
    found = readings(Gpus(pynvml, [0]), 2)[1]
    assert found["hardware/tensor_active"] == pytest.approx(0.4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UserError, match="only by its UUID"):
        GpmCounters(Gpus(pynvml, [0]))


def test_without_gpm_nothing_is_read_and_one_line_says_so(
    driver: Driver,
    pynvml: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver.set(0, gpm=0)
    device = types.SimpleNamespace(platform="gpu")
    fake = types.SimpleNamespace(local_devices=lambda: [device])
    monkeypatch.setattr(counters, "jax", fake)
    monkeypatch.setitem(sys.modules, "DcgmReader", None)
    with caplog.at_level(logging.INFO, "mfu_jax"):
        assert counters_of_jax(Gpus(pynvml, [0]), 10.0) is None
    assert len(caplog.records) == 1
    assert f"{NAME} has no GPM counters" in caplog.text
    assert "datacenter-gpu-manager-4/bindings/python3" in caplog.text


def test_an_old_driver_has_none(tmp_path: Path) -> None:
    """In a process of its own: the package keeps the first library that it finds."""
    library = build(tmp_path, "-DOLD_DRIVER")
    program = f"""
import pynvml
from pathlib import Path
from mfu_jax.errors import UserError
from mfu_jax.hardware.counters import GpmCounters
from mfu_jax.hardware.gpus import Gpus
from tests.support.nvml import Driver
Driver(Path({str(library)!r})).load()
try:
    GpmCounters(Gpus(pynvml, [0]))
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "NVML's GPM counters are not there (Function Not Found)\n"


def test_a_run_is_told_that_its_count_and_its_counter_disagree(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HFU is 4 FLOPs a step of any length / its time; the counter says something else."""
    driver.count(0, TENSOR, 90.0)
    device = types.SimpleNamespace(device_kind=NAME, platform="gpu", local_hardware_id=0)
    for module in (counters, gpus, hardware):
        fake = types.SimpleNamespace(local_devices=lambda: [device])
        monkeypatch.setattr(module, "jax", fake)
    file = tmp_path / "metrics.jsonl"
    options: dict[str, Any] = {"warmup_steps": 0, "gpu_period_seconds": 0.05}
    cost = {**RUN_COST, "executed_flops_per_device": 1, "peak_flops_per_sec": 1e12}
    logger = MetricLogger(**cost, sinks=[JsonlSink(file)], **options)
    step = record_until(logger, file, "the tensor cores are active", 0)
    record_until(logger, file, '"hardware/tensor_active_by_count"', step)
    summary = logger.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    compared = [r for r in records if "hardware/tensor_active_by_count" in r]
    assert len(compared) >= 3
    assert {round(r["hardware/tensor_active"], 6) for r in compared} == {0.9}
    notes = [note for r in records for note in r.get("notes", ()) if "tensor cores" in note]
    assert len(notes) == 1
    assert "a kernel without FLOPs" in notes[0]
    assert summary.tensor_active == pytest.approx(0.9)
    assert summary.tensor_active_by_count is not None
    assert "  tensor cores active 90.0% by counter, " in summary.render()
