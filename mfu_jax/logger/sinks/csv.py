"""A table for spreadsheets: one row per step, one column per metric."""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RECORD_FIELDS, RecordError, StepRecord
from mfu_jax.logger.sinks.base import Sink, register_sink
from mfu_jax.logger.sinks.last_pass import in_last_pass
from mfu_jax.logger.sinks.names import UniqueNames
from mfu_jax.storage.files import AppendOnlyFile, replace_file, set_aside, unwritable
from mfu_jax.storage.targets import file_target


@register_sink("csv")
class CsvSink(Sink):
    """Appends a row for every step; a new metric adds a column, empty in earlier rows.

    Args:
        path: the file, or its address in an object store (``gs://…``); folders are created.
        resume_from_step: first step that this run will write; rows from there on are dropped, as
            are those that the loop went back over. If 0, an existing file is renamed to
            ``<path>.previous1``.
        fsync_seconds: seconds of data that a power cut may lose; see `AppendOnlyFile`.

    Raises:
        UserError: the path cannot be written to, or another process writes to it.
    """

    keeps_every_step = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_from_step: int = 0,
        fsync_seconds: float = -1.0,
    ) -> None:
        self._target = file_target(path, "csv_file", keep=resume_from_step > 0)
        self.path = self._target.path
        self.made_by = ("csv", {"path": self._target.place})
        self.warnings: list[str] = list(self._target.warnings)
        self._columns: list[str] = []
        self._is_replaced = False  # on disk, but not yet reopened
        self._names = UniqueNames("csv_file", _one_line, reserved=RECORD_FIELDS)
        self._fsync_seconds = fsync_seconds
        with self._target.opening():
            try:
                self._prepare(resume_from_step)
            except OSError as error:
                raise unwritable(path, "csv_file", error) from error
            self._file = self._open()

    def write_many(self, records: Sequence[StepRecord]) -> None:
        rows = [self._row(record) for record in records]
        new = dict.fromkeys(name for row in rows for name in row if name not in self._columns)
        try:
            if new:
                self._add_columns(new)
            if self._is_replaced:
                self._reopen()
            lines = [_line(row.get(name, "") for name in self._columns) for row in rows]
        except UserError:  # the path is no longer writable
            raise
        except (ValueError, TypeError, OverflowError) as error:
            steps = f"steps {records[0].step} to {records[-1].step}"
            raise RecordError(f"{steps} cannot be rows: {error}") from error
        self._file.append(b"".join(lines))
        self._target.wrote()

    def flush(self) -> None:
        self._file.sync()
        self._target.flush()

    def close(self) -> None:
        self._file.close()
        self._target.close()

    def _prepare(self, resume_from_step: int) -> None:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        if not resume_from_step:
            self.warnings.append(set_aside(self.path))
            return
        with open(self.path, "rb") as lines:
            self._columns = _cells(lines.readline())
            if "step" not in self._columns:
                raise UserError(
                    f"csv_file {str(self.path)!r} has no column 'step'; expected the table of the "
                    f"run that is resumed; usually another table's path; give another csv_file"
                )
            place = self._columns.index("step")
            steps = array("q", (_step_of(line, place) for line in lines))
            lines.seek(0)
            lines.readline()
            marks = in_last_pass(steps, resume_from_step)
            kept = itertools.chain([_line(self._columns)], itertools.compress(lines, marks))
            replace_file(self.path, kept)
        if any(marks):
            last = max(itertools.compress(steps, marks))
            self.missing = range(last + 1, resume_from_step)

    def _open(self) -> AppendOnlyFile:
        return AppendOnlyFile(
            self.path,
            "csv_file",
            header=_line(self._columns) if self._columns else b"",
            lock=self._target.lock,
            fsync_seconds=self._fsync_seconds,
        )

    def _row(self, record: StepRecord) -> dict[str, str | float]:
        names = self._names.of(record.scalars)
        return {
            "step": record.step,
            "kind": record.kind,
            "unix_seconds": record.unix_seconds,
            **dict(zip(names, record.scalars.values(), strict=True)),
        }

    def _add_columns(self, new: Iterable[str]) -> None:
        columns = [*self._columns, *new]
        if self._columns:
            self._file.find_again()  # its rows are read back
            replace_file(self.path, self._widened(columns))
        self._columns, self._is_replaced = columns, True

    def _reopen(self) -> None:
        file = self._open()
        self._file.close()
        self._file, self._is_replaced = file, False

    def _widened(self, columns: Sequence[str]) -> Iterator[bytes]:
        """The table with empty cells at the end of each row; parsing its rows would take long."""
        yield _line(columns)
        ending = b"," * (len(columns) - len(self._columns)) + b"\n"
        with open(self.path, "rb") as lines:
            lines.readline()
            for line in lines:
                if line.endswith(b"\n"):
                    yield line[:-1] + ending


def _one_line(name: str) -> str:
    """Replaces line breaks, because rows are split at every line break, even within quotes."""
    return re.sub(r"[\r\n\0]", "_", name)


def _step_of(line: bytes, place: int) -> int:
    """The step of a row; above any other for a broken row, which is then dropped."""
    cells = _cells(line)
    is_whole = line.endswith(b"\n") and place < len(cells) and cells[place].isdecimal()
    return min(int(cells[place]), sys.maxsize) if is_whole else sys.maxsize


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace").replace("\r", "_")]), [])


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
