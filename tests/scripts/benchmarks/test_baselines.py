"""What stands beside a benchmark run; stand-ins print what the commands would."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.targets import parse_target
from mfu_jax.planning.tune.attached_devices import AttachedDevices
from mfu_jax.trainer.config import pyconfig
from scripts.benchmarks import run as benchmarking
from scripts.benchmarks.baselines import Baseline, beside_pytorch, predicted
from scripts.benchmarks.configs import BENCHMARKS
from tests.scripts.benchmarks.test_run import CPU, H100, V5E
from tests.support.work import HANG_SECONDS

V5P = dataclasses.replace(V5E, kind="TPU v5p", count=4)
IRONWOOD = dataclasses.replace(V5E, kind="TPU7x", count=8)


def _stand_in(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


@pytest.mark.parametrize(
    ("device", "target"),
    [
        (H100, {"hardware": "h100", "devices": 1}),
        (dataclasses.replace(V5E, count=8), {"topology": "v5e-8"}),
        (V5P, {"topology": "v5p-8"}),  # slices are named by TensorCores, two a chip
        (IRONWOOD, {"topology": "tpu7x-8"}),  # a device is a core here
    ],
)
def test_a_run_is_planned_for_its_own_devices(
    device: AttachedDevices, target: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def plan(source: Any, chips: Any, values: Any, **options: Any) -> Plan:
        asked.append((chips, values, options["flags"]))
        return Plan(target="", chips=1, fits=True, step_time_seconds=0.5)

    monkeypatch.setattr("scripts.benchmarks.baselines.compiled_plan", plan)
    found = predicted({"fsdp": device.count}, device, timeout=HANG_SECONDS)
    ((chips, values, flags),) = asked
    assert (chips, values) == (parse_target(**target), {"fsdp": str(device.count)})
    assert bool(flags) == (device.platform == "gpu" or device.count > 1)
    assert all(flag.startswith("--xla") for flag in flags)
    assert found.values["step_time_seconds"] == 0.5
    assert "notes" not in found.values


@pytest.mark.full
def test_what_is_missing_is_said() -> None:
    assert predicted({}, CPU, timeout=1).why == "no plans are made for 1 × cpu"
    wrong = predicted({"model_name": "llama9"}, H100, timeout=HANG_SECONDS)
    assert "llama9" in wrong.why
    failing = _stand_in("import sys; print('warning', file=sys.stderr); sys.exit('no torch')")
    assert beside_pytorch({}, H100, timeout=HANG_SECONDS, program=failing).why == "no torch"
    assert beside_pytorch({}, V5E, timeout=1).why == "PyTorch runs beside GPUs only"
    two = dataclasses.replace(H100, count=2)
    assert beside_pytorch({}, two, timeout=1).why == "PyTorch runs on one GPU; here are 2"
    slow = beside_pytorch({}, H100, timeout=0.2, program=_stand_in("import time; time.sleep(60)"))
    assert slow.why == "not finished after 0 s; not started: no time left"


# Stands in for PyTorch: without recomputation Hugging Face's model needs half of the batch.
PYTORCH = """
import json, sys
keys = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
again, is_hf = keys["remat_policy"] == "full", "--hf" in sys.argv
assert keys["num_vocab_tiling"] == "1"
batch = 8 if again or not is_hf else 4
print(json.dumps({"batch": batch, "median_seconds": 1.0, "peak_memory_bytes": 1,
                  "tokens_per_sec": 100 * batch + 50 * is_hf - 10 * again}))
"""


@pytest.mark.full
def test_the_fastest_pytorch_is_shown_and_recomputes_only_where_the_batch_was_too_large() -> None:
    settings = {"per_device_batch_size": 8, "num_vocab_tiling": 8, "remat_policy": "none"}
    program = _stand_in(PYTORCH)
    best = beside_pytorch(settings, H100, timeout=HANG_SECONDS, program=program)
    assert (best.values["variant"], best.values["tokens_per_sec"]) == ("hf, remat full", 840)
    assert set(best.values["variants"]) == {"dense, remat none", "hf, remat none", "hf, remat full"}
    result = benchmarking.BenchmarkResult(name="gpt2-124m", status="ok", pytorch=best)
    assert (
        "gpt2-124m: PyTorch's best is hf, remat full (dense, remat none: 800 tokens/s, batch 8; "
        "hf, remat none: 450 tokens/s, batch 4; hf, remat full: 840 tokens/s, batch 8)"
    ) in benchmarking.render([result])


def test_a_run_starts_nothing_once_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarking, "probe", lambda platform: H100)
    assert benchmarking.main(["--platform=gpu", "--budget=0", f"--output={tmp_path}"]) == 1
    assert "gpt2-124m: not started: no time left" in capsys.readouterr().out


def test_the_table_has_the_plan_and_pytorchs_mfu_in_the_same_flops() -> None:
    result = benchmarking.BenchmarkResult(
        name="llama3-8b",
        status="ok",
        metrics={"median_seconds": 0.6, "mfu": 0.5, "tokens_per_sec_per_device": 1000.0},
        plan=Baseline(values={"step_time_seconds": 0.55, "memory_peak_bytes": 3 * 2**30}),
        pytorch=Baseline(values={"median_seconds": 0.75, "tokens_per_sec": 800.0}),
    )
    table = benchmarking.render([result]).splitlines()
    for cell in ("0.5500", "3.0", "0.7500", "800.0", "40.00%"):  # 0.5 · 800 / 1000
        assert cell in table[1].split()
    missing = dataclasses.replace(result, plan=Baseline(why="no compiler"), pytorch=Baseline())
    assert "llama3-8b: no prediction: no compiler" in benchmarking.render([missing])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    settings = [f"{key}={value}" for key, value in BENCHMARKS[name].settings.items()]
    counted = count_parameters(pyconfig.load(["configs/base.yml", *settings])).total
    assert counted == pytest.approx(BENCHMARKS[name].parameters, rel=0.01)


def test_results_are_json() -> None:
    result = benchmarking.BenchmarkResult(
        name="tiny", status="ok", plan=Baseline(values={"fits": True})
    )
    assert json.loads(json.dumps(dataclasses.asdict(result)))["plan"]["values"] == {"fits": True}
