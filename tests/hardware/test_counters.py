"""Counters of TPUs and of GPUs by DCGM, from libraries with their interface."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from mfu_jax.errors import UserError
from mfu_jax.hardware.counters import DcgmCounters, TpuCounters, combined, counters_of_jax
from mfu_jax.hardware.gpus import Gpus
from mfu_jax.logger.health import hardware
from mfu_jax.util.failsafe import Boundary
from tests.logger.health.test_gpus import driver, next_reading

# As libtpu 0.0.52 answers: lists of texts, empty for what a TPU or a version does not have.
V6E = {
    "tensorcore_util": ["40.00", "60.00", "50.00", "50.00"],
    "duty_cycle_pct": ["100.00", "99.00", "100.00", "97.00"],
    "hbm_util": ["20.00", "20.00", "20.00", "20.00"],
    "hbm_capacity_usage": ["16775114752"] * 4,
    "hbm_capacity_total": ["33550229504"] * 4,
    "tpu_throttle_score": ["0-0", "1-3", "2-0", "3-0"],
    "tensorcore_utilization": ["0.00"] * 4,
}


def libtpu(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Sequence[str]]) -> None:
    """Puts a libtpu with these answers in place, and a TPU."""

    def get_metric(name: str) -> Any:
        if name not in answers:
            raise RuntimeError(f"Metric {name} is not supported")
        return types.SimpleNamespace(data=lambda: answers[name], description=lambda: "")

    monitoring = types.SimpleNamespace(get_metric=get_metric)
    sdk = types.SimpleNamespace(tpumonitoring=monitoring)
    monkeypatch.setitem(sys.modules, "libtpu", types.SimpleNamespace(sdk=sdk))
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform="tpu")])


def test_a_tpu_tells_its_tensor_cores_memory_and_throttling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libtpu(monkeypatch, V6E)
    source = counters_of_jax(None, 10.0)
    assert source is not None
    assert combined(source.read()) == {
        "hardware/tensor_active": pytest.approx(0.5),
        "hardware/duty_cycle": pytest.approx(0.99),
        "hardware/dram_active": pytest.approx(0.2),
        "hardware/hbm_used": 0.5,
        "hardware/throttle_score": 3.0,  # the worst: by 30%
    }


def test_a_duty_cycle_of_chips_is_averaged_like_one_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A TPU v3 tells it of each chip, a TPU7x of each device: two of either have the same mean."""
    cores = {"tensorcore_util": ["10.0", "20.0", "30.0", "40.0"]}
    libtpu(monkeypatch, {**cores, "duty_cycle_pct": ["50.0", "70.0"]})
    of_chips = combined(TpuCounters().read())
    libtpu(monkeypatch, {**cores, "duty_cycle_pct": ["40.0", "60.0", "70.0", "70.0"]})
    assert combined(TpuCounters().read()) == {
        name: pytest.approx(value) for name, value in of_chips.items()
    }
    assert of_chips["hardware/duty_cycle"] == pytest.approx(0.6)


def test_what_libtpu_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    libtpu(monkeypatch, {"tensorcore_util": [], "duty_cycle_pct": ["1.5"], "hbm_util": ["-1.0"]})
    assert combined(TpuCounters().read()) == {"hardware/duty_cycle": pytest.approx(0.015)}


@pytest.mark.parametrize(
    ("broken", "lost"),
    [
        ({"tensorcore_util": ["40.00", "N/A"]}, "tensor_active"),
        ({"hbm_capacity_total": ["0"] * 4}, "hbm_used"),
        ({"hbm_capacity_usage": ["busy"]}, "hbm_used"),
        ({"tpu_throttle_score": ["0-none"]}, "throttle_score"),
        ({"hbm_util": None}, "dram_active"),  # an error other than libtpu's RuntimeError
    ],
)
def test_a_metric_that_cannot_be_read_costs_no_other(
    broken: dict[str, Any], lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    libtpu(monkeypatch, V6E)
    whole = combined(TpuCounters().read())
    libtpu(monkeypatch, V6E | broken)
    rest = {name: value for name, value in whole.items() if name != f"hardware/{lost}"}
    assert combined(TpuCounters().read()) == rest
    assert len(rest) == len(whole) - 1


def test_a_libtpu_without_counters_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    libtpu(monkeypatch, {})
    monkeypatch.setitem(sys.modules, "libtpu.sdk", types.SimpleNamespace())
    with caplog.at_level(logging.INFO, "mfu_jax"):
        assert counters_of_jax(None, 10.0) is None
    assert [r.message.startswith("libtpu has no counters") for r in caplog.records] == [True]


def dcgm(monkeypatch: pytest.MonkeyPatch, values: dict[int, dict[int, float]]) -> dict[str, Any]:
    """Puts DCGM's binding in place; returns what its reader was made with."""
    given: dict[str, Any] = {}

    class DcgmReader:
        """As DCGM's: the methods that are used, with its names."""

        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)
            self.m_gpuIdToUUId: dict[int, str] = {}  # known once it has connected

        def GetLatestGpuValuesAsFieldIdDict(self) -> dict[int, dict[int, float]]:  # noqa: N802
            self.m_gpuIdToUUId = {0: "GPU-0 of index 1", 1: "GPU-0 of index 0", 2: "GPU-9"}
            return values

        def Shutdown(self) -> None:  # noqa: N802
            given["is_down"] = True

    module = types.SimpleNamespace(DcgmReader=DcgmReader)
    monkeypatch.setitem(sys.modules, "DcgmReader", module)
    return given


def test_dcgm_tells_the_gpus_of_this_process_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {0: {1004: 0.9, 1009: 1e9}, 1: {1004: 0.5, 1002: 0.75, 1009: 2e9}, 2: {1004: 0.1}}
    given = dcgm(monkeypatch, fields)
    source = DcgmCounters(Gpus(driver(), [0]), 10.0, instead="")
    assert given["updateFrequency"] == 10_000_000
    assert str(os.getpid()) in given["fieldGroupName"]
    assert combined(source.read()) == {
        "hardware/tensor_active": 0.5,
        "hardware/sm_active": 0.75,
        "hardware/pcie_tx_bytes_per_sec": 2e9,
    }
    assert combined(DcgmCounters(Gpus(driver(), [0, 1]), 10.0, instead="").read()) == {
        "hardware/tensor_active": 0.7,
        "hardware/sm_active": 0.75,
        "hardware/pcie_tx_bytes_per_sec": 3e9,
    }
    source.close()
    assert given["is_down"]


def test_without_dcgm_the_error_says_where_its_binding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "DcgmReader", None)
    with pytest.raises(UserError, match=r"(?s)NVIDIA A100 has no GPM.*PYTHONPATH=/usr/share"):
        DcgmCounters(Gpus(driver(), [0]), 10.0, instead="NVIDIA A100 has no GPM counters")
    dcgm(monkeypatch, {})  # a host engine that is not running
    with pytest.raises(UserError, match="none of these GPUs; is nv-hostengine running"):
        DcgmCounters(Gpus(driver(), [5]), 10.0, instead="")


def test_without_devices_there_are_none() -> None:
    assert counters_of_jax(None, 10.0) is None


def test_counters_that_break_cost_no_other_reading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def read(self) -> Any:
            raise ArithmeticError("another form")

        def close(self) -> None: ...

    monkeypatch.setattr(hardware, "gpus_of_jax", lambda: Gpus(driver(), [0]))
    monkeypatch.setattr(hardware, "counters_of_jax", lambda *_: Broken())
    watch = hardware.HardwareWatch(0.001, Boundary())
    for _ in range(3):
        assert next_reading(watch).scalars["gpu/power_watts"] == 700.0
    watch.close()
    assert caplog.text.count("the devices' counters are not known") == 1
