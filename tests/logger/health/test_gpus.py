"""GPUs' power, clocks and throttling, from a driver that the test makes."""

import dataclasses
import logging
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from mfu_jax.hardware.gpus import Gpu, Gpus, gpus_of_jax, visible
from mfu_jax.logger.health.hardware import HardwareWatch
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.sinks import StepRecord
from mfu_jax.util.failsafe import Boundary
from tests.support.work import HANG_SECONDS

RECORD = StepRecord(
    step=7,
    unix_seconds=0.0,
    scalars={"perf/mfu": 0.30, "perf/per_device_tokens_per_sec": 7000.0},
)


class NVMLError(Exception):
    """As pynvml's."""


def driver(**changes: Any) -> Any:
    """A module with pynvml's names: each GPU draws 700 W at 1,485 of 1,980 MHz and 85 °C."""

    def unsupported(*_: Any) -> None:
        raise NVMLError("Not Supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": unsupported,
        "nvmlDeviceGetMigMode": unsupported,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-0 of {handle}",
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetHandleByIndex": lambda index: f"index {index}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"uuid {uuid}",
        "nvmlDeviceGetPowerUsage": lambda handle: 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 5_000_000,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1485, 2: 2619}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {1: 1980, 2: 2619}[kind],
        "nvmlDeviceGetTemperature": lambda handle, sensor: 85,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x20 | 0x1,
        "nvmlDeviceGetCurrentClocksThrottleReasons": unsupported,
    }
    changes = {name: unsupported if value is None else value for name, value in changes.items()}
    return types.SimpleNamespace(NVMLError=NVMLError, **{**functions, **changes})


MakeWatch = Callable[[Gpus | None], HardwareWatch]


@pytest.fixture
def watch_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWatch]:
    """Makes a watch of such GPUs; they are closed after the test."""
    watches = []

    def make(gpus: Gpus | None) -> HardwareWatch:
        monkeypatch.setattr("mfu_jax.logger.health.hardware.gpus_of_jax", lambda: gpus)
        watches.append(HardwareWatch(0.001, Boundary()))
        return watches[-1]

    yield make
    for watch in watches:
        watch.close()


def next_reading(watch: HardwareWatch) -> StepRecord:
    """The first record with a reading; its scalars are those that were added."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        ended = dataclasses.replace(RECORD, unix_seconds=time.time())
        if (record := watch.on_record(TimedStep(), ended)) is not ended:
            added = {n: v for n, v in record.scalars.items() if n not in RECORD.scalars}
            return dataclasses.replace(record, scalars=added)
    raise AssertionError("no reading")


def test_power_is_the_sum_and_energy_gives_tokens_a_joule(watch_of: MakeWatch) -> None:
    watch = watch_of(Gpus(driver(), [0, 1]))
    scalars = next_reading(watch).scalars
    assert scalars == {
        "gpu/power_watts": 1400.0,
        "gpu/sm_clock_mhz": 1485.0,
        "gpu/memory_clock_mhz": 2619.0,
        "gpu/temperature_celsius": 85.0,
        "gpu/energy_joules": 10_000.0,
        "gpu/throttled_thermal": 1.0,
        "gpu/tokens_per_joule": 2 * 7000.0 / 1400.0,
        "perf/mfu_at_clock": pytest.approx(0.30 * 1980 / 1485),
    }


def test_a_reading_after_the_last_step_is_not_of_it(watch_of: MakeWatch) -> None:
    """On an H200 the last record had 1,965 MHz, of the idle device, and the steps ran at 1,455."""
    watch = watch_of(Gpus(driver(), [0]))
    next_reading(watch)
    time.sleep(0.05)  # for more readings
    assert watch.on_record(TimedStep(), RECORD) is RECORD  # it ended in 1970


def test_heat_that_persists_is_told_once(watch_of: MakeWatch) -> None:
    watch = watch_of(Gpus(driver(), [0]))
    notes = [note for _ in range(8) for note in next_reading(watch).notes]
    assert notes == ["GPU 0 throttles because of heat at 85 °C, 1485 MHz of 1980"]


def test_what_the_driver_lacks_is_left_out(watch_of: MakeWatch) -> None:
    names = ("TotalEnergyConsumption", "PowerUsage", "ClockInfo", "CurrentClocksEventReasons")
    lacking = driver(**{f"nvmlDeviceGet{name}": None for name in names})
    watch = watch_of(Gpus(lacking, [0]))
    assert next_reading(watch).scalars == {"gpu/temperature_celsius": 85.0}


def test_a_driver_that_hangs_holds_up_nothing(watch_of: MakeWatch) -> None:
    forever = threading.Event()
    gpus = Gpus(driver(nvmlDeviceGetPowerUsage=lambda _: forever.wait()), [0])
    watch = watch_of(gpus)
    assert watch.on_record(TimedStep(), RECORD) is RECORD
    watch.close()
    forever.set()


def test_cuda_renumbers_gpus_and_nvml_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-12ab")
    assert [visible(0), visible(1), visible(2)] == ["6", "GPU-12ab", "2"]
    assert Gpus(driver(), [0, 1]).gpus == [Gpu("index 6"), Gpu("uuid GPU-12ab")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible(3) == "3"


def test_without_gpus_or_without_the_package_nothing_is_asked(
    watch_of: MakeWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert gpus_of_jax() is None  # a CPU
    device = types.SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", local_hardware_id=0)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO, "mfu_jax"):
        assert gpus_of_jax() is None
    assert "pip install 'mfu-jax[nvidia]'" in caplog.text
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    found = gpus_of_jax()
    assert found is not None
    assert len(found.read()) == 1
    assert watch_of(None).on_record(TimedStep(), RECORD) is RECORD
