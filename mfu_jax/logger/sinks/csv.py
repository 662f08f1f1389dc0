"""A table for spreadsheets: one row per step, one column per metric."""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RECORD_FIELDS, RecordError, StepRecord
from mfu_jax.logger.sinks.append_only import BROKEN, AppendOnlySink, cut_back
from mfu_jax.logger.sinks.base import UniqueNames, register_sink
from mfu_jax.storage.files import AppendOnlyFile, replace_file


@register_sink("csv")
class CsvSink(AppendOnlySink):
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
    setting = "csv_file"

    def _prepare(self, resume_from_step: int) -> None:
        self._columns: list[str] = []
        self._is_replaced = False  # on disk, but not yet reopened
        self._names = UniqueNames(self.setting, _one_line, reserved=RECORD_FIELDS)
        super()._prepare(resume_from_step)

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
        self._append(b"".join(lines))

    def _resume(self, step: int) -> None:
        with open(self.path, "rb") as lines:
            self._columns = _cells(lines.readline())
        if "step" not in self._columns:
            raise UserError(
                f"csv_file {str(self.path)!r} has no column 'step'; expected the table of the "
                "run that is resumed",
                hint="usually another table's path; give another csv_file",
            )
        step_of = functools.partial(_step_of, self._columns.index("step"))
        self.missing, _ = cut_back(self.path, step_of, step, has_header=True)

    def _open(self, header: bytes = b"") -> AppendOnlyFile:
        return super()._open(_line(self._columns) if self._columns else b"")

    def _row(self, record: StepRecord) -> dict[str, str | float]:
        names = self._names.of(record.scalars)
        return {
            "step": record.step,
            "kind": record.kind,
            "unix_seconds": record.unix_seconds,
            **dict(zip(names, record.scalars.values(), strict=True)),
        }

    def _add_columns(self, new: Iterable[str]) -> None:
        if self._is_superseded:
            raise RecordError(f"{self.path} is now the table of a later logger of this process")
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


def _step_of(place: int, line: bytes) -> int:
    cells = _cells(line)
    is_whole = line.endswith(b"\n") and place < len(cells) and cells[place].isdecimal()
    return min(int(cells[place]), BROKEN) if is_whole else BROKEN


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace").replace("\r", "_")]), [])


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
