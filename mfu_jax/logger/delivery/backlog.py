"""Records that a sink could not take in time, kept on disk until it, or the next run, can.

A backlog is a folder ``backlog/`` beside the sink's output, in which each sink has its own files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.logger.delivery.backlog_files import FOLDER, FORMAT, Segment, last_step, segments
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.storage.files import set_aside

logger = logging.getLogger("mfu_jax")

# Most records that wait for the backlog's disk before the oldest are dropped.
WAITING_RECORDS = 1000


def backlogs_of(sinks: Sequence[Sink], start_step: int) -> list[Backlog | None]:
    """The backlog of each sink, beside its output or, if it has none, beside the first output.

    Args:
        sinks: all sinks of one logger.
        start_step: first step of the run.
    """
    folders = [_folder(sink) for sink in sinks]
    default = next((folder for folder in folders if folder is not None), None)
    return [
        _backlog_in(folder or default, sink, start_step)
        for folder, sink in zip(folders, sinks, strict=True)
    ]


def _folder(sink: Sink) -> Path | None:
    _, arguments = sink.made_by or ("", {})
    paths = (value for value in arguments.values() if isinstance(value, Path))
    return next((path.parent / FOLDER for path in paths), None)


def _backlog_in(folder: Path | None, sink: Sink, start_step: int) -> Backlog | None:
    if folder is None or sink.made_by is None:
        return None
    try:
        return Backlog(folder, sink.made_by, start_step=start_step)
    except OSError as error:
        logger.warning("%s has no backlog on disk: %s", type(sink).__name__, error)
        return None


class Backlog:
    """The backlog of one sink, written by its own thread, because its disk may hang, too.

    Args:
        folder: where the files are.
        made_by: see `Sink.made_by`.
        start_step: first step of this run. Of what earlier runs left, only the steps before it are
            written; the rest will be run again. If 0, their files are set aside.

    Attributes:
        old: files that earlier processes left, oldest first.
        dropped: number of records that could not be kept.
        left: number of records left on disk after `keep`, for the next process.
        is_open: some records are on disk, or on their way there.
    """

    def __init__(
        self,
        folder: Path,
        made_by: tuple[str, Mapping[str, Any]],
        *,
        start_step: int = 0,
    ) -> None:
        name, arguments = made_by
        self.folder = folder
        self.on_written: Callable[[], None] = lambda: None  # called when records are on disk
        self.dropped = self.left = 0
        self.is_open = False
        base = folder.parent
        header = {
            "backlog": FORMAT,
            "sink": name,
            "arguments": {k: v for k, v in arguments.items() if not isinstance(v, Path)},
            "paths": {
                k: os.path.relpath(v, base) for k, v in arguments.items() if isinstance(v, Path)
            },
        }
        key = zlib.crc32(json.dumps([header["arguments"], header["paths"]]).encode())
        stem = f"{name}-{key:08x}"
        left = sorted(folder.glob(f"{stem}.*.jsonl"))
        if start_step <= 0:
            for path in left:
                logger.warning("%s", set_aside(path))
            left = []
        self.old = segments(left, last_step(made_by) + 1, start_step) if left else []
        now = time.time_ns()
        # Records in memory at the end are older than those that went to disk before.
        self._rest = Segment(folder / f"{stem}.{now:020d}.0.jsonl", header)
        self.overflow = Segment(folder / f"{stem}.{now:020d}.1.jsonl", header)
        self._waiting: deque[StepRecord] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def has(self, steps: range) -> bool:
        """Whether earlier processes left all of these steps here."""
        left = {
            record.step
            for segment in self.old
            for record in Segment(segment.path, steps=segment.steps).read(sys.maxsize)
        }
        return all(step in left for step in steps)

    def add(self, records: Sequence[StepRecord]) -> None:
        """Takes the newest records; returns at once."""
        self.is_open = True
        self._waiting.extend(records)
        while len(self._waiting) > WAITING_RECORDS:
            self._waiting.popleft()
            self.dropped += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mfu_jax backlog", daemon=True)
            with contextlib.suppress(RuntimeError):  # at interpreter exit: `keep` writes them
                self._thread.start()
        self._wake.set()

    def finish_reading(self) -> list[StepRecord] | None:
        """Ends the overflow if its file was read completely. Touches no disk and never waits.

        Returns:
            The records that had not reached the file; None if the file has more, or is in use.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not self.overflow.is_read:
                return None
            self.is_open = False
            return self._take_waiting()
        finally:
            self._lock.release()

    def sync(self) -> None:
        """Waits until records on their way to the disk have reached it."""
        with self._lock:
            pass

    def tidy(self) -> None:
        """Removes what has been read from the overflow's file."""
        with self._lock:
            self.overflow.trim()

    def keep(self, records: Sequence[StepRecord], timeout: float) -> int:
        """Keeps the oldest records, those in memory at the end; returns how many were kept.

        Args:
            records: in order.
            timeout: seconds after which the disk counts as hanging.
        """
        kept: list[int] = []

        def write() -> None:
            try:
                if records:
                    self._rest.append(records)
                self._rest.close()
                kept.append(len(records))
                self.left = len(records)
                with self._lock:
                    self._write_waiting()
                    for segment in (*self.old, self.overflow):
                        segment.trim()
                        self.left += segment.count()
            except Exception:  # a full disk: the caller counts the losses
                return

        thread = threading.Thread(target=write, name="mfu_jax backlog", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no thread in its exit handlers
            write()
        else:
            thread.join(timeout)
        self.dropped += len(self._take_waiting())
        return sum(kept)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                self._write_waiting()
            self.on_written()

    def _write_waiting(self) -> None:
        records = self._take_waiting()
        try:
            if records:
                self.overflow.append(records)
        except Exception:  # a full disk: they wait in memory, which is bounded
            self._waiting.extendleft(reversed(records))

    def _take_waiting(self) -> list[StepRecord]:
        records = []
        while self._waiting:
            records.append(self._waiting.popleft())
        return records
