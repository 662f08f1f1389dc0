"""SIGKILL of the reference trainer: in training, in a checkpoint, in a resume, one of two.

Every run is then restarted and must reproduce the losses of an uninterrupted run bitwise.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.campaigns.children import Child, fork
from tests.campaigns.promises import Promise
from tests.support.trainer_process import SIZES

STEPS = 30
PERIOD = 6  # steps between two checkpoints
MODEL = (
    *SIZES,
    "enable_checkpointing=true",
    f"checkpoint_period={PERIOD}",
    f"steps={STEPS}",
)
_START_SECONDS = 180.0


class KilledTrainer:
    """Trainer runs in one folder.

    Args:
        folder: for everything that they write; its siblings share the compilation cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> Child:
        """Starts or resumes the run."""
        keys = [*MODEL, f"base_output_directory={self.folder}"]
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return fork(_trainer(keys), self.folder / "out", environment)

    def steps(self) -> list[int]:
        """The steps in the metrics file."""
        return [int(line["step"]) for line in self._lines()]

    def losses(self) -> list[float]:
        """The losses in the metrics file."""
        return [line["learning/loss"] for line in self._lines()]

    def text(self) -> str:
        """The output of its processes."""
        return (self.folder / "out").read_text(encoding="utf-8", errors="replace")

    def _lines(self) -> Iterator[dict[str, float]]:
        path = self.folder / "default" / "metrics.jsonl"
        if path.exists():
            text = path.read_text()
            yield from (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines())

    def checkpoints(self) -> list[str]:
        """The names in the checkpoint folder, unfinished ones included."""
        folder = self.folder / "default" / "checkpoints"
        return [path.name for path in folder.iterdir()] if folder.exists() else []


def _trainer(keys: list[str]) -> Callable[[], int]:
    def run() -> int:
        from mfu_jax import train

        return train.main(["configs/base.yml", *keys])

    return run


def rows(counts: Mapping[str, int], seed: int, folder: Path) -> list[Promise]:
    """One row per kind: ``training``, ``checkpoint``, ``resume``."""
    chance = random.Random(seed)
    straight = KilledTrainer(folder / "straight")
    child = straight.start()
    assert child.wait(_START_SECONDS) == 0, child.text()
    wanted = straight.losses()
    made = []
    for kind, count in counts.items():
        row = Promise(_KINDS[kind][0])
        lost = [
            _one(row, KilledTrainer(folder / f"{kind}{number}"), kind, chance, wanted)
            for number in range(count)
        ]
        row.worst = f"{max(lost, default=0)} steps to train again, no metrics"
        made.append(row)
    return made


def _one(
    row: Promise, job: KilledTrainer, kind: str, chance: random.Random, wanted: list[float]
) -> int:
    """One kill and its resume; returns how many steps had to be repeated."""
    pause = _KINDS[kind][2]
    while (is_hit := _kill(job, kind, chance.uniform(0.0, pause))) is False:
        pause /= 2  # the run was over before: try another
        job = KilledTrainer(job.folder.with_name(f"{job.folder.name}again"))
    if is_hit is None:
        row.expect(False, f"{job.folder.name} did not get there: {job.text()[-300:]}")
        return 0
    row.count += 1
    done = job.steps()
    row.expect(done == list(range(len(done))), f"{job.folder.name} has a gap or a double step")
    saved = max((int(n) for n in job.checkpoints() if n.isdigit()), default=0)

    child = job.start()
    code = child.wait(_START_SECONDS)
    row.expect(code == 0, f"{job.folder.name} did not resume: {code}: {child.text()[-300:]}")
    row.expect(job.steps() == list(range(STEPS)), f"{job.folder.name}: steps after the resume")
    row.expect(job.losses() == wanted, f"{job.folder.name}: other losses after the resume")
    return max(0, len(done) - saved)


def _kill(job: KilledTrainer, kind: str, delay_seconds: float) -> bool | None:
    """Kills a run after its moment and the delay; False: it ended before, None: it never came."""
    child = job.start()
    if kind == "resume":
        child.wait_until(lambda: any(n.isdigit() for n in job.checkpoints()), _START_SECONDS)
        child.kill()
        child = job.start()
    if not child.wait_until(lambda: _KINDS[kind][1](job), _START_SECONDS):
        return False if child.poll() == 0 else None
    time.sleep(delay_seconds)
    child.kill()
    return child.poll() == -signal.SIGKILL


_KINDS: dict[str, tuple[str, Callable[[KilledTrainer], bool], float]] = {
    "training": ("SIGKILL of the trainer in training", lambda job: bool(job.steps()), 1.0),
    "checkpoint": (
        "SIGKILL of the trainer while it saves a checkpoint",
        lambda job: any(not name.isdigit() for name in job.checkpoints()),
        0.05,
    ),
    "resume": ("SIGKILL of the trainer while it resumes", lambda job: True, 2.0),
}
