"""Sinks that append to a file, which the next process of the run goes on with."""

from __future__ import annotations

import itertools
import math
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from mfu_jax.logger.sinks.base import Sink
from mfu_jax.storage.files import AppendOnlyFile, replace_file, set_aside, unwritable
from mfu_jax.storage.targets import OutputTarget, file_target

BROKEN = sys.maxsize
"""The step of a line that has none: above any other, so that the line is dropped."""


class AppendOnlySink(Sink):
    """A sink whose output is one file that only grows, in whole pieces.

    Args:
        path: the file, or its address in an object store (``gs://…``); folders are created.
        resume_from_step: first step that this run will write; if 0, an existing file is renamed.
        fsync_seconds: seconds of data that a power cut may lose; see `AppendOnlyFile`.

    Attributes:
        setting: what names the path, for errors.
        path: the file.
        lock: of the file; None in an object store.
        fsync_seconds: as given.

    Raises:
        UserError: the path cannot be written to, or another process writes to it.
    """

    setting = ""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_from_step: int = 0,
        fsync_seconds: float = -1.0,
    ) -> None:
        self.fsync_seconds = fsync_seconds
        self._target = self._target_of(path, keep=resume_from_step > 0)
        self.path, self.place = self._target.path, self._target.place
        self.lock = self._target.lock
        with self._target.opening():
            try:
                self._prepare(resume_from_step)
            except OSError as error:
                raise unwritable(path, self.setting, error) from error
            self._file = self._open()

    def flush(self) -> None:
        self._file.sync()
        self._target.flush()

    def close(self) -> None:
        self._file.close()
        self._target.close()

    def _target_of(self, path: str | os.PathLike[str], *, keep: bool) -> OutputTarget:
        return file_target(path, self.setting, keep=keep)

    def _prepare(self, resume_from_step: int) -> None:
        """Prepares what an earlier run has left."""
        # An earlier logger of this process goes on with its file.
        has_writer = self.lock is not None and self.lock.has_superseded
        if self.path.exists() and (has_writer or self.path.stat().st_size):
            if resume_from_step:
                self._resume(resume_from_step)
            else:
                set_aside(self.path)

    def _resume(self, step: int) -> None:
        """Makes the file end just before `step`."""

    def _open(self, header: bytes = b"") -> AppendOnlyFile:
        return AppendOnlyFile(
            self.path,
            self.setting,
            header=header,
            lock=self.lock,
            fsync_seconds=self.fsync_seconds,
        )

    @property
    def _is_superseded(self) -> bool:
        """Whether a later logger of this process owns the path; this one keeps its file."""
        return self.lock is not None and self.lock.is_superseded

    def _append(self, piece: bytes) -> None:
        self._file.append(piece)
        self._target.wrote()


def cut_back(
    path: Path, step_of: Callable[[bytes], int], stop: int, *, has_header: bool = False
) -> tuple[range, int]:
    """Makes a file end just before step `stop`, without what a loop went back over.

    Args:
        path: the file, in which each line is a step.
        step_of: the step of a line; `BROKEN` if it has none.
        stop: the first step that will be written again.
        has_header: the first line is kept.

    Returns:
        The steps missing between the file's last and `stop`, and the number of broken lines.
    """
    with open(path, "rb") as lines:
        header = [lines.readline()] if has_header else []
        steps = array("q", map(step_of, lines))
        marks = in_last_pass(steps, stop)
        lines.seek(sum(map(len, header)))
        replace_file(path, itertools.chain(header, itertools.compress(lines, marks)))
    last = max(itertools.compress(steps, marks), default=stop - 1)
    return range(last + 1, stop), steps.count(BROKEN)


def in_last_pass(steps: Sequence[int], stop: float = math.inf) -> bytearray:
    """Marks the records whose step is below `stop` and all later ones.

    Args:
        steps: steps of the records of a file, in its order.
        stop: the first step that will be written again.

    Returns:
        For each record 1, or 0 if the loop later went back to its step or before it.

    >>> list(in_last_pass([0, 1, 2, 3, 1, 2]))
    [1, 0, 0, 0, 1, 1]
    >>> list(in_last_pass([0, 1, 2, 3, 1, 2], stop=2))
    [1, 0, 0, 0, 1, 0]
    """
    marks, lowest = bytearray(len(steps)), stop
    for place in range(len(steps) - 1, -1, -1):
        if steps[place] < lowest:
            marks[place], lowest = 1, steps[place]
    return marks
