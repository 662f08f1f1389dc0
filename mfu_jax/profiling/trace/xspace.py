"""`.xplane.pb` files: planes, lines and events as columns, names as tables.

The messages are those of tsl/profiler/protobuf/xplane.proto. Events stay in the file until
requested: a line of five million takes seconds, and tens of bytes per event.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mfu_jax.profiling.trace.wire import (
    Bytes,
    Field,
    IntArray,
    WireError,
    children,
    fields,
    fields_of_many,
)
from mfu_jax.util.user_files import opened, unreadable

_EXPECTED = (
    "an .xplane.pb file of jax.profiler; usually another file, or a trace that was not ended; pass "
    "the run's folder, or trace again"
)
_CHUNK = 1 << 18  # events whose stats are read at once
_EPOCHS = 10**15  # ns: larger timestamps count from 1970, smaller ones from the trace's start
ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Metadata:
    """What events of one kind share.

    Attributes:
        name: the events' name; on TPUs, the text of an HLO instruction.
        display_name: the short name, if there is one.
        stats: name → value.
    """

    name: str
    display_name: str
    stats: Mapping[str, Any]


_UNKNOWN = Metadata("", "", {})
_Parts = defaultdict[int, list[Field]]


@dataclass(frozen=True, kw_only=True)
class EventColumns:
    """Events of one line, in the order of the file.

    Attributes:
        metadata: keys of `XPlane.metadata`.
        starts: picoseconds since `Trace.epoch_ns`.
        ends: the same.
        numbers: one column per requested integer stat; `ABSENT` where an event lacks it.
        texts: one column per requested text stat, of keys of `Trace.texts`; `ABSENT` likewise.
    """

    metadata: IntArray
    starts: IntArray
    ends: IntArray
    numbers: Mapping[str, IntArray]
    texts: Mapping[str, IntArray]


class Trace:
    """A file of planes.

    Args:
        path: the file's path.

    Attributes:
        epoch_ns: origin of all times.
        planes: in file order.
        texts: values of text stats, by key.

    Raises:
        UserError: the file is unreadable, truncated, empty, or not a trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path, _EXPECTED) as file:
            try:
                self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:  # an empty file cannot be mapped
                raise unreadable(path, "it is empty", _EXPECTED) from None
        self.view = memoryview(self.mapped)
        self.data: Bytes = np.frombuffer(self.mapped, np.uint8)
        self.texts: list[str] = []
        self._keys: dict[str, int] = {}
        try:
            self.planes = [
                XPlane(self, f) for f in fields(self.view, 0, len(self.view)) if f[0] == 1
            ]
            epochs = [
                line.timestamp_ns for plane in self.planes for line in plane.lines if len(line)
            ]
        except (WireError, UnicodeDecodeError) as error:
            raise unreadable(path, str(error), _EXPECTED) from None
        if not self.planes:
            raise unreadable(path, "it has no planes", _EXPECTED)
        self.epoch_ns = min((ns for ns in epochs if ns >= _EPOCHS), default=0)

    def bytes(self, field: Field) -> bytes:
        """The value of a length-delimited field."""
        return bytes(self.view[field.start : field.end])

    def text(self, field: Field) -> str:
        """The value of a length-delimited field, as text."""
        return self.bytes(field).decode(errors="replace")

    def parts(self, message: Field) -> _Parts:
        """The fields of a message, by number."""
        found: _Parts = defaultdict(list)
        for field in fields(self.view, message.start, message.end):
            found[field.number].append(field)
        return found

    def text_in(self, parts: _Parts, number: int) -> str:
        """The text of a message's field; empty if it has none."""
        return self.text(parts[number][-1]) if parts[number] else ""

    def key(self, text: str) -> int:
        """A text's key in `texts`."""
        key = self._keys.setdefault(text, len(self.texts))
        if key == len(self.texts):
            self.texts.append(text)
        return key


class XPlane:
    """A device, a host, or a place for metadata.

    Attributes:
        name: such as ``/device:TPU:0`` and ``/host:CPU``.
        metadata: its events' metadata, by id.
        stats: the plane's stats, by name.
        lines: threads, streams, or views of a device.
    """

    def __init__(self, trace: Trace, plane: Field) -> None:
        self.trace = trace
        parts = trace.parts(plane)
        self.name = trace.text_in(parts, 2)
        self.stat_names = {key: trace.text_in(named, 2) for key, named in self._entries(parts[5])}
        self.metadata = {key: self._metadata(about) for key, about in self._entries(parts[4])}
        self.stats = dict(map(self._stat, parts[6]))
        self.lines = [XLine(self, field) for field in parts[3]]

    def about(self, kind: int) -> Metadata:
        """The metadata of one kind of event; empty if the file has none."""
        return self.metadata.get(kind, _UNKNOWN)

    def _entries(self, entries: Iterable[Field]) -> Iterator[tuple[int, _Parts]]:
        """Keys and messages of a map."""
        for entry in entries:
            parts = self.trace.parts(entry)
            for value in parts[2]:
                yield sum(key.value for key in parts[1]), self.trace.parts(value)

    def _metadata(self, parts: _Parts) -> Metadata:
        text = self.trace.text_in
        return Metadata(text(parts, 2), text(parts, 4), dict(map(self._stat, parts[5])))

    def _stat(self, stat: Field) -> tuple[str, Any]:
        """A stat's name and value: a number, text, or bytes."""
        name = ""
        value: Any = None
        for field in fields(self.trace.view, stat.start, stat.end):
            if field.number == 1:
                name = self.stat_names.get(field.value, "")
            elif field.number == 2:
                value = float(np.array(field.value, np.uint64).view(np.float64))
            elif field.number in (3, 4):
                value = (
                    field.value - (field.value >> 63 << 64) if field.number == 4 else field.value
                )
            elif field.number == 5:
                value = self.trace.text(field)
            elif field.number == 6:
                value = self.trace.bytes(field)
            elif field.number == 7:
                value = self.stat_names.get(field.value, "")
        return name, value


class XLine:
    """A thread, a stream, or a view of a device.

    Attributes:
        name: such as ``python``, ``XLA Ops``, ``Stream #14(Compute)``.
        timestamp_ns: origin of its events' offsets.
        starts: where its events begin in the file.
    """

    def __init__(self, plane: XPlane, line: Field) -> None:
        self.plane = plane
        self.trace = plane.trace
        self.name = ""
        self.timestamp_ns = 0
        self.starts, self.ends = children(self.trace.view, line.start, line.end, 4)
        # The other fields come before or after the events; what lies between is skipped.
        for field in self._other_fields(line):
            if field.number == 2:
                self.name = self.trace.text(field)
            elif field.number == 3:
                self.timestamp_ns = field.value
            elif field.number == 11:
                self.name = self.trace.text(field) or self.name

    def _other_fields(self, line: Field) -> Iterator[Field]:
        view = self.trace.view
        if not self.starts.size:
            yield from fields(view, line.start, line.end)
            return
        for field in fields(view, line.start, line.end):
            if field.number == 4:
                break
            yield field
        yield from fields(view, int(self.ends[-1]), line.end)

    def __len__(self) -> int:
        return len(self.starts)

    def events(self, numbers: Sequence[str] = (), texts: Sequence[str] = ()) -> EventColumns:
        """Its events, with the requested stats.

        Args:
            numbers: names of stats that are integers.
            texts: names of stats that are text.

        Raises:
            UserError: the file is damaged.
        """
        reader = _EventReader(self, numbers, texts)
        try:
            for begin in range(0, len(self), _CHUNK):
                reader.read(begin, begin + _CHUNK)
        except WireError as error:
            raise unreadable(self.trace.path, str(error), _EXPECTED) from None
        return reader.events()


class _EventReader:
    """Reads the events of a line into columns, chunk by chunk."""

    def __init__(self, line: XLine, numbers: Sequence[str], texts: Sequence[str]) -> None:
        count = len(line)
        self.line = line
        self.trace = line.trace
        self.metadata = np.zeros(count, np.int64)
        self.offsets = np.zeros(count, np.int64)
        self.durations = np.zeros(count, np.int64)
        self.numbers = {name: np.full(count, ABSENT) for name in numbers}
        self.texts = {name: np.full(count, ABSENT) for name in texts}
        self.ids: dict[str, list[int]] = {}
        for key, name in line.plane.stat_names.items():
            self.ids.setdefault(name, []).append(key)
        self.references: dict[int, int] = {}

    def events(self) -> EventColumns:
        base_ns = max(self.line.timestamp_ns - self.trace.epoch_ns, 0)
        starts = self.offsets + base_ns * 1000
        return EventColumns(
            metadata=self.metadata,
            starts=starts,
            ends=starts + self.durations,
            numbers=self.numbers,
            texts=self.texts,
        )

    def read(self, begin: int, end: int) -> None:
        line, data = self.line, self.trace.data
        wanted = any(name in self.ids for name in (*self.numbers, *self.texts))
        rows: list[IntArray] = []
        starts: list[IntArray] = []
        ends: list[IntArray] = []
        for found in fields_of_many(data, line.starts[begin:end], line.ends[begin:end]):
            for number, column in enumerate((self.metadata, self.offsets, self.durations), 1):
                of = found.of(number)
                column[begin + of.rows] = of.values
            if wanted:
                stats = found.of(4)
                rows.append(begin + stats.rows)
                starts.append(stats.starts)
                ends.append(stats.ends)
        if rows:
            self._read_stats(*map(np.concatenate, (rows, starts, ends)))

    def _read_stats(self, rows: IntArray, starts: IntArray, ends: IntArray) -> None:
        ids = np.zeros(len(rows), np.int64)
        kinds = np.zeros(len(rows), np.int64)
        values = np.zeros(len(rows), np.int64)
        begins = np.zeros(len(rows), np.int64)
        for found in fields_of_many(self.trace.data, starts, ends):
            of = found.of(1)
            ids[of.rows] = of.values
            others = found.numbers != 1
            at = found.rows[others]
            kinds[at], values[at] = found.numbers[others], found.values[others]
            begins[at] = found.starts[others]
        for name, column in self.numbers.items():
            chosen = np.flatnonzero(np.isin(ids, self.ids.get(name, [])))
            column[rows[chosen]] = self._as_numbers(kinds[chosen], values[chosen], begins[chosen])
        for name, column in self.texts.items():
            chosen = np.flatnonzero(np.isin(ids, self.ids.get(name, [])))
            column[rows[chosen]] = self._as_texts(kinds[chosen], values[chosen], begins[chosen])

    def _as_numbers(self, kinds: IntArray, values: IntArray, begins: IntArray) -> IntArray:
        plain = (kinds == 3) | (kinds == 4)
        out = np.where(plain, values, ABSENT)
        for row in np.flatnonzero(~plain):  # annotations write numbers as text
            text = self._text(int(kinds[row]), int(values[row]), int(begins[row]))
            if text.lstrip("-").isdecimal():
                out[row] = int(text)
        return out

    def _as_texts(self, kinds: IntArray, values: IntArray, begins: IntArray) -> IntArray:
        out = np.full(len(kinds), ABSENT)
        is_reference = kinds == 7
        for key in np.unique(values[is_reference]).tolist():
            text = self.line.plane.stat_names.get(key, "")
            out[is_reference & (values == key)] = self.trace.key(text)
        for row in np.flatnonzero(kinds == 5):
            out[row] = self.trace.key(self._text(5, int(values[row]), int(begins[row])))
        return out

    def _text(self, kind: int, value: int, begin: int) -> str:
        if kind == 7:
            return self.line.plane.stat_names.get(value, "")
        if kind != 5:
            return ""
        return bytes(self.trace.view[begin : begin + value]).decode(errors="replace")
