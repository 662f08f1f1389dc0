"""The files of a backlog: a header from which to recreate the sink, then one record per line.

Lines are written whole or not at all, so a killed process leaves no torn file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.strict_json import strict
from mfu_jax.logger.sinks.tensorboard_plugins import tensorboardx
from mfu_jax.storage.files import AppendOnlyFile, replace_file
from mfu_jax.util.user_files import opened

FOLDER = "backlog"
FORMAT = 1
ALL_STEPS = range(-sys.maxsize, sys.maxsize)
_TAIL_BYTES = _LONGEST_HEADER = 1 << 20  # more than any line


def to_line(record: StepRecord) -> bytes:
    """One record as a line of JSON."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return json.dumps(strict(values), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> StepRecord:
    """The record of a line.

    Raises:
        ValueError: it is not a line that `to_line` made.
    """
    try:
        values = json.loads(line)
        values["scalars"] = {
            name: float(number) if isinstance(number, str) else number
            for name, number in values["scalars"].items()
        }
        values["flags"], values["notes"] = tuple(values["flags"]), tuple(values["notes"])
        return StepRecord(**values)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a record: {line[:80]!r}") from error


def last_step(made_by: tuple[str, Mapping[str, Any]]) -> int:
    """The last step in the output of a JSONL, CSV or TensorBoard sink; -1 if none or unknown.

    A record may have reached the output although its sink hung while writing it.
    """
    last = max(_steps(made_by, _TAIL_BYTES), default=-1)
    return last if last >= 0 else max(_steps(made_by, sys.maxsize), default=-1)


def steps_of(made_by: tuple[str, Mapping[str, Any]]) -> set[int]:
    """All steps in the output of a JSONL, CSV or TensorBoard sink."""
    return set(_steps(made_by, sys.maxsize))


def segments(paths: Sequence[Path], first: int, stop: int) -> list[Segment]:
    """The files that earlier processes left for one sink, oldest first.

    If a resumed process repeated steps that an earlier one had left, the later file counts.

    Args:
        paths: the files, oldest first.
        first: first step to read.
        stop: reading stops before this step.
    """
    found: list[Segment] = []
    for path in reversed(paths):
        found.insert(0, Segment(path, steps=range(first, stop)))
        begin = next((record.step for record in Segment(path).read(1)), stop)
        stop = min(stop, begin)
    return found


def _steps(made_by: tuple[str, Mapping[str, Any]], last_bytes: int) -> Iterator[int]:
    path, folder = made_by[1].get("path"), made_by[1].get("folder")
    if made_by[0] == "tensorboard" and isinstance(folder, Path):
        yield from _event_steps(folder)
    if not isinstance(path, Path) or not path.is_file():
        return
    with open(path, "rb") as file:
        start = path.stat().st_size - last_bytes
        if start > 0:
            file.seek(start - 1)
            file.readline()  # the rest of a line, whose numbers are not steps
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # torn, or a header
                if line.endswith(b"\n"):
                    yield int(json.loads(line)["step"] if line[:1] == b"{" else line.split(b",")[0])


def _event_steps(folder: Path) -> set[int]:
    """The steps with scalars that TensorBoard finds in our event files in a folder."""
    event_class = tensorboardx("proto.event_pb2").Event
    found: set[int] = set()
    for path in sorted(folder.glob("*.mfu_jax")):
        content, start = path.read_bytes(), 0
        while start + 16 <= len(content):  # size, its checksum, the event, its checksum
            end = start + 12 + int.from_bytes(content[start : start + 8], "little")
            if end + 4 > len(content):
                break
            event, start = event_class.FromString(content[start + 12 : end]), end + 4
            if event.HasField("session_log"):
                found = {step for step in found if step < event.step}
            if any(value.HasField("simple_value") for value in event.summary.value):
                found.add(event.step)
    return found


def _record(line: bytes) -> StepRecord | None:
    try:
        return from_line(line)
    except ValueError:  # the header
        return None


class Segment:
    """One file of a backlog, read from its start while it may still grow.

    Args:
        path: the file; created by the first `append`.
        header: its first line, for a file written here.
        steps: the steps to read; others are skipped, and removed by `trim`.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any] | None = None, steps: range = ALL_STEPS
    ) -> None:
        self.path = path
        self._header = header
        self.steps = steps
        self._file: AppendOnlyFile | None = None
        self._offset = 0
        self._size = 0
        self._ends: list[int] = []

    @property
    def is_read(self) -> bool:
        """Whether everything appended here has been passed by `advance`."""
        return self._offset >= self._size

    def append(self, records: Sequence[StepRecord]) -> None:
        """Adds records; if it raises `OSError` or `UserError`, none were added."""
        lines = b"".join(map(to_line, records))
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            self._file = AppendOnlyFile(self.path, "backlog")
            lines = (json.dumps(self._header).encode() + b"\n" if is_new else b"") + lines
        self._file.append(lines)
        self._size += len(lines)

    def header(self) -> dict[str, Any]:
        """The header, from which the sink can be recreated.

        Raises:
            UserError: this is not a backlog file.
        """
        try:
            with opened(self.path, "a file of a backlog") as file:
                header = json.loads(file.readline(_LONGEST_HEADER))
            if header["backlog"] == FORMAT:
                return dict(header)
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise UserError(
            f"{str(self.path)!r} does not start with the header of a backlog; expected a file that "
            f"mfu_jax wrote to a folder {FOLDER}/; usually another file's path; move it away"
        )

    def read(self, limit: int) -> list[StepRecord]:
        """Up to `limit` records from the first one not yet passed; unreadable lines are skipped."""
        records: list[StepRecord] = []
        self._ends = []
        if not self.path.is_file():
            self._offset = self._size  # somebody removed it
            return records
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            end = self._offset
            for line in iter(lambda: file.readline(_LONGEST_HEADER), b""):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                record = _record(line)
                if record is not None and record.step in self.steps:
                    records.append(record)
                    self._ends.append(end)
                elif not records:
                    self._offset = end
                if len(records) >= limit:
                    break
        return records

    def advance(self, count: int) -> None:
        """Passes the first `count` records of the last `read`."""
        if count:
            self._offset = self._ends[count - 1]
            del self._ends[:count]

    def trim(self) -> None:
        """Removes passed records; then the file if it is empty, and the folder likewise."""
        self.close()
        if self.path.exists():
            if not self.read(1):
                self.path.unlink()
                with contextlib.suppress(OSError):  # another sink's file is there
                    self.path.parent.rmdir()
            elif self._offset or self.steps != ALL_STEPS:
                replace_file(self.path, self._rest(json.dumps(self.header()).encode() + b"\n"))
        self._offset = 0
        self._size = self.path.stat().st_size if self.path.exists() else 0

    def count(self) -> int:
        """Number of records in a file that has been trimmed."""
        if not self.path.exists():
            return 0
        with open(self.path, "rb") as file:
            return sum(1 for _ in file) - 1

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rest(self, header: bytes) -> Iterator[bytes]:
        yield header
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                record = _record(line)
                if record is not None and record.step in self.steps:
                    yield line
