"""Benchmark runs: the plan, the fall-back to smaller batches, and what is said of each config."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.planning.tune.attached_devices import AttachedDevices
from mfu_jax.trainer.config import mesh_axes, pyconfig
from scripts.benchmarks import platforms
from scripts.benchmarks import run as benchmarking
from tests.support.messages import is_told
from tests.support.work import HANG_SECONDS

CPU = AttachedDevices(platform="cpu", kind="cpu", count=1, memory_bytes=0)
# Usable bytes of an 80 GiB H100 at a memory fraction of 0.92, and of a 16 GiB v5e.
H100 = AttachedDevices(
    platform="gpu",
    kind="NVIDIA H100 80GB HBM3",
    count=1,
    memory_bytes=int(0.92 * 79.6 * 2**30),
)
V5E = dataclasses.replace(H100, platform="tpu", kind="TPU v5 lite", memory_bytes=int(15.75 * 2**30))

# Stands in for the trainer: fits from batch 2 downwards; its totals are what they are.
FAKE_TRAINER = """
import json, sys
keys = dict(argument.split("=", 1) for argument in sys.argv[1:])
if int(keys["per_device_batch_size"]) > 2:
    sys.exit("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
with open(keys["metrics_file"], "w") as file:
    for step in range(4):
        print(json.dumps({"step": step, "memory/peak_bytes_in_use": 100 + step}), file=file)
with open(keys["metrics_file"] + ".summary.json", "w") as file:
    print(json.dumps({"steps": 3, "median_seconds": 2.0}), file=file)
"""


def _trainer(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def _run(script: str, folder: Path, name: str = "llama3.2-1b") -> benchmarking.BenchmarkResult:
    return benchmarking.run_benchmark(
        name, H100, folder, steps=4, timeout=HANG_SECONDS, trainer=_trainer(script)
    )


@pytest.mark.full
def test_a_batch_that_does_not_fit_is_followed_by_a_smaller_one(tmp_path: Path):
    result = _run(FAKE_TRAINER, tmp_path)  # its batches are 8, 8, 4, 2, 1
    assert result.status == "ok"
    assert result.settings["per_device_batch_size"] == 2
    assert result.metrics["median_seconds"] == 2.0
    assert result.metrics["peak_memory_bytes"] == 103


@pytest.mark.full
def test_out_of_memory_at_every_batch_is_said(tmp_path: Path):
    result = _run("import sys; sys.exit('RESOURCE_EXHAUSTED')", tmp_path)
    assert result.status == "out of memory even with batch 1"


@pytest.mark.full
def test_a_failure_names_its_last_line_and_its_log(tmp_path: Path):
    result = _run("import sys; print('so far'); sys.exit('it broke')", tmp_path)
    assert result.status == "failed with exit code 1: it broke"
    assert "so far" in Path(result.log).read_text()
    assert f"llama3.2-1b: {result.status} (log: {result.log})" in benchmarking.render([result])


def test_a_model_that_cannot_fit_is_skipped_with_the_numbers():
    # 8.03e9 parameters × 8 bytes = 59.8 GiB in bfloat16; a v5e has 15.75
    with pytest.raises(UserError, match=r"need 59\.8 GiB a device on 1; the limit is 13\.4 GiB"):
        benchmarking.plan("llama3-8b", V5E, steps=5)


@pytest.mark.parametrize(
    ("name", "device", "weights"),
    [
        ("llama3-8b", H100, "bfloat16"),  # 64 GB of state; in float32 it would be 128
        ("llama3.2-1b", H100, "float32"),  # 20 GB
        ("llama3.2-1b", V5E, "bfloat16"),  # 20 GB do not fit, 10 do
        ("llama3-8b", dataclasses.replace(H100, count=8), "float32"),  # 16 GB a device
        ("llama3-8b", dataclasses.replace(V5E, count=8), "bfloat16"),  # 8 GB a device
    ],
)
def test_weights_are_float32_where_the_state_fits(name: str, device: AttachedDevices, weights: str):
    plan = benchmarking.plan(name, device, steps=5)
    assert {settings["weight_dtype"] for settings in plan} == {weights}
    assert {settings["fsdp"] for settings in plan} == {device.count}
    batches = [settings["per_device_batch_size"] for settings in plan]
    assert batches == sorted(batches, reverse=True)


@pytest.mark.parametrize(("platform", "strategy"), [("gpu", "ring"), ("tpu", "all_gather")])
def test_a_split_sequence_lies_over_all_devices(platform: str, strategy: str):
    device = dataclasses.replace(H100, platform=platform, count=8)
    (settings,) = benchmarking.plan("llama3.2-1b-64k-split", device, steps=5)
    config = pyconfig.load(["configs/base.yml", *(f"{k}={v}" for k, v in settings.items())])
    assert (config.context_parallelism, config.fsdp) == (8, 1)
    assert config.context_parallel_strategy == strategy
    assert config.per_device_batch_size * 8 == 1
    shards = mesh_axes.mesh_shape(config, 8)
    mesh_axes.check_batch(config, shards, 8)  # one sequence, which eight devices share


@pytest.mark.parametrize("name", benchmarking.BENCHMARKS)
def test_the_trainer_knows_every_setting(name: str):
    settings = benchmarking.plan(name, dataclasses.replace(H100, count=8), steps=5)[0]
    config = pyconfig.load(["configs/base.yml", *(f"{k}={v}" for k, v in settings.items())])
    assert config.dataset_type == "synthetic"
    assert config.dtype == "bfloat16"


def test_gpus_get_tuned_settings_and_others_the_plain_ones():
    tuned = benchmarking.plan("gpt2-124m", H100, steps=5)[0]
    plain = benchmarking.plan("gpt2-124m", V5E, steps=5)[0]
    assert (tuned["remat_policy"], tuned["scan_layers"]) == ("none", "false")
    assert (plain["remat_policy"], plain.get("scan_layers")) == ("minimal", None)


def test_a_cpu_takes_the_smallest_batch():
    (settings,) = benchmarking.plan("gpt2-124m", CPU, steps=5)
    assert (settings["per_device_batch_size"], settings["dtype"]) == (4, "float32")


def test_flags_follow_the_platform(monkeypatch: pytest.MonkeyPatch):
    one, eight = (
        platforms.performance_flags(dataclasses.replace(H100, count=n))["XLA_FLAGS"] for n in (1, 8)
    )
    assert one == "--xla_gpu_enable_latency_hiding_scheduler=true"
    assert "--xla_gpu_enable_pipelined_all_gather=true" in eight
    assert platforms.performance_flags(CPU) == {}
    assert platforms.performance_flags(dataclasses.replace(V5E, kind="TPU v4")) == {}
    assert platforms.performance_flags(dataclasses.replace(V5E, kind="TPU v6 lite")) == {
        "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=98304"
    }
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    environment = platforms.environment_of(H100)
    assert environment["XLA_FLAGS"] == f"{one} --mine"  # a later flag wins
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert environment["JAX_PLATFORMS"] == "cuda"  # a missing driver must not become a CPU run


@pytest.mark.full
def test_a_run_without_measured_steps_is_an_error(tmp_path: Path):
    status = _run(FAKE_TRAINER.replace('"steps": 3', '"steps": 0'), tmp_path).status
    assert status.startswith("failed: ")
    assert status.endswith("pass a larger --steps")


def test_an_unknown_config_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert benchmarking.main(["--platform=cpu", "--configs=llama3-9b"]) == 2
    assert "did you mean 'llama3-8b'?" in capsys.readouterr().err


@pytest.mark.full
def test_a_missing_accelerator_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    nowhere = {"JAX_PLATFORMS": "a_platform_that_no_machine_has"}
    monkeypatch.setattr(platforms, "platform_environment", lambda platform: nowhere)
    assert benchmarking.main(["--platform=gpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmark: JAX finds no gpu")
    assert is_told(error)


@pytest.mark.full
def test_the_tiny_config_runs_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XLA_FLAGS", "")
    arguments = ["--platform=cpu", "--configs=tiny", "--steps=6", f"--output={tmp_path}"]
    assert benchmarking.main(arguments) == 0
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert result["metrics"]["steps"] == 4  # two warm-up steps are kept out
    assert 0 < result["metrics"]["mfu"] <= result["metrics"]["hfu"]
    # the same numbers by hand from the metrics file
    steps = [json.loads(line) for line in (tmp_path / "tiny-b2.jsonl").read_text().splitlines()]
    measured = [step for step in steps if step["kind"] == "step"]
    seconds = sum(step["perf/step_time_seconds"] for step in measured)
    tflops = sum(step["perf/per_device_tflops"] for step in measured)
    assert result["metrics"]["tflops_per_sec_per_device"] == pytest.approx(tflops / seconds)
    for name in ("mfu", "hfu"):
        at_peak = sum(step[f"perf/{name}"] * step["perf/step_time_seconds"] for step in measured)
        assert result["metrics"][name] == pytest.approx(at_peak / seconds)
    assert "calibrated" in result["peak"]
    assert f"peak: {result['peak']}" in capsys.readouterr().out
