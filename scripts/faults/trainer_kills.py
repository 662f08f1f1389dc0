"""SIGKILL of the reference trainer: in training, in a checkpoint, in a resume, one of two.

Every run is started again afterwards and has to give the losses of an uninterrupted run, bitwise.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.faults.processes import Child, fork
from scripts.faults.rows import Row

STEPS = 30
PERIOD = 6  # steps between two checkpoints
MODEL = (
    "num_decoder_layers=1",
    "emb_dim=32",
    "mlp_dim=64",
    "num_query_heads=2",
    "num_kv_heads=1",
    "head_dim=16",
    "max_target_length=32",
    "peak_tflops_per_device=5",
    "enable_checkpointing=true",
    f"checkpoint_period={PERIOD}",
    f"steps={STEPS}",
)
# A survivor has to name the dead process within this time.
SURVIVOR_SECONDS = 30.0
_START_SECONDS = 180.0


class Job:
    """Trainer runs in one folder.

    Args:
        folder: of everything that they write; the compilation cache is shared by its siblings.
        processes: how many processes a run has.
    """

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.folder = folder
        self.processes = processes
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> list[Child]:
        """Starts all processes of a run."""
        keys = [*MODEL, f"base_output_directory={self.folder}", "per_device_batch_size=4"]
        if self.processes > 1:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            keys[-1] = f"per_device_batch_size={4 // self.processes}"
            keys += [f"coordinator_address=localhost:{port}", f"num_processes={self.processes}"]
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return [
            fork(_trainer([*keys, f"process_id={i}"]), self.folder / f"out{i}", environment)
            for i in range(self.processes)
        ]

    def steps(self) -> list[int]:
        """The steps of the metrics file."""
        return [int(line["step"]) for line in self._lines()]

    def losses(self) -> list[float]:
        """Their losses."""
        return [line["learning/loss"] for line in self._lines()]

    def _lines(self) -> Iterator[dict[str, float]]:
        path = self.folder / "default" / "metrics.jsonl"
        if path.exists():
            text = path.read_text()
            yield from (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines())

    def checkpoints(self) -> list[str]:
        """The names in the folder of checkpoints, unfinished ones included."""
        folder = self.folder / "default" / "checkpoints"
        return [path.name for path in folder.iterdir()] if folder.exists() else []


def _trainer(keys: list[str]) -> Callable[[], int]:
    def run() -> int:
        from mfu_jax import train

        return train.main(["configs/base.yml", *keys])

    return run


def rows(counts: dict[str, int], seed: int, folder: Path) -> list[Row]:
    """One row for each kind: ``training``, ``checkpoint``, ``resume``, ``two``."""
    chance = random.Random(seed)
    wanted: dict[int, list[float]] = {}
    for processes in {1, *([2] if counts.get("two") else [])}:
        job = Job(folder / f"straight{processes}", processes)
        codes = [child.wait(_START_SECONDS) for child in job.start()]
        assert codes == [0] * processes, (job.folder / "out0").read_text()
        wanted[processes] = job.losses()
    made = []
    for kind, count in counts.items():
        row = Row(_KINDS[kind][0])
        lost = []
        for number in range(count):
            job = Job(folder / f"{kind}{number}", 2 if kind == "two" else 1)
            lost.append(_one(row, job, kind, chance, wanted[job.processes]))
        row.lost = f"{max(lost, default=0)} steps to train again, no metrics"
        made.append(row)
    return made


def _one(row: Row, job: Job, kind: str, chance: random.Random, wanted: list[float]) -> int:
    """One kill and its resume; returns how many steps had to be trained again."""
    children = job.start()
    until, pause = _KINDS[kind][1:]
    if kind == "resume":
        children[0].wait_until(lambda: any(n.isdigit() for n in job.checkpoints()), _START_SECONDS)
        children[0].kill()
        children = job.start()
    if not children[0].wait_until(lambda: until(job), _START_SECONDS):
        row.expect(False, f"{job.folder.name} did not get there: {children[0].text()[-300:]}")
        return 0
    time.sleep(chance.uniform(0.0, pause))
    victim = chance.randrange(len(children))
    finished = children[victim].poll() is not None
    children[victim].kill()
    row.count += 1
    for index, child in enumerate(children):
        if index != victim and not finished:
            _check_survivor(row, job, child, victim)
    done = job.steps()
    row.expect(done == list(range(len(done))), f"{job.folder.name} has a gap or a double step")
    saved = max((int(n) for n in job.checkpoints() if n.isdigit()), default=0)

    codes = [child.wait(_START_SECONDS) for child in job.start()]
    row.expect(
        codes == [0] * job.processes, f"{job.folder.name} did not resume: exit codes {codes}"
    )
    row.expect(job.steps() == list(range(STEPS)), f"{job.folder.name}: steps after the resume")
    row.expect(job.losses() == wanted, f"{job.folder.name}: other losses after the resume")
    return max(0, len(done) - saved)


def _check_survivor(row: Row, job: Job, child: Child, victim: int) -> None:
    code = child.wait(SURVIVOR_SECONDS)
    lines = child.text().strip().splitlines()
    name = job.folder.name
    row.expect(code is not None, f"{name}: the survivor runs on after {SURVIVOR_SECONDS:.0f} s")
    row.expect(
        lines and f"process {victim}" in lines[-1], f"{name}: last line {lines[-1:]}, code {code}"
    )
    child.kill()


_KINDS: dict[str, tuple[str, Callable[[Job], bool], float]] = {
    "training": ("SIGKILL of the trainer in training", lambda job: bool(job.steps()), 1.0),
    "checkpoint": (
        "SIGKILL of the trainer while it saves a checkpoint",
        lambda job: any(not name.isdigit() for name in job.checkpoints()),
        0.05,
    ),
    "resume": ("SIGKILL of the trainer while it resumes", lambda job: True, 2.0),
    "two": ("SIGKILL of one of two processes", lambda job: bool(job.steps()), 1.5),
}
