"""Comparisons for a benchmark run: a plan's prediction, and PyTorch's best on the same device.

They compile and run in processes of their own, after the trainer has released the device. Where one
is missing, the reason takes its place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mfu_jax.errors import UserError, first_line
from mfu_jax.planning.compilation import cache
from mfu_jax.planning.compilation.compiling import Limits, compiler_flags
from mfu_jax.planning.step_sources import compiled_plan
from mfu_jax.planning.tune.attached_devices import AttachedDevices
from mfu_jax.trainer.planned.planned_step import TrainerStep
from mfu_jax.util.child_process import last_line
from scripts.benchmarks.platforms import performance_flags

_PYTORCH = (sys.executable, "-m", "scripts.comparisons.pytorch_step")
_PLANNED = ("step_time_seconds", "mfu", "hfu", "memory_peak_bytes", "fits")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One comparison.

    Attributes:
        values: its numbers; empty if there are none.
        why: the reason for having none.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def predicted(settings: Mapping[str, Any], device: AttachedDevices, *, timeout: float) -> Baseline:
    """The plan of a run, with the run's own compiler flags.

    Args:
        settings: the trainer's keys.
        device: the device that ran it.
        timeout: seconds.
    """
    if (target := device.target()) is None:
        return Baseline(why=f"no plans are made for {device}")
    flags = [text for text in performance_flags(device).values() if text.startswith("--")]
    try:
        plan = compiled_plan(
            TrainerStep(target),
            target,
            {key: str(value) for key, value in settings.items()},
            limits=Limits(seconds=timeout),
            folder=cache.default_folder(),
            flags=compiler_flags(" ".join(flags)),
        )
    except UserError as error:
        return Baseline(why=first_line(error))
    return Baseline(values={name: getattr(plan, name) for name in _PLANNED})


def beside_pytorch(
    settings: Mapping[str, Any],
    device: AttachedDevices,
    *,
    timeout: float,
    is_trial: bool = False,
    program: Sequence[str] = _PYTORCH,
) -> Baseline:
    """The fastest of PyTorch's variants of the same model, compiled, on one GPU.

    They are a dense step of our own and Hugging Face's model; each first without recomputation,
    with the trainer's batch or the largest half of it that fits, and if that is a smaller one, also
    with recomputation.

    Args:
        settings: the trainer's keys.
        device: the device that ran it.
        timeout: seconds for all.
        is_trial: whether a CPU will do.
        program: the command.
    """
    if device.platform != "gpu" and not is_trial:
        return Baseline(why="PyTorch runs beside GPUs only")
    if device.count > 1:
        return Baseline(why=f"PyTorch runs on one GPU; here are {device.count}")
    keys = {**settings, "num_vocab_tiling": 1}  # which PyTorch would pay for by recomputation
    deadline = time.monotonic() + timeout
    found: dict[str, Baseline] = {}
    for model in ("dense", "hf"):
        for policy in ("none", "full"):
            before = found.get(f"{model}, remat none")
            if before and before.values.get("batch") == settings.get("per_device_batch_size"):
                continue  # recomputation only ever adds work
            words = [f"{key}={value}" for key, value in {**keys, "remat_policy": policy}.items()]
            flags = ["--hf"] * (model == "hf") + ["--cpu"] * (device.platform == "cpu")
            left = deadline - time.monotonic()
            made = _json_of([*program, *words, *flags], left)
            found[f"{model}, remat {policy}"] = made
    return _fastest(found)


def _fastest(found: Mapping[str, Baseline]) -> Baseline:
    """The variant with the most tokens per second; the others under ``variants``."""
    variants = {name: one.values or one.why for name, one in found.items()}
    timed = [(one.values["tokens_per_sec"], name) for name, one in found.items() if one.values]
    if not timed:
        return Baseline(why="; ".join(dict.fromkeys(one.why for one in found.values())))
    best = max(timed)[1]
    return Baseline(values={**found[best].values, "variant": best, "variants": variants})


def _json_of(command: Sequence[str], timeout: float) -> Baseline:
    """A command's output, or the last line of its errors."""
    if timeout <= 0:
        return Baseline(why="not started: no time left")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Baseline(why=f"not finished after {timeout:.0f} s")
    if done.returncode == 0 and done.stdout.strip():
        return Baseline(values=json.loads(done.stdout[done.stdout.index("{") :]))
    return Baseline(why=last_line(done.stderr)[:300] or f"exit code {done.returncode}")
