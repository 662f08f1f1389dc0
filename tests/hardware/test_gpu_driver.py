"""GPUs' numbers by the real nvidia-ml-py, from a driver's library that the test compiles."""

from __future__ import annotations

import ctypes
import importlib
import json
import shutil
import subprocess
import sys
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.errors import UserError
from mfu_jax.hardware import counters, gpus
from mfu_jax.hardware.gpus import GpuReading, Gpus
from mfu_jax.logger.health import hardware
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.runs.metrics.files import read_metrics
from mfu_jax.sinks import JsonlSink
from tests.support.logger_run import RUN_COST
from tests.support.nvml import BUSY, GPU_IS_LOST, NAME, UNSUPPORTED, Driver, build
from tests.support.work import HANG_SECONDS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build NVML"),
]
UUIDS = [f"GPU-{0xA0B0C0D0 + 16 * i:08x}-1111-2222-3333-444455556666" for i in range(4)]


@pytest.fixture
def driver(nvml: Path) -> Driver:
    driver = Driver(nvml)
    driver.load([NAME] * 4)
    return driver


@pytest.fixture
def pynvml(driver: Driver) -> Any:
    return importlib.import_module("pynvml")


def test_units_are_those_of_nvml(driver: Driver, pynvml: Any) -> None:
    driver.set(0, power_mw=651_250, energy_mj=41_000_000, celsius=71, reasons=0x4 | 0x1)
    (reading,) = Gpus(pynvml, [0]).read()
    numbers = {
        "power_watts": 651.25,
        "energy_joules": 41_651.25,  # and a second at that power
        "sm_clock_mhz": 1485.0,
        "max_sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "temperature_celsius": 71.0,
    }
    assert reading == GpuReading(numbers, throttles=("power",))


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("power", "SwPowerCap"),
        ("hardware", "HwSlowdown"),
        ("thermal", "SwThermalSlowdown"),
        ("thermal", "HwThermalSlowdown"),
        ("power_brake", "HwPowerBrakeSlowdown"),
    ],
)
def test_reasons_have_the_bits_of_the_package(
    name: str, mask: str, driver: Driver, pynvml: Any
) -> None:
    driver.set(0, reasons=getattr(pynvml, f"nvmlClocksEventReason{mask}"))
    assert Gpus(pynvml, [0]).read()[0].throttles == (name,)


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        ("", {0, 1}),
        ("2,1", {2, 1}),
        (f"{UUIDS[3]},{UUIDS[0]}", {3, 0}),
        (f"{UUIDS[3][:12]},{UUIDS[1][:12]}", {3, 1}),  # CUDA takes the beginning of a UUID
    ],
)
def test_the_gpus_of_this_process_are_asked(
    visible: str, asked: set[int], driver: Driver, pynvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = driver.asked()
    Gpus(pynvml, [0, 1]).read()
    assert set(driver.asked() - before) == asked


def test_a_slice_has_the_clocks_of_its_gpu_and_no_power(
    driver: Driver, pynvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS[2].replace("GPU", "MIG"))
    driver.set(2, mig=1, sm_mhz=1200)
    by_uuid = Gpus(pynvml, [0]).read()[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")  # its first slice
    assert Gpus(pynvml, [0]).read()[0] == by_uuid
    assert by_uuid.numbers["sm_clock_mhz"] == 1200
    assert not {"power_watts", "energy_joules"} & set(by_uuid.numbers)
    assert by_uuid.silence == ""


def test_what_a_gpu_does_not_tell_is_left_out(driver: Driver, pynvml: Any) -> None:
    driver.set(0, energy_mj=UNSUPPORTED, mig=UNSUPPORTED)
    (reading,) = Gpus(pynvml, [0]).read()
    assert "energy_joules" not in reading.numbers
    assert reading.numbers["power_watts"] == 700.0


def test_gpus_of_several_kinds_are_not_mixed_up(driver: Driver, pynvml: Any) -> None:
    driver.load(["NVIDIA T400", NAME])
    with pytest.raises(UserError, match=r"(?s)NVIDIA T400.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        Gpus(pynvml, [0], [NAME])
    assert Gpus(pynvml, [1], [f"{NAME} MIG 1g.10gb"]).read()[0].numbers["power_watts"] == 700.0


def test_no_driver_is_one_line_that_says_what_to_do(driver: Driver, pynvml: Any) -> None:
    driver.unload()
    with pytest.raises(UserError, match=r"(?s)'Driver Not Loaded'.*NVIDIA_DRIVER_CAPABILITIES"):
        Gpus(pynvml, [0])


def test_an_old_driver_tells_throttling_by_the_old_name(tmp_path: Path) -> None:
    """In a process of its own: the package keeps the first library that it finds."""
    library = build(tmp_path, "-DOLD_DRIVER")
    assert not hasattr(ctypes.CDLL(str(library)), "nvmlDeviceGetCurrentClocksEventReasons")
    program = f"""
import pynvml
from pathlib import Path
from mfu_jax.hardware.gpus import Gpus
from tests.support.nvml import Driver
driver = Driver(Path({str(library)!r}))
driver.load()
driver.set(0, reasons=0x40)
print(Gpus(pynvml, [0]).read()[0].throttles)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "('thermal',)\n"


def record_until(logger: MetricLogger, file: Path, words: str, step: int) -> int:
    """Records steps until the file has these words; returns the next step."""
    deadline = time.monotonic() + HANG_SECONDS
    while words not in (file.read_text() if file.exists() else ""):
        assert time.monotonic() < deadline, f"no {words!r}"
        logger.record(step, {"loss": 1.0})
        step += 1
        time.sleep(0.002)
    return step


def test_a_run_whose_gpu_is_lost_and_comes_back_loses_no_step(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [
        types.SimpleNamespace(device_kind=NAME, platform="gpu", local_hardware_id=i)
        for i in range(2)
    ]
    for module in (counters, gpus, hardware):
        monkeypatch.setattr(module, "jax", types.SimpleNamespace(local_devices=lambda: devices))
    file = tmp_path / "metrics.jsonl"
    options: dict[str, Any] = {"warmup_steps": 0, "log_period": 1, "gpu_period_seconds": 0.005}
    logger = MetricLogger(**RUN_COST, sinks=[JsonlSink(file)], **options)
    step = record_until(logger, file, '"gpu/power_watts": 1400.0', 0)
    driver.set(1, power_mw=300_000, sm_mhz=990)
    step = record_until(logger, file, '"gpu/power_watts": 1000.0', step)
    driver.set(1, error=GPU_IS_LOST)
    step = record_until(logger, file, "GPU 1 does not answer: GPU is lost", step)
    driver.set(0, error=GPU_IS_LOST)
    step = record_until(logger, file, "GPU 0 does not answer", step)
    driver.set(0, **BUSY)
    driver.set(1, **BUSY)
    step = record_until(logger, file, "GPU 1 answers again", step)
    logger.close()

    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(step))
    known = {700.0 + watts for watts in (700.0, 300.0)}
    assert {r["gpu/power_watts"] for r in records if "gpu/power_watts" in r} == known
    for record in records:
        if "gpu/tokens_per_joule" in record:
            rate = record["perf/per_device_tokens_per_sec"]
            watts = record["gpu/power_watts"]
            assert record["gpu/tokens_per_joule"] == pytest.approx(2 * rate / watts)
        if record.get("gpu/sm_clock_mhz") == 990 and "perf/mfu" in record:
            assert record["perf/mfu_at_clock"] == pytest.approx(record["perf/mfu"] * 1830 / 990)
    joules = {round(1000 * r["gpu/energy_joules"]) for r in records if "gpu/energy_joules" in r}
    told = [(gpu, value) for gpu, what, value in driver.answers() if what == "energy_mj"]
    assert joules <= {a + b for (i, a), (j, b) in pairwise(told) if (i, j) == (0, 1)}
    shown = read_metrics(file)
    last = next(r for r in reversed(records) if any(name.startswith("gpu/") for name in r))
    assert shown.gpu["step"] == last["step"]
    assert shown.gpu["gpu/sm_clock_mhz"] == last["gpu/sm_clock_mhz"] == 1485.0
