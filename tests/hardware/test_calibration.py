"""Measured peaks: the arithmetic under a fake clock, the cache, and one real measurement."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfu_jax import cli, hardware
from mfu_jax.errors import UserError
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.hardware import calibration
from tests.support.floats import assert_close_as_float32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MFU_JAX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the measurement by 8e11 FLOP/s; the list fills with the dtypes asked for."""
    asked: list[str] = []

    def measure(dtype: str, device: jax.Device, **_: object) -> dict[str, float]:
        asked.append(dtype)
        return {"flops_per_sec": 8e11, "size": 512, "busy": 0.0}

    monkeypatch.setattr(calibration, "measure", measure)
    return asked


class _Clock:
    """Every look at it is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quota, and nobody else wants a core."""
    monkeypatch.setattr(calibration, "_cpu_quota", lambda: float("inf"))
    monkeypatch.setattr(calibration, "_waited_seconds", lambda: 0.0)


@pytest.mark.full
@pytest.mark.usefixtures("all_cores")
def test_rate_is_two_n_cubed_over_the_best_run():
    result = calibration.measure("fp32", jax.devices()[0], sizes=(32, 64), clock=_Clock())
    assert (result["flops_per_sec"], result["size"]) == (2 * 64**3, 64)


def test_the_chain_multiplies_as_often_as_asked():
    a = jax.random.normal(jax.random.key(0), (8, 8))
    x = jax.random.normal(jax.random.key(1), (8, 8))
    chained = jax.jit(calibration._chain)(a, x, 3)
    expected = np.linalg.matrix_power(np.asarray(a, np.float64), 3) @ np.asarray(x, np.float64)
    assert_close_as_float32(chained, expected, terms=8)


def test_the_compiled_chain_runs_every_matmul_that_the_rate_counts():
    n, matmuls = 32, 5
    a = jnp.ones((n, n))
    compiled = jax.jit(calibration._chain).lower(a, a, matmuls).compile()
    (loop,) = executed_flops(compiled).unaccounted  # runs as often as its operand says
    count = executed_flops(compiled, trip_counts={loop.where: matmuls})
    assert (count.total, count.unaccounted) == (matmuls * 2 * n**3, ())


def test_a_real_clock_gives_a_rate():
    result = calibration.measure("fp32", jax.devices()[0], sizes=(32,))
    assert 0 < result["flops_per_sec"] < float("inf")
    assert result["size"] == 32


def test_a_quota_of_cpu_time_limits_the_peak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "_cpu_quota", lambda: 0.5)
    process_time = iter([10.0, 14.0])  # 4 s of CPU time for the 4 runs
    monkeypatch.setattr(calibration.time, "process_time", lambda: next(process_time))
    result = calibration.measure("fp32", jax.devices()[0], sizes=(64,), clock=_Clock())
    assert result["flops_per_sec"] == 0.5 * 4 * 2 * 64**3 / 4
    assert calibration.machine_of(jax.devices()[0]).usable_cores == 0.5


def test_time_that_others_held_the_cores_is_made_up_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "_affinity", lambda: 2)
    monkeypatch.setattr(calibration, "_cpu_quota", lambda: float("inf"))
    waited = iter([0.0, 100.0])
    monkeypatch.setattr(calibration, "_waited_seconds", lambda: next(waited))
    process_time = iter([10.0, 12.0])  # 4 runs of a second each had 2 s of CPU time on 2 cores
    monkeypatch.setattr(calibration.time, "process_time", lambda: next(process_time))
    result = calibration.measure("fp32", jax.devices()[0], sizes=(64,), clock=_Clock())
    assert result["flops_per_sec"] == 2 * 4 * 2 * 64**3 / 2
    assert "by CPU time" in calibration._source(
        result, calibration.machine_of(jax.devices()[0]), None
    )


def test_a_second_call_reads_the_cache(measured: list[str]):
    first, second = calibration.calibrate("f32"), calibration.calibrate("float32")
    assert first.flops_per_sec == second.flops_per_sec
    assert "cached in" in second.source
    assert "cached in" not in first.source
    assert measured == ["fp32"]
    calibration.calibrate("f32", refresh=True)
    calibration.calibrate("bf16")
    assert measured == ["fp32", "fp32", "bf16"]


def test_the_peak_of_a_cpu_with_a_long_name_is_one_line_of_a_log(measured: list[str]):
    """100 columns; JSON has the rest. The name is from /proc/cpuinfo of a cloud machine."""
    name = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
    machine = calibration.Machine(
        device_kind="cpu", model=name, usable_cores=192, device_count=8, jax_version="0.10"
    )
    record = {"size": 1024.0, "busy": 0.5, "flops_per_sec": 1e11}
    source = calibration._source(record, machine, Path("/home/me/.cache/mfu_jax/peak.json"))
    peak = hardware.Peak(flops_per_sec=1.93505e11, dtype="fp32", kind="calibrated", source=source)
    assert len(f"peak of one device: {peak}") <= 100
    assert str(peak).endswith("(calibrated on Intel(R) Xeon(R) …, 192 cores)")
    assert all(word in source for word in (name, "1/8 of the machine", "cached in /home/me"))


def test_virtual_cpu_devices_share_the_machine(measured: list[str]):
    count = jax.local_device_count()
    peak = calibration.calibrate("f32")
    assert peak.flops_per_sec == 8e11 / count
    assert count == 1 or f"1/{count} of the machine" in peak.source


def test_any_number_of_virtual_devices_divides_one_measurement(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Two devices train, and a process with one reads their profile."""
    one = dataclasses.replace(calibration.machine_of(jax.devices()[0]), device_count=1)
    for count in (2, 1, 8):
        machine = dataclasses.replace(one, device_count=count)
        monkeypatch.setattr(calibration, "machine_of", lambda _, machine=machine: machine)
        assert calibration.calibrate("f32").flops_per_sec == 8e11 / count
    assert measured == ["fp32"]


def test_the_cache_is_keyed_by_everything_that_changes_the_peak(measured: list[str]):
    machine = calibration.machine_of(jax.devices()[0])
    others = [
        dataclasses.replace(machine, usable_cores=machine.usable_cores + 1),
        dataclasses.replace(machine, model="another CPU"),
        dataclasses.replace(machine, jax_version="0.0"),
    ]
    paths = {calibration.cache_path(m, "fp32") for m in (machine, *others)}
    assert len(paths | {calibration.cache_path(machine, "bf16")}) == 5


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "null",
        "[]",
        '{"key": 1}',
        "\x00\xff",
        '{"key": {}, "flops_per_sec": 1e11, "size": 1, "busy": 0}',
    ],
)
def test_a_damaged_cache_is_measured_again(
    damage: str, measured: list[str], cache: Path, caplog: pytest.LogCaptureFixture
):
    calibration.calibrate("f32")
    (path,) = cache.iterdir()
    path.write_bytes(damage.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert calibration.calibrate("f32").flops_per_sec > 0
    assert measured == ["fp32", "fp32"]
    assert "measuring again" in caplog.text
    assert "cached in" in calibration.calibrate("f32").source


@pytest.mark.parametrize("value", [0, -1e11, "NaN", float("inf")])
def test_a_cached_number_that_is_no_peak_is_measured_again(
    value: object, measured: list[str], cache: Path, caplog: pytest.LogCaptureFixture
):
    calibration.calibrate("f32")
    (path,) = cache.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "flops_per_sec": value}))
    with caplog.at_level(logging.WARNING):
        calibration.calibrate("f32")
    assert "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_failure(
    measured: list[str], cache: Path, caplog: pytest.LogCaptureFixture
):
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert calibration.calibrate("f32").kind == "calibrated"
    assert "MFU_JAX_CACHE_DIR" in caplog.text


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("MFU_JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.cache_directory() == tmp_path / "mfu_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert calibration.cache_directory() == Path.home() / ".cache" / "mfu_jax"


def test_a_cpu_is_calibrated_by_resolve_peak(measured: list[str]):
    peak = hardware.resolve_peak("cpu", "bf16")
    assert (peak.kind, peak.dtype) == ("calibrated", "bf16")
    assert peak.source.startswith("calibrated on ")
    assert "; 512² matmuls on " in peak.source
    assert hardware.resolve_peak(
        "NVIDIA B400", "bf16", hardware="calibrate"
    ) == hardware.resolve_peak("cpu", "bf16")


@pytest.mark.parametrize("dtype", ["fp4", "float64"])  # float64 needs jax_enable_x64
def test_a_dtype_that_cannot_be_measured_is_refused(dtype: str):
    with pytest.raises(UserError, match="peak_tflops_per_device"):
        calibration.calibrate(dtype)


def test_the_command_measures_the_attached_cpu(
    measured: list[str], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["hardware", "--calibrate", "--dtype=f32", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["device_kind"] == "cpu"
    assert answer["peak"]["tflops_per_sec"] == 0.8 / jax.local_device_count()
    assert answer["peak"]["kind"] == "calibrated"
