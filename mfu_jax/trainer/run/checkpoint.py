"""Checkpoints with Orbax: train state and the data's read position, saved asynchronously."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax
from etils import epath

from mfu_jax.errors import UserError, first_line
from mfu_jax.logger.run_log.events import RESTORED
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import CheckpointableIterator
from mfu_jax.trainer.step.state import TrainState
from mfu_jax.util.optional_deps import TRAIN, require

_log = logging.getLogger("mfu_jax")

CHECKPOINT_EXIT_CODE = 74  # EX_IOERR of sysexits.h
_STORAGE_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.ENOTDIR, errno.ENOENT),
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The text is one line: which one, why, what is left."""


class Checkpointer:
    """Saves and restores under ``<run folder>/checkpoints``, one folder per number of completed
    steps. Does nothing if the config disables checkpointing.

    A checkpoint that cannot be written is reported in one line; `on_checkpoint_error` says whether
    training goes on. Earlier checkpoints stay. A job of several processes stops: the others wait
    for this one's part.

    Args:
        config: says whether, where and how often to save.
        run_log: records the restore, and the wait for the last save.

    Attributes:
        failure: why the newest checkpoint is missing; None if it exists.
    """

    def __init__(self, config: Config, run_log: RunLog | None = None) -> None:
        self._run_log = run_log or RunLog()
        self.failure: CheckpointError | None = None
        self._enabled = config.enable_checkpointing
        self._period = config.checkpoint_period
        self._goes_on = config.on_checkpoint_error == "warn" and jax.process_count() == 1
        self._folder: Any = None
        self._orbax = require("orbax.checkpoint", "the trainer", install=TRAIN)
        self._options = self._orbax.CheckpointManagerOptions(
            max_to_keep=config.checkpoints_to_keep, enable_async_checkpointing=True
        )
        self._manager: Any | None = None
        self._saving: int | None = None
        if self._enabled:
            silence_orbax()
            self._folder = _folder_of(config)
            self._remove_unfinished()
            try:
                self._manager = self._open()
            except OSError as error:
                raise UserError(
                    f"cannot create {self._folder} ({error.strerror or error})",
                    hint="set base_output_directory to a folder that can be written",
                ) from None

    def _open(self) -> Any:
        return self._orbax.CheckpointManager(self._folder, options=self._options)

    def restore(
        self, abstract_state: TrainState, data: CheckpointableIterator
    ) -> TrainState | None:
        """The newest state, or None without a checkpoint; moves `data` to its read position.

        Raises:
            UserError: the checkpoint is from another model, or cannot be read.
        """
        steps_done = self._manager.latest_step() if self._manager else None
        if self._manager is None or steps_done is None:
            return None
        items = self._orbax.args.Composite(
            state=self._orbax.args.StandardRestore(abstract_state),
            data=self._orbax.args.JsonRestore(),
        )
        folder = self._folder / str(steps_done)
        try:
            # Checked first: a failing restore leaves threads behind that print tracebacks.
            stored = self._orbax.StandardCheckpointHandler().metadata(folder / "state").tree
            if difference := _difference(_shapes(stored), _shapes(abstract_state)):
                raise ValueError(difference)
            restored = self._manager.restore(steps_done, args=items)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"the checkpoint {folder} does not fit this config "
                f"({str(error).splitlines()[0][:200]})",
                hint="use the config that it was made with, or another run_name",
            ) from error
        data.set_state(_decode(restored["data"]))
        self._run_log.event(RESTORED, step=steps_done)
        return restored["state"]

    def due(self, steps_done: int) -> bool:
        """Whether a checkpoint is due."""
        return self._enabled and steps_done % self._period == 0

    def check(self) -> None:
        """Reports a background save that has failed since; takes microseconds.

        Raises:
            CheckpointError: it failed, and the config stops the run in that case.
        """
        if self._manager is not None and self._saving is not None:
            with self._as_told(), self._named(self._saving):
                self._manager.check_for_errors()

    def save(self, steps_done: int, state: TrainState, data: CheckpointableIterator) -> None:
        """Copies the state to the host and writes it in the background; a repeat is ignored.

        Raises:
            CheckpointError: this or the previous save failed, and the config stops the run then.
        """
        if not self._enabled:
            return
        with self._as_told():
            self._finish()
        items = self._orbax.args.Composite(
            state=self._orbax.args.StandardSave(state),
            data=self._orbax.args.JsonSave(_encode(data.get_state())),
        )
        with self._as_told(), self._named(steps_done):
            self._manager = self._manager or self._open()
            if steps_done != self._manager.latest_step():
                self._manager.save(steps_done, args=items)
                self._saving = steps_done

    def _finish(self) -> None:
        """Waits for the background save."""
        if self._manager is not None and self._saving is not None:
            with self._named(self._saving):
                self._manager.wait_until_finished()
            self.failure, self._saving = None, None

    @contextlib.contextmanager
    def _as_told(self) -> Iterator[None]:
        """In this context, a failed checkpoint stops the run only if the config says so."""
        try:
            yield
        except CheckpointError as error:
            if not self._goes_on:
                raise
            _log.warning("%s; training goes on", error)

    @contextlib.contextmanager
    def _named(self, steps_done: int) -> Iterator[None]:
        """In this context, any error of Orbax becomes one line about that step's checkpoint."""
        try:
            yield
        except Exception as error:
            self._saving = None
            self._abandon()  # every later save would raise the same error
            self._remove_unfinished()
            newest = self._newest()
            kept = "there is no earlier one" if newest is None else f"step {newest} is kept"
            self.failure = CheckpointError(
                f"the checkpoint of step {steps_done} in {self._folder} was not written "
                f"({_reason(error)}); {kept}"
            )
            raise self.failure from None

    def _abandon(self) -> None:
        if self._manager is not None:
            with contextlib.suppress(Exception):
                self._manager.close()
            self._manager = None

    def _remove_unfinished(self) -> None:
        """Removes what a failed or killed save left behind; such folders are never read."""
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                for folder in epath.Path(self._folder).glob("*.orbax-checkpoint-tmp*"):
                    folder.rmtree()

    def _newest(self) -> int | None:
        """The last step with a complete checkpoint."""
        with contextlib.suppress(OSError):
            names = [folder.name for folder in epath.Path(self._folder).iterdir()]
            return max((int(name) for name in names if name.isdigit()), default=None)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self._close()

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
            CheckpointError: the newest checkpoint is missing.
        """
        self._close()
        if self.failure is not None:
            raise self.failure

    def _close(self) -> None:
        with self._run_log.span("checkpoint"), contextlib.suppress(CheckpointError):
            self._finish()  # errors are kept in `failure`
        self._abandon()
        if self.failure is not None:
            with warnings.catch_warnings():  # about coroutines that the failure never started
                warnings.simplefilter("ignore", RuntimeWarning)
                gc.collect()  # so that what Orbax left behind ends quietly


def _reason(error: Exception) -> str:
    """The operating system's message, which TensorStore wraps in several lines of paths."""
    text = str(error)
    known = (os.strerror(code) for code in _STORAGE_ERRORS)
    return next((words for words in known if words in text), first_line(error))


def _folder_of(config: Config) -> Any:
    """Where checkpoints go: an absolute path, or etils' for an object store.

    Raises:
        UserError: the store cannot be reached.
    """
    folder = config.run_directory / "checkpoints"
    if isinstance(folder, Path):
        return folder.absolute()
    try:
        store = epath.Path(folder)
        store.exists()
    except Exception as error:  # no such scheme, no package for it, no account
        raise UserError(
            f"checkpoints cannot be written to {folder} ({first_line(error)})",
            hint="usually a package or an account is missing; set base_output_directory to a "
            "folder that can be written",
        ) from None
    return store


def _shapes(state: Any) -> dict[str, str]:
    """Path of each array -> its dtype and shape."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _difference(stored: dict[str, str], wanted: dict[str, str]) -> str:
    """The first array that differs, in words; empty if all are equal."""
    for name in sorted(set(stored) | set(wanted)):
        there, here = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if there != here:
            return f"{name} is {there} in it and {here} here"
    return ""


def _encode(state: Any) -> dict[str, Any]:
    """Grain's position is a dict, or bytes if the pipeline is compiled; JSON can hold both."""
    return {"bytes": state.decode("latin-1")} if isinstance(state, bytes) else {"state": state}


def _decode(saved: dict[str, Any]) -> Any:
    return saved["bytes"].encode("latin-1") if "bytes" in saved else saved["state"]


@functools.cache  # once per process
def silence_orbax() -> None:
    """From here on, failures inside Orbax and TensorStore are raised, not printed.

    When a write fails, Orbax also logs the stacks of several threads, TensorStore prints tracebacks
    of callbacks into a closed event loop, and unfinished coroutines complain when they are freed.
    """
    hook = sys.unraisablehook

    def on_unraisable(unraisable: Any) -> None:
        if not _is_left_over(unraisable):
            hook(unraisable)

    sys.unraisablehook = on_unraisable
    # A coroutine that never began has no frame to know it by, only its name.
    never = r"coroutine 'async_serialize\w*\.<locals>\.\w+' was never awaited"
    warnings.filterwarnings("ignore", never, RuntimeWarning)
    logging.getLogger("absl").addFilter(_is_no_stack)
    logging.getLogger("asyncio").addFilter(_is_no_task)


def _is_left_over(unraisable: Any) -> bool:
    """A coroutine of Orbax, or a callback of TensorStore into a closed event loop."""
    code = getattr(unraisable.object, "cr_code", None)
    is_callback = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
    return is_callback or (code is not None and "orbax" in code.co_filename)


def _is_no_stack(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _is_no_task(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    return not any("orbax" in text for text in (record.getMessage(), *frames))
