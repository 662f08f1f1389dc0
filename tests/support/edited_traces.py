"""Edits of a recorded GPU trace: kernels are stretched, put in and taken out, and gaps are made.

All events of all planes go through the same clock, so whatever overlapped still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mfu_jax.util.protobuf import Field, fields
from tests.support.xspace import chunk, number

PS = 10**12


class Kernel(NamedTuple):
    """A kernel or copy on a stream, in seconds from the trace's start."""

    name: str
    start: float
    end: float


@dataclass
class _Event:
    """An event in picoseconds; `rest` are its other fields."""

    metadata: int
    start: int
    end: int
    rest: bytes


@dataclass
class _Line:
    name: str
    origin: int
    events: list[_Event]
    rest: bytes


@dataclass
class _Plane:
    name: str
    lines: list[_Line]
    names: dict[int, str]
    rest: bytes


class EditedTrace:
    """A trace to edit.

    Args:
        path: of the recorded file.
    """

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self._rest = b"".join(raw for field, raw in _parts(data) if field.number != 1)
        planes = [_content(data, field) for field, _ in _parts(data) if field.number == 1]
        self._planes = [_plane(plane) for plane in planes]
        begin = min(line.origin for line in self._lines())
        for line in self._lines():
            for event in line.events:
                event.start += (line.origin - begin) * 1000
                event.end += (line.origin - begin) * 1000
            line.origin = begin

    @property
    def kernels(self) -> list[Kernel]:
        """What ran on the streams, in order."""
        found = [
            Kernel(plane.names[event.metadata], event.start / PS, event.end / PS)
            for plane, line in self._streams()
            for event in line.events
        ]
        return sorted(found, key=lambda kernel: kernel.start)

    def stretch(self, factor_of: Callable[[Kernel], float]) -> None:
        """Makes kernels this many times as long; what follows is later."""
        self._warp([(k.start, k.end, (factor_of(k) - 1) * (k.end - k.start)) for k in self.kernels])

    def delay(self, at: list[float], seconds: float) -> None:
        """Makes a gap before each of these times."""
        self._warp([(begin - 3 / PS, begin - 1 / PS, seconds) for begin in at])

    def insert(self, name: str, at: list[float], seconds: float, *, stream: str = "") -> None:
        """Puts in a kernel at each of these times, in a gap that is made for it.

        Args:
            name: of the kernel or copy.
            at: the times.
            seconds: its length.
            stream: of its own; by default the first one.
        """
        self.delay(at, seconds)
        later = [begin + i * seconds for i, begin in enumerate(sorted(at))]
        self.beside(name, later, seconds, stream=stream)

    def beside(self, name: str, at: list[float], seconds: float, *, stream: str = "") -> None:
        """Puts in a kernel at each of these times, beside whatever runs."""
        plane, line = next(self._streams())
        if stream:
            line = _Line(stream, line.origin, [], chunk(2, stream))
            plane.lines.append(line)
        metadata = max(plane.names) + 1
        plane.names[metadata] = name
        plane.rest += chunk(4, number(1, metadata) + chunk(2, number(1, metadata) + chunk(2, name)))
        for begin in at:
            start = round(begin * PS) + 1
            line.events.append(_Event(metadata, start, start + round(seconds * PS) - 2, b""))
        line.events.sort(key=lambda event: event.start)

    def remove(self, is_gone: Callable[[Kernel], bool]) -> None:
        """Takes kernels out, and their time."""
        gone = [kernel for kernel in self.kernels if is_gone(kernel)]
        self._warp([(k.start, k.end, k.start - k.end) for k in gone])
        for plane, line in self._streams():
            names = {kernel.name for kernel in gone}
            line.events = [e for e in line.events if plane.names[e.metadata] not in names]

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.write_bytes(b"".join(chunk(1, _encode(plane)) for plane in self._planes) + self._rest)

    def _lines(self) -> Iterator[_Line]:
        for plane in self._planes:
            yield from plane.lines

    def _streams(self) -> Iterator[tuple[_Plane, _Line]]:
        for plane in self._planes:
            if plane.name.startswith("/device:GPU:"):
                yield from ((plane, x) for x in plane.lines if x.name.startswith("Stream"))

    def _warp(self, stretches: list[tuple[float, float, float]]) -> None:
        """Adds seconds to the time between pairs of moments."""
        times = np.array([(a * PS, b * PS) for a, b, _ in sorted(stretches)]).reshape(-1)
        added = np.array([extra * PS for *_, extra in sorted(stretches)])
        until = np.cumsum(added)
        later = np.stack([until - added, until], axis=1).reshape(-1)
        for line in self._lines():
            for event in line.events:
                event.start += round(np.interp(event.start, times, later))
                event.end += round(np.interp(event.end, times, later))


def _parts(data: bytes) -> Iterator[tuple[Field, bytes]]:
    """A message's fields, and their bytes with the tag."""
    begin = 0
    for field in fields(data, 0, len(data)):
        yield field, data[begin : field.end]
        begin = field.end


def _content(data: bytes, field: Field) -> bytes:
    return data[field.start : field.end]


def _plane(data: bytes) -> _Plane:
    plane = _Plane("", [], {}, b"")
    for field, raw in _parts(data):
        content = _content(data, field)
        if field.number == 3:
            plane.lines.append(_line(content))
            continue
        plane.rest += raw
        if field.number == 2:
            plane.name = content.decode()
        if field.number == 4:
            entry = {f.number: _content(content, f) for f, _ in _parts(content)}
            metadata = {f.number: (f, _content(entry[2], f)) for f, _ in _parts(entry[2])}
            plane.names[metadata[1][0].value] = metadata[2][1].decode() if 2 in metadata else ""
    return plane


def _line(data: bytes) -> _Line:
    line = _Line("", 0, [], b"")
    for field, raw in _parts(data):
        content = _content(data, field)
        if field.number == 4:
            line.events.append(_event(content))
        elif field.number == 3:
            line.origin = field.value
        else:
            line.rest += raw
            line.name = content.decode() if field.number == 2 else line.name
    return line


def _event(data: bytes) -> _Event:
    values = {field.number: field.value for field, _ in _parts(data)}
    rest = b"".join(raw for field, raw in _parts(data) if field.number not in (1, 2, 3))
    start = values.get(2, 0)
    return _Event(values.get(1, 0), start, start + values.get(3, 0), rest)


def _encode(plane: _Plane) -> bytes:
    out = [plane.rest]
    for line in plane.lines:
        events = [
            chunk(
                4, number(1, e.metadata) + number(2, e.start) + number(3, e.end - e.start) + e.rest
            )
            for e in line.events
        ]
        out.append(chunk(3, b"".join([line.rest, number(3, line.origin), *events])))
    return b"".join(out)
