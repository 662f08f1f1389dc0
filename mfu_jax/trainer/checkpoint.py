"""Checkpoints with Orbax: train state and the data's read position, saved asynchronously."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from mfu_jax.errors import UserError, first_line
from mfu_jax.jax_internals import reached_preemption_sync_point
from mfu_jax.trainer.data import CheckpointableIterator
from mfu_jax.trainer.pyconfig import Config
from mfu_jax.trainer.state import TrainState


class Checkpointer:
    """Saves and restores under ``<run folder>/checkpoints``, in one folder per number of completed
    steps. Does nothing if the config switches checkpointing off."""

    def __init__(self, config: Config) -> None:
        self._period = config.checkpoint_period
        self._folder: Any = None
        self._manager: ocp.CheckpointManager | None = None
        if config.enable_checkpointing:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=config.checkpoints_to_keep, enable_async_checkpointing=True
            )
            self._folder = _folder_of(config)
            try:
                self._manager = ocp.CheckpointManager(self._folder, options=options)
            except OSError as error:
                raise UserError(
                    f"cannot create {self._folder} ({error.strerror or error}); set "
                    "base_output_directory to a folder that can be written"
                ) from None

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
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
        )
        folder = self._folder / str(steps_done)
        try:
            # Checked first: a restore that fails leaves threads that print tracebacks.
            stored = ocp.StandardCheckpointHandler().metadata(folder / "state").tree
            if difference := _difference(_shapes(stored), _shapes(abstract_state)):
                raise ValueError(difference)
            restored = self._manager.restore(steps_done, args=items)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"the checkpoint {folder} does not fit this config "
                f"({str(error).splitlines()[0][:200]}); use the config that it was made with, or "
                "another run_name"
            ) from error
        data.set_state(_decode(restored["data"]))
        return restored["state"]

    def due(self, steps_done: int) -> bool:
        """Whether a checkpoint is due."""
        return self._manager is not None and steps_done % self._period == 0

    def save(self, steps_done: int, state: TrainState, data: CheckpointableIterator) -> None:
        """Copies the state to the host and writes it in the background; a repeat is ignored."""
        if self._manager is None or steps_done == self._manager.latest_step():
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(_encode(data.get_state()))
        )
        self._manager.save(steps_done, args=items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits until everything is on disk."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.close()
            self._manager = None


def _folder_of(config: Config) -> Any:
    """Where checkpoints go: an absolute path, or etils' for an object store.

    Raises:
        UserError: the store cannot be reached.
    """
    folder = config.run_directory / "checkpoints"
    if isinstance(folder, Path):
        return folder.absolute()
    from etils import epath

    try:
        store = epath.Path(folder)
        store.exists()
    except Exception as error:  # no such scheme, no package for it, no account
        raise UserError(
            f"checkpoints cannot be written to {folder} ({first_line(error)}); expected a store "
            f"that etils.epath and TensorStore reach; usually a package or an account is missing; "
            f"set base_output_directory to a folder that can be written"
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


class StopRequest:
    """Notes SIGTERM, so that the loop can stop after the current step with its state saved.

    In a job of several processes, which have to stop at the same step, JAX's preemption service
    notices it; asking all processes at every step would cost a collective.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = True

    def agreed(self, step: int) -> bool:
        """Whether to stop after `step`; the same answer in all processes."""
        if jax.process_count() > 1:
            self.received = reached_preemption_sync_point(step)
        return self.received


def _encode(state: Any) -> dict[str, Any]:
    """Grain's position is a dict, or bytes if the pipeline is compiled; JSON can hold both."""
    return {"bytes": state.decode("latin-1")} if isinstance(state, bytes) else {"state": state}


def _decode(saved: dict[str, Any]) -> Any:
    return saved["bytes"].encode("latin-1") if "bytes" in saved else saved["state"]
