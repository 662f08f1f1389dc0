"""Protobuf's wire format.

https://protobuf.dev/programming-guides/encoding. A message is a list of (tag, value); the tag is
``number << 3 | kind``; kind 0 is a varint, 1 eight bytes, 2 a length and that many bytes, 5 four.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

LONGEST_VARINT = 10
VARINT, EIGHT, LENGTH, FOUR = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are not a protobuf message: truncated, or another format."""


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        number: the field's number.
        value: a varint's value; the raw bits of fixed kinds; the length otherwise.
        start: where the bytes of its value begin.
        end: where they end.
    """

    number: int
    value: int
    start: int
    end: int


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """A varint's value, and the index after it."""
    value = shift = 0
    for _ in range(LONGEST_VARINT):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise WireError("a number of more than ten bytes")


def fields(data: bytes | memoryview, start: int, end: int) -> Iterator[Field]:
    """The fields of the message at ``data[start:end]``.

    Raises:
        WireError: the bytes are not a message.
    """
    at = start
    while at < end:
        try:
            tag, at = read_varint(data, at)
            kind = tag & 7
            if tag < 8:
                raise WireError("a field of number 0")
            begin, value = at, 0
            if kind == VARINT:
                value, at = read_varint(data, at)
            elif kind == LENGTH:
                value, begin = read_varint(data, at)
                at = begin + value
            elif kind in (EIGHT, FOUR):
                at += 8 if kind == EIGHT else 4
                value = int.from_bytes(data[begin:at], "little")
            else:
                raise WireError(f"a field of kind {kind}")
        except IndexError:
            raise WireError("it ends within a field") from None
        if at > end:
            raise WireError("a field reaches beyond its message")
        yield Field(tag >> 3, value, begin, at)


def part(message: bytes, number: int) -> bytes:
    """The bytes of a message's field; empty if it has none, or is no message.

    >>> part(bytes([8, 150, 1, 18, 2]) + b"hi", 2)
    b'hi'
    """
    try:
        for field in fields(message, 0, len(message)):
            if field.number == number:
                return message[field.start : field.end]
    except WireError:
        pass
    return b""
