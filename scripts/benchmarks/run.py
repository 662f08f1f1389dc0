"""`python -m scripts.benchmarks.run --platform gpu`: standard configs on the attached devices.

Each config trains for a few steps in its own process (a TPU belongs to one process, and running out
of memory kills it); its metrics file is read back. ``scripts/benchmark_gpu.sh`` and
``scripts/benchmark_tpu.sh`` call this.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, nearest, one_line
from mfu_jax.planning.tune.attached_devices import AttachedDevices
from mfu_jax.planning.tune.evidence import OUT_OF_MEMORY
from mfu_jax.runs.report.setup import read_setup
from mfu_jax.trainer.planned.trial_run import run_totals
from mfu_jax.util.child_process import last_line, run_logged
from mfu_jax.util.formatting import columns
from scripts.benchmarks.baselines import Baseline, beside_pytorch, predicted
from scripts.benchmarks.configs import BENCHMARKS, STANDARD, Benchmark
from scripts.benchmarks.platforms import GIB, environment_of, performance_flags, probe

TRAINER = (sys.executable, "-m", "mfu_jax.train", "configs/base.yml")

# Weights, gradients and AdamW's two moments: four numbers per parameter, all in `weight_dtype`.
_STATE_BYTES_PER_PARAMETER = {"float32": 16, "bfloat16": 8}
_STATE_SHARE = 0.85  # of memory; the rest is for activations
_TOO_LARGE = "out of memory"


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """One row of the table; `status` is ``ok`` or the reason for missing numbers."""

    name: str
    status: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: Baseline = dataclasses.field(default_factory=Baseline)
    pytorch: Baseline = dataclasses.field(default_factory=Baseline)
    peak: str = ""
    log: str = ""


def plan(name: str, device: AttachedDevices, steps: int) -> list[dict[str, Any]]:
    """Trainer settings to try in turn, largest batch first; on GPUs, the tuned ones.

    Weights, gradients and moments are split over all devices, in float32 if they fit, otherwise in
    bfloat16.

    Raises:
        UserError: the training state does not fit even in bfloat16.
    """
    benchmark = BENCHMARKS[name]
    share = benchmark.parameters / device.count
    room = _STATE_SHARE * device.memory_bytes if device.memory_bytes else float("inf")
    fitting = [d for d, size in _STATE_BYTES_PER_PARAMETER.items() if share * size <= room]
    if not fitting:
        need = share * _STATE_BYTES_PER_PARAMETER["bfloat16"] / GIB
        raise UserError(
            f"does not fit: weights, gradients and AdamW in bfloat16 need {need:.1f} GiB a device "
            f"on {device.count}; the limit is {room / GIB:.1f} GiB, {_STATE_SHARE:.0%} of memory"
        )
    common = {
        "steps": steps,
        "dataset_type": "synthetic",
        "dtype": "float32" if device.platform == "cpu" else "bfloat16",
        "weight_dtype": fitting[0],
        **_mesh(benchmark, device),
        "enable_checkpointing": "false",
        "progress_bar": "false",
        "tensorboard_dir": "",
        **benchmark.settings,
    }
    if device.platform == "gpu" and benchmark.tuned:
        return [{**common, **keys} for keys in benchmark.tuned]
    # a larger batch does not make a CPU faster, and its memory is unknown here
    batches = benchmark.batches[-1:] if device.platform == "cpu" else benchmark.batches
    if benchmark.split_sequences:
        return [{**common, "per_device_batch_size": batch / device.count} for batch in batches]
    return [{**common, "per_device_batch_size": batch} for batch in batches]


def _mesh(benchmark: Benchmark, device: AttachedDevices) -> dict[str, Any]:
    """Keys of the one mesh axis over all devices; either choice splits the weights."""
    if not benchmark.split_sequences:
        return {"fsdp": device.count}
    # GPU kernels take whole sequences, and scores over all keys at once are too large.
    strategy = "ring" if device.platform == "gpu" and device.count > 1 else "all_gather"
    return {"context_parallelism": device.count, "context_parallel_strategy": strategy}


def run_benchmark(
    name: str,
    device: AttachedDevices,
    folder: Path,
    *,
    steps: int,
    timeout: float,
    trainer: Sequence[str] = TRAINER,
) -> BenchmarkResult:
    """Runs one config with ever smaller batches until it fits, and reads back its metrics."""
    try:
        attempts = plan(name, device, steps)
    except UserError as reason:
        return BenchmarkResult(name=name, status=str(reason))
    log = folder / f"{name}.log"
    for number, settings in enumerate(attempts):
        run_name = f"{name}-b{settings['per_device_batch_size']}" + f"-{number}" * bool(number)
        metrics_file = folder / f"{run_name}.jsonl"
        keys = {
            **settings,
            "run_name": run_name,
            "base_output_directory": folder,
            "metrics_file": metrics_file,
        }
        command = [*trainer, *(f"{key}={value}" for key, value in keys.items())]
        status = _train(command, environment_of(device), log, timeout)
        if status != _TOO_LARGE:
            break
    else:
        status = f"{_TOO_LARGE} even with batch {settings['per_device_batch_size']}"
    result = BenchmarkResult(name=name, status=status, settings=settings, log=str(log))
    if status != "ok":
        return result
    metrics = run_totals(metrics_file)
    if not metrics["steps"]:
        why = f"{metrics_file} has no measured step after compilation and warm-up"
        return dataclasses.replace(result, status=f"failed: {why}; pass a larger --steps")
    peak = read_setup(str(metrics_file)).values.get("peak of one device", "")
    return dataclasses.replace(result, metrics=metrics, peak=str(peak))


def _train(command: Sequence[str], environment: dict[str, str], log: Path, timeout: float) -> str:
    """Runs the trainer; returns ``ok``, ``out of memory``, or what went wrong."""
    log.write_text(f"$ {' '.join(command)}\n", encoding="utf-8")
    # unbuffered: the last line of the log is then the last that the child wrote
    code = run_logged(command, {**environment, "PYTHONUNBUFFERED": "1"}, log, timeout)
    if code is None:
        return f"not finished after {timeout:.0f} s"
    if code == 0:
        return "ok"
    text = log.read_text(encoding="utf-8", errors="replace")
    if OUT_OF_MEMORY.search(text):
        return _TOO_LARGE
    return f"failed with exit code {code}: {last_line(text)[:200]}"


_COLUMNS: Mapping[str, Callable[[BenchmarkResult], str]] = {
    "config": lambda r: r.name,
    "batch": lambda r: str(r.settings.get("per_device_batch_size", "")),
    "tokens": lambda r: str(r.settings.get("max_target_length", "")),
    "weights": lambda r: str(r.settings.get("weight_dtype", "")),
    "remat": lambda r: str(r.settings.get("remat_policy", "")),
    "step s": lambda r: _number(r.metrics, "median_seconds", ".4f"),
    "p90 s": lambda r: _number(r.metrics, "p90_seconds", ".4f"),
    "TFLOP/s/device": lambda r: _number(r.metrics, "tflops_per_sec_per_device", ".4g"),
    "tokens/s/device": lambda r: _number(r.metrics, "tokens_per_sec_per_device", ".1f"),
    "MFU": lambda r: _number(r.metrics, "mfu", ".2%"),
    "HFU": lambda r: _number(r.metrics, "hfu", ".2%"),
    "peak GiB": lambda r: _number(r.metrics, "peak_memory_bytes", ".1f", 1 / GIB),
    "planned s": lambda r: _number(r.plan.values, "step_time_seconds", ".4f"),
    "planned GiB": lambda r: _number(r.plan.values, "memory_peak_bytes", ".1f", 1 / GIB),
    "PyTorch s": lambda r: _number(r.pytorch.values, "median_seconds", ".4f"),
    "its tokens/s": lambda r: _number(r.pytorch.values, "tokens_per_sec", ".1f"),
    "its MFU": lambda r: _pytorch_mfu(r),
    "its GiB": lambda r: _number(r.pytorch.values, "peak_memory_bytes", ".1f", 1 / GIB),
}


def _pytorch_mfu(result: BenchmarkResult) -> str:
    """MFU at PyTorch's tokens per second, with the same model FLOPs and the same peak."""
    theirs = result.pytorch.values.get("tokens_per_sec")
    ours = result.metrics.get("tokens_per_sec_per_device")
    return format(result.metrics["mfu"] * theirs / ours, ".2%") if theirs and ours else "-"


def _variants(result: BenchmarkResult) -> str:
    """PyTorch's variants in words: which was the fastest, what the others reached."""
    told = {
        name: f"{one['tokens_per_sec']:.0f} tokens/s, batch {one['batch']}"
        if isinstance(one, Mapping)
        else one
        for name, one in result.pytorch.values["variants"].items()
    }
    words = "; ".join(f"{name}: {said}" for name, said in told.items())
    return f"{result.name}: PyTorch's best is {result.pytorch.values['variant']} ({words})"


def _number(values: Mapping[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    value = values.get(name)
    return format(value * scale, form) if value else "-"


def render(results: Sequence[BenchmarkResult]) -> str:
    """The table, then one line with the reason for each config without numbers."""
    done = [r for r in results if r.status == "ok"]
    cells = [list(_COLUMNS)] * bool(done)
    cells += [[column(r) for column in _COLUMNS.values()] for r in done]
    lines = columns(cells, ">")
    lines += [f"peak: {peak}" for peak in dict.fromkeys(r.peak for r in done if r.peak)]
    lines += [
        f"{r.name}: {r.status}" + (f" (log: {r.log})" if r.log else "")
        for r in results
        if r.status != "ok"
    ]
    lines += [f"{r.name}: no prediction: {r.plan.why}" for r in done if r.plan.why]
    lines += [f"{r.name}: no PyTorch: {r.pytorch.why}" for r in done if r.pytorch.why]
    lines += [_variants(r) for r in done if "variants" in r.pytorch.values]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the configs in turn, prints the table, writes ``results.json``.

    Returns:
        0; 1 if a config failed or none gave numbers; 2 for wrong input.
    """
    parser = argparse.ArgumentParser(prog="scripts.benchmarks.run", description=__doc__)
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), default="cpu")
    parser.add_argument("--configs", default=",".join(STANDARD), help=", ".join(BENCHMARKS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--budget", type=float, default=86400, help="seconds for all runs")
    parser.add_argument("--tiny", action="store_true", help="a trial of everything on a CPU")
    parser.add_argument("--output", type=Path, help="folder; default: output/benchmark-…")
    options = parser.parse_args(argv)
    if options.tiny:
        options.platform, options.configs, options.steps = "cpu", "tiny", 6
    try:
        return _main(options)
    except UserError as error:
        print(one_line(f"benchmark: {error}"), file=sys.stderr)
        return 2


def _main(options: argparse.Namespace) -> int:
    names = [name for name in options.configs.split(",") if name]
    for name in names:
        if name not in BENCHMARKS:
            raise UserError(
                f"unknown config {name!r}; expected some of {', '.join(BENCHMARKS)}",
                hint=nearest(name, BENCHMARKS),
            )
    if options.steps < 1 or not options.timeout > 0:
        raise UserError(
            f"--steps={options.steps} --timeout={options.timeout:g}: expected at least one step "
            "and a time above 0"
        )
    device = probe(options.platform)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = (options.output or Path("output") / f"benchmark-{options.platform}-{stamp}").resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output={str(folder)!r} cannot be created ({error.strerror}); pass another"
        ) from None
    print(f"{device}, jax {metadata.version('jax')}", flush=True)
    deadline = time.monotonic() + options.budget
    results = []
    for name in names:
        left = min(options.timeout, deadline - time.monotonic())
        if left <= 0:
            results.append(BenchmarkResult(name=name, status="not started: no time left"))
            continue
        print(f"{name} …", flush=True)
        result = run_benchmark(name, device, folder, steps=options.steps, timeout=left)
        if result.status == "ok":
            left = min(options.timeout, deadline - time.monotonic())
            with ThreadPoolExecutor(1) as beside:  # a plan takes no device
                plan = beside.submit(predicted, result.settings, device, timeout=left)
                pytorch = beside_pytorch(
                    result.settings, device, timeout=left, is_trial=options.tiny
                )
                result = dataclasses.replace(result, plan=plan.result(), pytorch=pytorch)
        results.append(result)
        if len(names) > 1:
            print(render([result]), flush=True)
    report = {
        "device": dataclasses.asdict(device),
        "environment": performance_flags(device),
        "results": [dataclasses.asdict(result) for result in results],
    }
    path = folder / "results.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    print(render(results))
    print(f"results: {path}")
    wrong = any(r.status.startswith(("failed", "not finished")) for r in results)
    return 1 if wrong or not any(r.status == "ok" for r in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
