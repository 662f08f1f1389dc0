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

from mfu_jax.profiling.trace.wire import Bytes, IntArray, children, fields_of_many
from mfu_jax.util.protobuf import Field, WireError, fields
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
        known = self.plane.stat_names.items()
        ids = {n: [key for key, name in known if name == n] for n in (*numbers, *texts)}
        columns = np.zeros((3, len(self)), np.int64)  # metadata, offset, duration
        stats = {name: np.full(len(self), ABSENT) for name in ids}
        try:
            for begin in range(0, len(self), _CHUNK):
                found = self._read(begin, columns, with_stats=any(ids.values()))
                for name, column in stats.items():
                    rows, _, *values = found[:, np.isin(found[1], ids[name])]
                    column[rows] = self._values(*values, is_text=name in texts)
        except WireError as error:
            raise unreadable(self.trace.path, str(error), _EXPECTED) from None
        metadata, offsets, durations = columns
        starts = offsets + max(self.timestamp_ns - self.trace.epoch_ns, 0) * 1000
        return EventColumns(
            metadata=metadata,
            starts=starts,
            ends=starts + durations,
            numbers={name: stats[name] for name in numbers},
            texts={name: stats[name] for name in texts},
        )

    def _read(self, begin: int, columns: IntArray, *, with_stats: bool) -> IntArray:
        """Reads a chunk of events into their columns.

        Returns:
            Their stats, if asked for, [5, stats]: the event's index, the name's id, the kind of
            value (its field's number), the value, and where its bytes begin.
        """
        chunk, data = slice(begin, begin + _CHUNK), self.trace.data
        parts = [np.zeros((3, 0), np.int64)]
        for found in fields_of_many(data, self.starts[chunk], self.ends[chunk]):
            for number, column in enumerate(columns, 1):
                of = found.of(number)
                column[begin + of.rows] = of.values
            if with_stats:
                of = found.of(4)
                parts.append(np.stack([begin + of.rows, of.starts, of.ends]))
        events, starts, ends = np.concatenate(parts, axis=1)
        stats = np.zeros((5, len(events)), np.int64)
        stats[0] = events
        for found in fields_of_many(data, starts, ends):
            is_name = found.numbers == 1
            stats[1, found.rows[is_name]] = found.values[is_name]
            rest = np.stack([found.numbers, found.values, found.starts])[:, ~is_name]
            stats[2:, found.rows[~is_name]] = rest
        return stats

    def _values(
        self, kinds: IntArray, values: IntArray, begins: IntArray, *, is_text: bool
    ) -> IntArray:
        """Keys of texts, or numbers, which annotations write as text."""

        def of_text(text: str) -> int:
            if is_text:
                return self.trace.key(text)
            return int(text) if text.lstrip("-").isdecimal() else ABSENT

        is_number = (kinds == 3) | (kinds == 4)
        out = np.where(is_number & (not is_text), values, ABSENT)
        is_reference = kinds == 7
        for key in np.unique(values[is_reference]).tolist():
            out[is_reference & (values == key)] = of_text(self.plane.stat_names.get(key, ""))
        for row in np.flatnonzero(kinds == 5):
            begin = int(begins[row])
            text = self.trace.view[begin : begin + int(values[row])]
            out[row] = of_text(bytes(text).decode(errors="replace"))
        return out
