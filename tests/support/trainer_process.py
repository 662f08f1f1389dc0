"""The trainer as its user starts it: one process or several, and the metrics that they leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.forked_trainer import ForkedTrainer
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS

SIZES = (
    "num_decoder_layers=1",
    "emb_dim=32",
    "mlp_dim=64",
    "num_query_heads=2",
    "num_kv_heads=1",
    "head_dim=16",
    "max_target_length=32",
    "per_device_batch_size=4",
    "peak_tflops_per_device=5",
)
TINY = ["configs/base.yml", *SIZES, "tensorboard_dir="]


def one_device() -> dict[str, str]:
    """The environment of a trainer on one CPU device, whose machine code is not optimised."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


def start(folder: Path, *arguments: str) -> ForkedTrainer:
    return ForkedTrainer([*TINY, f"base_output_directory={folder}", *arguments], one_device())


def start_anew(folder: Path, *arguments: str, wrapper: Sequence[str] = ()) -> tuple[int, str, str]:
    """As its user starts it, imports and all: the exit code and texts of the command."""
    command = [sys.executable, "-m", "mfu_jax.train", *TINY, f"base_output_directory={folder}"]
    done = subprocess.run(
        [*wrapper, *command, *arguments],
        cwd=ROOT,
        env=one_device(),
        text=True,
        capture_output=True,
        timeout=HANG_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def send_after(process: ForkedTrainer, step: int, signum: int) -> None:
    for line in process.stdout:
        if line.startswith(f"completed step: {step},"):
            process.send_signal(signum)
            return


def run(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, out, err


def records(folder: Path, name: str = "default") -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path, name: str = "default") -> list[float]:
    return [record["learning/loss"] for record in records(folder, name)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start_job(folder: Path, count: int, *keys: str) -> list[ForkedTrainer]:
    job = (*keys, f"coordinator_address=localhost:{free_port()}", f"num_processes={count}")
    return [start(folder, *job, f"process_id={i}") for i in range(count)]


def by_step(folder: Path, name: str = "default") -> dict[int, float]:
    return {record["step"]: record["learning/loss"] for record in records(folder, name)}
