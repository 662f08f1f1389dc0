"""Kills one of two training processes at random moments: the other's last line, and a resume."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.promises import Promise
from tests.support.forked_trainer import ForkedTrainer

_SIZES = (
    "num_decoder_layers=1 emb_dim=32 mlp_dim=64 num_query_heads=2 num_kv_heads=1 head_dim=16 "
    "max_target_length=32 per_device_batch_size=2 peak_tflops_per_device=5 tensorboard_dir="
).split()
_HANG_SECONDS = 600.0
_STEPS_A_KILL = 20
# Long enough for several checkpoints, so that kills also hit one being written.
_LATEST_SECONDS = 1.0
# A survivor must name the dead process within this time.
SURVIVOR_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One killed process, and how the other ended.

    Attributes:
        victim: process number of the killed process.
        delay_seconds: from process 0's first step to the kill.
        survivor_seconds: from the kill to the end of the other process.
        exit_code: of the other process.
        last_line: the last line that the other process wrote to stderr.
        stderr: everything that it wrote there after the kill.
    """

    victim: int
    delay_seconds: float
    survivor_seconds: float
    exit_code: int
    last_line: str
    stderr: str


class ProcessPair:
    """Two training processes on one CPU device each, with pipes that are read to the end."""

    def __init__(self, folder: Path, *keys: str) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
        command = ["configs/base.yml", *_SIZES]
        command += [f"base_output_directory={folder}", "enable_checkpointing=true", *keys]
        command += [f"coordinator_address={address}", "num_processes=2"]
        self.processes = [ForkedTrainer([*command, f"process_id={i}"], env) for i in range(2)]
        self.errors: list[list[str]] = [[], []]
        self.first_step = threading.Event()
        self._readers = [
            threading.Thread(target=target, args=(i,))
            for i in range(2)
            for target in (self._read_output, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self, process: int) -> None:
        with self.processes[process].stdout as lines:
            for line in lines:
                if line.startswith("completed step: "):
                    self.first_step.set()

    def _read_errors(self, process: int) -> None:
        with self.processes[process].stderr as lines:
            self.errors[process] += lines

    def wait(self) -> list[int]:
        """The exit codes of both.

        Raises:
            subprocess.TimeoutExpired: one of them hangs.
        """
        try:
            return [process.wait(_HANG_SECONDS) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
            for reader in self._readers:
                reader.join()


def kill_one(folder: Path, *keys: str, victim: int, delay_seconds: float) -> Kill:
    """Starts or resumes both processes; kills `victim` that long after the first step."""
    pair = ProcessPair(folder, *keys)
    pair.first_step.wait(_HANG_SECONDS)
    time.sleep(delay_seconds)
    pair.processes[victim].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    codes = pair.wait()
    survivor = 1 - victim
    lines = [line for line in pair.errors[survivor] if not line.startswith("[Gloo]")]
    return Kill(
        victim=victim,
        delay_seconds=delay_seconds,
        survivor_seconds=time.monotonic() - begin,
        exit_code=codes[survivor],
        last_line=lines[-1].rstrip() if lines else "",
        stderr="".join(lines),
    )


def run_with_kills(
    folder: Path, kills: int, *, seed: int = 0
) -> tuple[list[Kill], list[tuple[int, float]]]:
    """Trains in two processes, killing each in turn at random moments; resumes and finishes.

    Returns:
        The kills, and the step and loss of every record of the whole run.
    """
    choices = random.Random(seed)
    keys = (f"steps={_STEPS_A_KILL * (kills + 1)}", "checkpoint_period=5")
    done = []
    for i in range(kills):
        delay = choices.uniform(0, _LATEST_SECONDS)
        done.append(kill_one(folder, *keys, victim=(i + seed) % 2, delay_seconds=delay))
    codes = ProcessPair(folder, *keys).wait()
    if codes != [0, 0]:
        raise RuntimeError(f"the last resume ended with {codes}")
    return done, read_losses(folder)


def read_losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every record of a run."""
    lines = (folder / "default" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["learning/loss"]) for record in records]


def promise(count: int, seed: int, folder: Path) -> Promise:
    """Kills either of two processes `count` times in one run."""
    row = Promise("SIGKILL of one of two processes, at a random moment")
    kills, killed = run_with_kills(folder / "killed", count, seed=seed)
    ProcessPair(folder / "whole", f"steps={len(killed)}").wait()
    for kill in kills:
        row.count += 1
        row.expect(
            f"process {kill.victim} of 2 died" in kill.last_line, f"last line {kill.last_line!r}"
        )
        row.expect(
            kill.survivor_seconds < SURVIVOR_SECONDS, f"{kill.survivor_seconds:.0f} s to the end"
        )
    row.expect(killed == read_losses(folder / "whole"), "other losses than without kills")
    slowest = max(kill.survivor_seconds for kill in kills)
    row.worst = f"steps since the last checkpoint; the other ended within {slowest:.1f} s"
    return row
