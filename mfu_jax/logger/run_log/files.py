"""The files of a run log, written by one thread: the records, and the events of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mfu_jax.logger.run_log.events import Event, events_name, line
from mfu_jax.storage.addresses import Address
from mfu_jax.storage.files import AppendOnlyFile

if TYPE_CHECKING:
    from mfu_jax.logger.records.summary import Summary
    from mfu_jax.logger.sinks.base import Sink, StepRecord
    from mfu_jax.storage.targets import SpooledTarget

_MOST_PROCESSES = 1000


class LogFiles:
    """What the log's own follower writes to; its methods are those of a `Sink`, and two more.

    The events file is opened by the first write, and locked while its process lives: one that
    overlaps with it writes ``….events.0.2.jsonl``.

    Args:
        metrics_file: the run's metrics file, or its address; the events are written beside it.
        index: number of this process in the job.
        clock: wall clock in seconds, for the sign of life.

    Attributes:
        records: writes the records, if this process has any.
    """

    keeps_every_step = True
    periods_per_write = 1

    def __init__(
        self, metrics_file: Path | Address, index: int, clock: Callable[[], float]
    ) -> None:
        self.records: Sink | None = None
        self._place = metrics_file.parent / events_name(metrics_file.name, index)
        self._clock = clock
        self._start = self._last_sign = b""
        self._file: AppendOnlyFile | None = None
        self._spool: SpooledTarget | None = None

    @property
    def is_open(self) -> bool:
        """Whether the events file could be opened."""
        return self._file is not None

    def write(self, record: StepRecord) -> None:
        if self.records is not None:
            self.records.write(record)

    def write_many(self, records: Sequence[StepRecord]) -> None:
        if self.records is None:
            return
        if self.records.write_many is not None:
            self.records.write_many(records)
            return
        for record in records:
            self.records.write(record)

    def write_events(self, events: Sequence[tuple[int, Event]]) -> None:
        """Appends events, each with its sequence number, or raises having written none."""
        text = b"".join(line(event, number) for number, event in events)
        self._start = self._start or text.partition(b"\n")[0] + b"\n"
        if self._file is None:
            self._file = self._opened()
            text = self._last_sign + text
        self._file.append(text)
        if self._spool is not None:
            self._spool.wrote()

    def show_life(self) -> None:
        """Sets the time of the events file to now."""
        if self._file is not None:
            self._file.touch(self._clock())
        if self._spool is not None:
            self._spool.wrote()

    def write_summary(self, summary: Summary) -> None:
        if self.records is not None:
            self.records.write_summary(summary)

    def flush(self) -> None:
        if self.records is not None:
            self.records.flush()
        if self._file is not None:
            self._file.sync()
        if self._spool is not None:
            self._spool.flush()

    def close_records(self) -> None:
        """Closes the records' file; events may still come."""
        records, self.records = self.records, None
        if records is not None:
            records.close()

    def close(self) -> None:
        self.close_records()
        if self._file is not None:
            self._file.close()
        if self._spool is not None:
            self._spool.close()

    def _opened(self) -> AppendOnlyFile:
        path = self._local_path()
        for number in range(1, _MOST_PROCESSES):
            name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
            # After a move by another program, a new file begins with the start of the process.
            file = AppendOnlyFile(name, "run log", restart=self._start)
            if file.is_alone():
                self._last_sign = _last_sign(name)
                file.cut_torn_line()
                return file
            file.close()
        raise OSError(f"{_MOST_PROCESSES} processes write to run logs beside {path}")

    def _local_path(self) -> Path:
        if isinstance(self._place, Address):
            from mfu_jax.storage.targets import SpooledTarget

            if self._spool is None:
                self._spool = SpooledTarget(self._place, "run log", is_folder=False, keep=True)
            return self._spool.path
        self._place.parent.mkdir(parents=True, exist_ok=True)
        return self._place


def _last_sign(path: Path) -> bytes:
    """The time of the file as a line: an earlier process set it, and it is about to change."""
    status = path.stat()
    return f'{{"e":"alive","t":{status.st_mtime:.6f}}}\n'.encode() if status.st_size else b""


def absolute(path: Path | Address) -> Path | Address:
    """The absolute path, because the loop may change the working directory."""
    return path if isinstance(path, Address) else path.absolute()
