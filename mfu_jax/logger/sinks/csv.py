"""A table for spreadsheets: one row per step, one column per metric."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks.base import Sink, StepRecord, register_sink
from mfu_jax.logger.sinks.files import AppendOnlyFile, local_path, replace_file, set_aside


@register_sink("csv")
class CsvSink(Sink):
    """Appends a row for every step; a new metric gets a column, empty in earlier rows.

    Args:
        path: the file; folders are created.
        resume_from_step: first step that this run will write; rows from there on are dropped. At 0
            an existing file is renamed to ``<path>.previous1``.

    Raises:
        UserError: the path cannot be written to.
    """

    keeps_every_step = True

    def __init__(self, path: str | os.PathLike[str], *, resume_from_step: int = 0) -> None:
        self.path = local_path(path, "csv_file")
        self.made_by = ("csv", {"path": self.path})
        self._columns: list[str] = []
        if self.path.exists() and self.path.stat().st_size:
            if resume_from_step:
                rows = self._rows()
                kept = (row for row in rows if row["step"] and int(row["step"]) < resume_from_step)
                self._rewrite(kept)
            else:
                self.warnings = [set_aside(self.path)]
        self._file = AppendOnlyFile(self.path, "csv_file")

    def write(self, record: StepRecord) -> None:
        row: dict[str, Any] = {"step": record.step, "kind": record.kind}
        row |= {"unix_seconds": record.unix_seconds, **record.scalars}
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._rows() if self._columns else iter(())
            self._file.close()
            self._rewrite(rows, new)
            self._file = AppendOnlyFile(self.path, "csv_file")
        self._file.append(self._line(row))

    def flush(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> Iterator[dict[str, str]]:
        """The complete rows of the file; sets the columns from its header."""
        with open(self.path, newline="", encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
        reader = csv.DictReader(lines)
        self._columns = list(reader.fieldnames or ())
        if "step" not in self._columns:
            raise UserError(
                f"csv_file {str(self.path)!r} has no column 'step'; expected the table of the run "
                f"that is resumed; usually another table's path; give another csv_file"
            )
        return iter(list(reader))

    def _rewrite(self, rows: Iterable[Mapping[str, Any]], new: Iterable[str] = ()) -> None:
        columns = [*self._columns, *new]
        self._columns = columns
        header = dict(zip(columns, columns, strict=True))
        replace_file(self.path, (self._line(row) for row in (header, *rows)))

    def _line(self, row: Mapping[str, Any]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerow(row)
        return text.getvalue().encode()
