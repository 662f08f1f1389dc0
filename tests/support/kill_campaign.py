"""Kills a training job again and again, and compares the report with what the killer saw.

    python -m tests.support.kill_campaign kills=50 kind=trainer seed=0

The truth is in marks that the job writes itself, beside all loggers, and in the killer's own log of
starts, kills and ends. Kinds: ``loop``, a loop around a `MetricLogger`; ``pair``, two processes of
such a loop, killed together; ``trainer``, the reference trainer; ``trainers``, a job of two of its
processes, killed together.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfu_jax.arguments import parse
from mfu_jax.logger.journal.writer import Journal
from mfu_jax.runs.goodput import read_run
from mfu_jax.runs.run_time import CATEGORIES
from mfu_jax.trainer.early_journal import start_journal
from mfu_jax.trainer.pyconfig import load
from scripts.faults.processes import Child, fork
from tests.support.kill_truth import Marks, Seen, truth_of

CHECKPOINT_EVERY, EVAL_EVERY = 20, 30
STEP_SECONDS, EVAL_SECONDS, SAVE_SECONDS, RESTORE_SECONDS = 0.02, 0.1, 0.06, 0.05
DOWN_SECONDS = 0.3
_END_SECONDS = 300.0
_MOST_UNSEEN = 15


class Campaign:
    """One job in one folder.

    Args:
        folder: of everything that it writes.
        kind: ``loop``, ``pair``, ``trainer`` or ``trainers``.
        steps: of the whole job.
    """

    def __init__(self, folder: Path, kind: str, steps: int) -> None:
        self.folder, self.kind, self.steps = folder, kind, steps
        self.count = 2 if kind in ("pair", "trainers") else 1
        self.address = ""
        self.seen: list[list[Seen]] = [[] for _ in range(self.count)]
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "default"

    def start(self) -> list[Child]:
        """Starts or resumes all processes of the job."""
        children = []
        with socket.create_server(("localhost", 0)) as server:
            self.address = f"localhost:{server.getsockname()[1]}"
        for process in range(self.count):
            name = self.folder / f"marks{process}.{len(self.seen[process])}"
            job = _trainer if self.kind in ("trainer", "trainers") else _loop
            before = time.time()
            children.append(
                fork(
                    lambda job=job, name=name, process=process: job(self, process, name),
                    self.folder / f"out{process}",
                    {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache")}
                    | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
                    | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
                )
            )
            # A machine under load may take its time over a fork.
            self.seen[process].append(Seen((before + time.time()) / 2))
        return children

    def end(self, children: list[Child], number: int) -> list[int | None]:
        """Sends a signal, waits for all processes, and keeps what was seen; 0: none."""
        for child, seen in zip(children, self.seen, strict=True):
            if number and child.poll() is None:
                os.kill(child.pid, number)
                seen[-1].killed = time.time() if number == signal.SIGKILL else None
        codes = []
        for process, (child, seen) in enumerate(zip(children, self.seen, strict=True)):
            codes.append(child.wait(_END_SECONDS))
            gone = time.time()
            name = self.folder / f"marks{process}.{len(seen) - 1}"
            lines = name.read_text().splitlines() if name.exists() else []
            words = [line.split() for line in lines]
            seen[-1].marks = [(float(at), event, int(n)) for at, event, n in words]
            exits = [at for at, event, _ in seen[-1].marks if event == "exit"]
            if exits:  # it was faster than the kill
                seen[-1].killed = None
            seen[-1].end = exits[0] if exits else seen[-1].killed or gone
        return codes

    def begun(self) -> bool:
        """Whether every process of the job has completed a step."""
        names = (f"marks{p}.{len(seen) - 1}" for p, seen in enumerate(self.seen))
        paths = [self.folder / name for name in names]
        return all(path.exists() and "-step" in path.read_text() for path in paths)

    def kill(self, chance: random.Random) -> None:
        """Starts the job, and kills it at a random moment of its life."""
        children = self.start()
        if chance.random() < 0.9:  # the others die in their start-up
            children[0].wait_until(self.begun, _END_SECONDS)
        time.sleep(chance.uniform(0.0, 2.0))
        self.end(children, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        time.sleep(chance.uniform(0.0, 2 * DOWN_SECONDS))

    def finish(self) -> None:
        """Lets the job run to its end.

        Raises:
            RuntimeError: it failed.
        """
        codes = self.end(self.start(), 0)
        if any(codes):
            raise RuntimeError(f"ended with {codes}: {(self.folder / 'out0').read_text()[-2000:]}")


def _loop(campaign: Campaign, process: int, marks_file: Path) -> int:
    """A loop whose steps are a tiny program and a sleep."""
    marks = Marks(marks_file)
    path = campaign.run / "metrics.jsonl"
    journal = Journal(path, index=process, processes=campaign.count, until_exit=True)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    import jax
    import numpy as np

    from mfu_jax.logger.metric_logger import MetricLogger
    from mfu_jax.logger.sinks import JsonlSink
    from mfu_jax.logger.timing.compile_events import CompileLog

    saved = campaign.folder / f"checkpoint{process}"
    start = int(saved.read_text()) if saved.exists() else 0
    with marks.span("restore"), journal.span("restore"):
        time.sleep(RESTORE_SECONDS if start else 0.0)
    x = jax.device_put(np.ones((8, 8), np.float32))
    compile_log = CompileLog()
    marks.listen_to_jax()
    with journal.compiling(compile_log):
        step_of = jax.jit(lambda x: (x / 8 @ x, x.mean())).lower(x).compile()
    sinks = [JsonlSink(path, resume_from_step=start)] if process == 0 else []
    logger = MetricLogger(
        sinks=sinks,
        journal=journal,
        start_step=start,
        compile_log=compile_log,
        peak_flops_per_sec=1.0,
    )
    with logger:
        for step in range(start, campaign.steps):
            with marks.span("data_wait"), logger.waiting("data"):
                time.sleep(0.005)
            with marks.span("step", step):
                x, loss = jax.block_until_ready(step_of(x))
                time.sleep(STEP_SECONDS * (5 if step % 40 == 7 else 1))
                logger.record(step, {"loss": loss})
            done = step + 1
            if done % EVAL_EVERY == 0:
                with marks.span("eval"), logger.pause("eval"):
                    time.sleep(EVAL_SECONDS)
            if done % CHECKPOINT_EVERY == 0 or stops:
                with marks.span("checkpoint"), logger.pause("checkpoint"):
                    time.sleep(SAVE_SECONDS)
                    saved.with_suffix(".new").write_text(str(done))
                    saved.with_suffix(".new").replace(saved)
            if stops:
                journal.stop("SIGTERM")
                break
    journal.stop("clean")
    journal.flush()
    marks.mark("exit")
    return 0


def _trainer(campaign: Campaign, process: int, marks_file: Path) -> int:
    """The reference trainer, as its `main` runs it; marks are put around what its loop calls."""
    from scripts.faults.trainer_kills import MODEL

    marks = Marks(marks_file)
    keys = [*MODEL, f"steps={campaign.steps}", f"checkpoint_period={CHECKPOINT_EVERY}"]
    keys += [f"eval_interval={EVAL_EVERY}", f"base_output_directory={campaign.folder}"]
    if campaign.count > 1:
        keys += [f"coordinator_address={campaign.address}", f"num_processes={campaign.count}"]
        keys += [f"process_id={process}"]
    config = load(["configs/base.yml", *keys, "tensorboard_dir="])
    journal = start_journal(config)
    loop: Any = importlib.import_module("mfu_jax.trainer.loop")
    _mark_trainer(loop, marks)
    code = int(loop.run(config, journal))
    marks.mark("exit")
    return code


def _mark_trainer(loop: Any, marks: Marks) -> None:
    """Puts marks around compilation, restore, steps and pauses."""
    import jax

    from mfu_jax.logger.metric_logger import MetricLogger

    logger: Any = MetricLogger
    compile_step, restore = loop.compile_train_step, loop.Checkpointer.restore
    close = loop.Checkpointer._close
    marks.listen_to_jax()
    record, pause, waiting = logger.record, logger.pause, logger.waiting

    class Marked:
        """The compiled step, which is waited for."""

        def __init__(self, step: Any) -> None:
            self._step, self._number = step, -1

        def __getattr__(self, name: str) -> Any:
            return getattr(self._step, name)

        def __call__(self, state: Any, batch: Any) -> Any:
            self._number = int(state.step) if self._number < 0 else self._number + 1
            marks.mark("+step", self._number)
            return jax.block_until_ready(self._step(state, batch))

    def marked_record(self: Any, step: int, metrics: Any) -> None:
        record(self, step, metrics)
        marks.mark("-step", step)

    def marked_restore(*args: Any) -> Any:
        with marks.span("restore"):
            return restore(*args)

    def marked_close(*args: Any) -> Any:
        with marks.span("checkpoint"):
            return close(*args)

    @contextlib.contextmanager
    def marked_pause(self: Any, name: str) -> Iterator[None]:
        with marks.span(name), pause(self, name):
            yield

    @contextlib.contextmanager
    def marked_wait(self: Any, name: str) -> Iterator[None]:
        with marks.span(f"{name}_wait"), waiting(self, name):
            yield

    logger.record, logger.pause, logger.waiting = marked_record, marked_pause, marked_wait
    loop.compile_train_step = lambda *args: Marked(compile_step(*args))
    loop.Checkpointer.restore, loop.Checkpointer._close = marked_restore, marked_close


def errors(campaign: Campaign) -> list[str]:
    """Where the report and the truth differ by more than 1% and 0.2 s, a line each."""
    run = read_run(campaign.run)
    wrong = []
    for process, seen in enumerate(campaign.seen):
        truth = truth_of(seen)
        for name in CATEGORIES:
            said = run.processes[process].time[name]
            if abs(said - truth[name]) > max(0.2, 0.01 * truth[name]):
                wrong.append(f"process {process}: {name} {said:.3f} s, truth {truth[name]:.3f} s")
    done = [step for seen in campaign.seen[0] for step, _ in seen.steps]
    if run.steps != len(set(done)):
        wrong.append(f"{run.steps} steps, truth {len(set(done))}")
    # A kill takes the lines of its last 0.15 s: those steps are lost time, but not numbered.
    unseen = len(done) - run.steps - run.lost_steps
    if not 0 <= unseen <= _MOST_UNSEEN * (len(campaign.seen[0]) - 1):
        wrong.append(f"{run.lost_steps} steps lost, {unseen} more in truth")
    if sum(run.time.values()) != run.wall_seconds:
        wrong.append("the categories do not add up")
    return wrong


def table(campaign: Campaign) -> str:
    """The report beside the truth."""
    run = read_run(campaign.run)
    lines = []
    for process, seen in enumerate(campaign.seen):
        truth = truth_of(seen)
        lines.append(f"process {process}: {len(seen)} starts")
        for name in CATEGORIES:
            said = run.processes[process].time[name]
            lines.append(f"  {name:<12}{said:10.3f} s, truth {truth[name]:10.3f} s")
    done = [step for seen in campaign.seen[0] for step, _ in seen.steps]
    lines.append(
        f"steps {run.steps} and {run.lost_steps} lost, truth {len(set(done))} of {len(done)}"
    )
    return "\n".join(lines)


def main() -> int:
    values = parse(sys.argv[1:], keys=("kills", "kind", "seed", "steps", "folder")).values
    kind, kills = values.get("kind", "loop"), int(values.get("kills", 20))
    chance = random.Random(int(values.get("seed", 0)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(values.get("folder", name))
        campaign = Campaign(folder, kind, int(values.get("steps", 80 * kills + 50)))
        for number in range(kills):
            campaign.kill(chance)
            print(f"kill {number + 1} of {kills}", flush=True)
        campaign.finish()
        print(table(campaign))
        wrong = errors(campaign)
        print("\n".join(wrong) or f"every category within 1% or 0.2 s after {kills} kills")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
