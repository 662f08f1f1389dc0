"""A few steps of the trainer in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.planning.tune.evidence import OUT_OF_MEMORY, Trial, unmeasured
from mfu_jax.util.child_process import child_environment, last_line, run_logged
from mfu_jax.util.yaml_files import read_mapping

WARMUP_STEPS = 2


def trial_run(
    words: Sequence[str],
    flags: Mapping[str, str],
    *,
    platform: str,
    devices_per_chip: int,
    steps: int,
    seconds: float,
) -> Trial:
    """Trains for a few steps in a child process.

    Args:
        words: the trainer's arguments.
        flags: compiler flags, name → value.
        platform: tpu, gpu or cpu.
        devices_per_chip: JAX devices in a chip.
        steps: measured ones, after two for warming up.
        seconds: wall-clock limit.

    Returns:
        What was measured: the median of the steps' times; or that memory ran out, which is an
        answer; or that it failed, with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="mfu-jax-tune-") as folder:
        tables = read_mapping(Path(__file__).with_suffix(".yml"))
        own = {
            **tables["never"],
            "run_name": "trial",
            "base_output_directory": folder,
            "steps": str(steps + WARMUP_STEPS),
            "warmup_steps": str(WARMUP_STEPS),
        }
        given = {word.partition("=")[0] for word in words}
        quiet = {key: text for key, text in tables["quiet"].items() if key not in given}
        keys = [f"{key}={text}" for key, text in {**quiet, **own}.items()]
        log = Path(folder, "log")
        command = [sys.executable, "-u", "-m", "mfu_jax.train", *words, *keys]
        variables = child_environment(**environment(flags, platform))
        code = run_logged(command, variables, log, seconds)
        said = log.read_text(encoding="utf-8", errors="replace")
        metrics = Path(folder, "trial", "metrics.jsonl")
        if code == 0:
            return _measured(metrics, devices_per_chip)
    if code == -signal.SIGKILL or OUT_OF_MEMORY.search(said):
        return unmeasured("ran out of memory")
    why = f"not finished after {seconds:.0f} s" if code is None else f"exit code {code}"
    return unmeasured(": ".join(filter(None, [why, last_line(said)])))


def environment(flags: Mapping[str, str], platform: str) -> dict[str, str]:
    """The variables of a run with these compiler flags, beside the user's own."""
    if not flags:
        return {}
    name = flags_variable(platform)
    text = " ".join(f"{key}={value}" for key, value in flags.items())
    return {name: f"{os.environ.get(name, '')} {text}".strip()}  # XLA uses the last of two


def flags_variable(platform: str) -> str:
    """The environment variable in which a platform's compiler finds its flags."""
    return "LIBTPU_INIT_ARGS" if platform == "tpu" else "XLA_FLAGS"


def run_totals(metrics: Path) -> dict[str, Any]:
    """The totals of a finished run, and the largest of its steps' ``memory/peak_bytes_in_use``."""
    totals = json.loads(metrics.with_name(f"{metrics.name}.summary.json").read_text())
    peaks = [0.0]
    for line in metrics.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            peaks.append(json.loads(line).get("memory/peak_bytes_in_use") or 0.0)
    return {**totals, "peak_memory_bytes": max(peaks)}


def _measured(metrics: Path, devices_per_chip: int) -> Trial:
    totals = run_totals(metrics)
    seconds, mean = totals["median_seconds"], totals["mean_seconds"]
    if not seconds:
        return unmeasured("no step was measured")
    rate, mfu = totals["tokens_per_sec_per_device"], totals["mfu"]
    return Trial(
        by="run",
        source="measured",
        fits=True,
        memory_peak_bytes=round(totals["peak_memory_bytes"]) or None,
        step_time_seconds=seconds,
        # the totals' rates are those of the mean step
        tokens_per_sec_per_chip=None if rate is None else rate * mean / seconds * devices_per_chip,
        mfu=None if mfu is None else mfu * mean / seconds,
    )
