"""The jobs that the kill campaign kills: a loop around a `MetricLogger`, the reference trainer.

Both write marks of their own, beside all loggers, from which the truth is made.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.train import start_run_log
from mfu_jax.trainer.config.pyconfig import load
from tests.campaigns.kills.truth import Marks

CHECKPOINT_EVERY, EVAL_EVERY = 20, 30
STEP_SECONDS, EVAL_SECONDS, SAVE_SECONDS, RESTORE_SECONDS = 0.02, 0.1, 0.06, 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process to be started.

    Attributes:
        folder: of everything that the job writes; the run is in ``default``.
        steps: at which it ends by itself.
        process: its number.
        count: of processes.
        address: where they meet, ``host:port``.
        marks: its own log.
    """

    folder: Path
    steps: int
    process: int
    count: int
    address: str
    marks: Path


def run_loop(job: Job) -> int:
    """A loop whose steps are a tiny program and a sleep."""
    marks = Marks(job.marks)
    path = job.folder / "default" / "metrics.jsonl"
    run_log = RunLog(path, index=job.process, processes=job.count, until_exit=True)
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    import jax
    import numpy as np

    from mfu_jax.logger.metric_logger import MetricLogger
    from mfu_jax.logger.timing.compile_events import CompileLog
    from mfu_jax.sinks import JsonlSink

    saved = job.folder / f"checkpoint{job.process}"
    start = int(saved.read_text()) if saved.exists() else 0
    with marks.span("restore"), run_log.span("restore"):
        time.sleep(RESTORE_SECONDS if start else 0.0)
    x = jax.device_put(np.ones((8, 8), np.float32))
    compile_log = CompileLog()
    marks.listen_to_jax()
    with run_log.compiling(compile_log):
        step_of = jax.jit(lambda x: (x / 8 @ x, x.mean())).lower(x).compile()
    sinks = [JsonlSink(path, resume_from_step=start)] if job.process == 0 else []
    logger = MetricLogger(
        sinks=sinks,
        run_log=run_log,
        start_step=start,
        compile_log=compile_log,
        peak_flops_per_sec=1.0,
    )
    with logger:
        for step in range(start, job.steps):
            with marks.within(logger.waiting("data"), "data_wait"):
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
                    logger.flush()  # a resume builds on these steps
                    time.sleep(SAVE_SECONDS)
                    saved.with_suffix(".new").write_text(str(done))
                    saved.with_suffix(".new").replace(saved)
            if stops:
                run_log.stop("SIGTERM")
                break
    run_log.stop("clean")
    run_log.flush()
    marks.mark("exit")
    return 0


def run_trainer(job: Job) -> int:
    """The reference trainer, as its `main` runs it; marks are put around what its loop calls."""
    from tests.campaigns.faults.trainer_kills import MODEL

    marks = Marks(job.marks)
    keys = [*MODEL, f"steps={job.steps}", f"checkpoint_period={CHECKPOINT_EVERY}"]
    # Steps that take long beside the writing of a mark.
    keys += ["per_device_batch_size=16", "max_target_length=64"]
    keys += [f"eval_interval={EVAL_EVERY}", f"base_output_directory={job.folder}"]
    if job.count > 1:
        keys += [f"coordinator_address={job.address}", f"num_processes={job.count}"]
        keys += [f"process_id={job.process}"]
    config = load(["configs/base.yml", *keys, "tensorboard_dir="])
    run_log = start_run_log(config)
    loop: Any = importlib.import_module("mfu_jax.trainer.loop")
    _mark_trainer(loop, marks)
    code = int(loop.run(config, run_log))
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
        with marks.within(waiting(self, name), f"{name}_wait"):
            yield

    logger.record, logger.pause, logger.waiting = marked_record, marked_pause, marked_wait
    loop.compile_train_step = lambda *args: Marked(compile_step(*args))
    loop.Checkpointer.restore, loop.Checkpointer._close = marked_restore, marked_close
