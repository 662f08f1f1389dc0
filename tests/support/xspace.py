"""Writes `.xplane.pb` files: planes, lines and events as a test wants them, in the wire format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def chunk(field: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(content)) + content


class Plane:
    """A plane under construction: names of events and of stats get ids as they come.

    >>> plane = Plane("/device:TPU:0")
    >>> plane.line("XLA Ops", [("%f = f32[] fusion()", 10, 5, {})])
    """

    def __init__(self, name: str, **stats: Any) -> None:
        self.parts = [chunk(2, name)]
        self.events: dict[str, int] = {}
        self.stats: dict[str, int] = {}
        self.of_events: dict[str, Mapping[str, Any]] = {}
        self.parts += [chunk(6, self.stat(key, value)) for key, value in stats.items()]

    def event_id(self, name: str, **stats: Any) -> int:
        if stats:
            self.of_events[name] = stats
        return self.events.setdefault(name, len(self.events) + 1)

    def stat_id(self, name: str) -> int:
        return self.stats.setdefault(name, len(self.stats) + 1)

    def stat(self, name: str, value: Any) -> bytes:
        if isinstance(value, bytes):
            content = chunk(6, value)
        elif isinstance(value, str):  # by reference, as the profiler does
            content = number(7, self.stat_id(value))
        else:
            content = number(4, value)
        return number(1, self.stat_id(name)) + content

    def event(self, name: str, start_ps: int, length_ps: int, stats: Mapping[str, Any]) -> bytes:
        parts = [number(1, self.event_id(name)), number(2, start_ps), number(3, length_ps)]
        return b"".join([*parts, *(chunk(4, self.stat(k, v)) for k, v in stats.items())])

    def line(self, name: str, events: Iterable[Sequence[Any]], *, timestamp_ns: int = 1000) -> None:
        """Events are (name, start, length, stats), in picoseconds from `timestamp_ns`."""
        encoded = b"".join(chunk(4, self.event(*event)) for event in events)
        self.parts.append(chunk(3, chunk(2, name) + number(3, timestamp_ns) + encoded))

    def encode(self) -> bytes:
        metadata = []
        for name, key in self.events.items():
            stats = [chunk(5, self.stat(k, v)) for k, v in self.of_events.get(name, {}).items()]
            content = b"".join([number(1, key), chunk(2, name), *stats])
            metadata.append(chunk(4, number(1, key) + chunk(2, content)))
        for name, key in self.stats.items():
            content = number(1, key) + chunk(2, name)
            metadata.append(chunk(5, number(1, key) + chunk(2, content)))
        return b"".join([*self.parts, *metadata])


def space(*planes: Plane) -> bytes:
    """The bytes of a file."""
    return b"".join(chunk(1, plane.encode()) for plane in planes)
