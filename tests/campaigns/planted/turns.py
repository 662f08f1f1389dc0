"""Two runs of the reference trainer in one process that take turns training for some steps.

Both are thus measured in the same minutes, on a machine in the same state. A run has its own
thread; it waits for its turn when it asks its data for a batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.trainer import loop as trainer
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.run.job import Job
from mfu_jax.trainer.run.stopping import StopRequest
from mfu_jax.util.yaml_files import CONFIG_FOLDER

WARM = 2  # steps at the start of a turn that are not timed: the loop's pipeline fills
_NEVER = "profile_steps=1000000000"  # dumps the program beside the traces, which are made here
_QUIET = (
    str(CONFIG_FOLDER / "base.yml"),
    "steps=1000000001",
    "metrics_file=",
    "tensorboard_dir=",
    "heartbeat_file=",
    "log_period=1000000",
    "hang_factor=0",
    "peak_tflops_per_device=0.1",
)


class _OverError(Exception):
    """Ends a run at its next batch."""


class TurnedTrainer:
    """One run of `mfu_jax.trainer.loop.train`, which trains only when told to.

    Args:
        folder: of the run; traces go to its ``run/profile``.
        keys: of the trainer's config, as ``key=value``.
        plant: entered while the run sets itself up: what it changes stays in the compiled step.
        data: wraps the iterator of batches.
        record: wraps ``logger.record``.
    """

    def __init__(
        self,
        folder: Path,
        keys: tuple[str, ...],
        *,
        plant: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        data: Callable[[Iterator[Any]], Iterator[Any]] = iter,
        record: Callable[[Callable[..., None]], Callable[..., None]] | None = None,
    ) -> None:
        self.profile_folder = folder / "run" / "profile"
        names = (f"base_output_directory={folder}", "run_name=run", _NEVER)
        self._config = load([*_QUIET, *names, *keys])
        self._data, self._record = data, record
        self._times: list[float] = []
        self._left = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        with plant(), self._patched():
            self._thread.start()
            self._wait()  # until it asks for its first batch

    def step_seconds(self, steps: int) -> float:
        """Mean seconds per step over `steps` steps after the first `WARM` of a turn."""
        self._train(WARM + steps)
        return (self._times[-1] - self._times[WARM]) / steps

    def trace(self, steps: int) -> Path:
        """Traces this many steps, and one more that only ends them; returns the folder."""
        self._train(WARM)
        jax.profiler.start_trace(str(self.profile_folder))
        self._train(steps + 1)
        jax.profiler.stop_trace()
        return self.profile_folder

    def close(self) -> None:
        """Ends the run."""
        self._is_over = True
        self._train(0)

    def _train(self, steps: int) -> None:
        self._left, self._times = steps, []
        self._turn.release()
        self._wait()

    def _wait(self) -> None:
        self._back.acquire()
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        make_data, make_logger = trainer._data, trainer.make_run_logger
        make_profile = trainer.step_profile

        def data(config: Any, mesh: Any, split: str, accumulation: int) -> Any:
            batches = make_data(config, mesh, split, accumulation)
            return _Turns(self._data(batches), self._ask) if split == "train" else batches

        def logger(*args: Any, **kwargs: Any) -> Any:
            made = make_logger(*args, **kwargs)
            if self._record is not None:
                made.record = self._record(made.record)  # type: ignore[method-assign]
            return made

        def profile(*args: Any) -> Any:
            make_profile(*args)
            return _Marks()

        with (
            mock.patch.object(trainer, "_data", data),
            mock.patch.object(trainer, "make_run_logger", logger),
            mock.patch.object(trainer, "step_profile", profile),
        ):
            yield

    def _run(self) -> None:
        try:
            trainer.train(self._config, StopRequest(), Job(), CompileLog(), RunLog())
        except _OverError:
            pass
        except BaseException as error:
            self._error = error
        self._back.release()

    def _ask(self) -> None:
        """Called by the run before each batch; returns when it may continue."""
        self._times.append(time.monotonic())
        while not self._left:
            for array in jax.live_arrays():
                array.block_until_ready()
            self._back.release()
            self._turn.acquire()
            if self._is_over:
                raise _OverError
            self._times.append(time.monotonic())
        self._left -= 1


class _Turns:
    """An iterator that waits for permission before each item."""

    def __init__(self, batches: Iterator[Any], ask: Callable[[], None]) -> None:
        self._batches, self._ask = batches, ask

    def __next__(self) -> Any:
        self._ask()
        return next(self._batches)


class _Marks:
    """Marks every step for a trace that may be open, as `StepProfile` does for its own traces."""

    def __enter__(self) -> _Marks:
        return self

    def __exit__(self, *error: object) -> None: ...

    def step(self, number: int, logger: Any) -> Any:
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def after(self, number: int, logger: Any, *, is_last: bool = False) -> None: ...
