"""TensorBoard's file format: checksummed records, truncated at a step when a run resumes."""

from __future__ import annotations

import functools
import math
import operator
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.logger.sinks.last_pass import in_last_pass
from mfu_jax.storage.files import remove_stale, replace_file
from mfu_jax.util.optional_deps import require

# Marks our files in a folder; other writers' files are left alone.
ENDING = ".mfu_jax"
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected (RFC 3720, appendix B.4)
_BLOCK_BYTES = 512
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_INVERTED = bytes(range(255, -1, -1))
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_WALL_TIME = struct.Struct("<BdB")
_HEAD_BYTES = _LENGTH.size + _CRC.size


def framed(*messages: bytes) -> bytes:
    """TFRecords: for each message its length, the length's checksum, the message, its checksum."""
    parts = []
    for message, checksum in zip(messages, crc32c(messages), strict=True):
        length = _LENGTH.pack(len(message))
        parts += [length, _checksum_of_length(length), message, _CRC.pack(_masked(checksum))]
    return b"".join(parts)


def as_field(number: int, message: bytes) -> bytes:
    """A serialised message as a field of another: key, varint length, content."""
    return bytes((number << 3 | 2,)) + _varint(len(message)) + message


def _varint(number: int) -> bytes:
    """Base 128, least significant digits first; negative numbers as 64-bit two's complement."""
    number &= 2**64 - 1
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def event_head(step: int, unix_seconds: float) -> bytes:
    """The fields ``wall_time`` and ``step`` of an ``Event``, which all our steps have."""
    # Event.wall_time = 1, step = 2 (tensorflow/core/util/event.proto)
    return _WALL_TIME.pack(1 << 3 | 1, unix_seconds, 2 << 3) + _varint(step)


class ScalarsForm:
    """A serialised ``Summary`` of scalars, in which only the numbers differ from step to step.

    Args:
        columns: for each scalar, the index of its number in a step's numbers, and its tag.
    """

    def __init__(self, columns: Sequence[tuple[int, str]]) -> None:
        # Summary.value = 1; Value.tag = 1, simple_value = 2 (TensorFlow's summary.proto)
        number = bytes((2 << 3 | 5, 0, 0, 0, 0))
        heads = [as_field(1, as_field(1, tag.encode()) + number)[:-4] for _, tag in columns]
        # Two extra indices, so that `itemgetter` always returns a tuple.
        self._pick = operator.itemgetter(*(place for place, _ in columns), 0, 0)
        self._parts: list[Any] = [part for head in heads for part in (head, 0.0)]
        self._struct = struct.Struct("<" + "".join(f"{len(head)}sf" for head in heads))

    def filled(self, numbers: Iterable[float]) -> bytes:
        """The message with a step's numbers, as float32; so 1e308 is infinite.

        Raises:
            TypeError, ValueError: one of them is not a number.
        """
        parts = self._parts.copy()
        parts[1::2] = self._pick((*numbers, 0.0))[:-2]
        try:
            return self._struct.pack(*parts)
        except (OverflowError, struct.error):  # beyond float32, or not a number
            parts[1::2] = map(_float32, parts[1::2])
            return self._struct.pack(*parts)


def _float32(value: float) -> float:
    number = float(value)
    return number if not abs(number) > _LARGEST_FLOAT32 else math.copysign(math.inf, number)


def cut(path: Path, stop: int, event_class: Any) -> None:
    """Removes from one of our files the events of step `stop` or later, and a torn one.

    Also removes the scalars of steps that the loop went back over.

    Args:
        path: an event file that nobody is writing to.
        stop: first step to drop.
        event_class: the protobuf class ``Event``.
    """
    remove_stale(path)
    kept, is_over, comes_again, found = 0, False, False, array("q")
    with open(path, "rb") as file:
        for end, data in _records(file):
            event = event_class.FromString(data)
            if event.step >= stop:
                is_over = True
                continue
            comes_again |= is_over
            kept = kept if is_over else end
            if _has_scalars(event):
                found.append(event.step)
    marks = in_last_pass(found)
    if comes_again or not all(marks):
        replace_file(path, _lasting(path, stop, event_class, marks))
    elif kept < path.stat().st_size:
        os.truncate(path, kept)


def _lasting(path: Path, stop: int, event_class: Any, marks: Iterable[int]) -> Iterator[bytes]:
    """The events before `stop`; of those with scalars, only the marked ones."""
    is_kept = iter(marks)
    with open(path, "rb") as file:
        for _, data in _records(file):
            event = event_class.FromString(data)
            if event.step < stop and (not _has_scalars(event) or next(is_kept)):
                yield framed(data)


def _has_scalars(event: Any) -> bool:
    return any(value.HasField("simple_value") for value in event.summary.value)


def steps(folder: Path) -> Iterator[int]:
    """The steps with scalars in our event files in a folder."""
    event_class = require(
        "tensorboardX.proto.event_pb2", "the sink 'tensorboard'", install="tensorboardX"
    ).Event
    for path in ours(folder):
        with open(path, "rb") as file:
            for _, data in _records(file):
                event = event_class.FromString(data)
                if _has_scalars(event):
                    yield event.step


def set_aside(folder: Path) -> str:
    """Moves our files of an earlier run to a free ``previousN`` within the folder.

    TensorBoard shows it as a run of its own.

    Returns:
        A note about the move; empty if there are no such files.
    """
    files = ours(folder)
    if not files:
        return ""
    number = next(n for n in range(1, 10**9) if not (folder / f"previous{n}").exists())
    kept = folder / f"previous{number}"
    kept.mkdir()
    for file in files:
        os.replace(file, kept / file.name)
    return f"{folder} held an earlier run, which is now {kept}"


def ours(folder: Path) -> list[Path]:
    """Our event files in a folder."""
    return sorted(file for file in folder.glob(f"*{ENDING}") if file.is_file())


def crc32c(messages: Sequence[bytes]) -> list[int]:
    """The CRC-32C of each message, vectorised: a fraction of the time of a loop over bytes.

    >>> [hex(checksum) for checksum in crc32c([b"123456789", b""])]
    ['0xe3069283', '0x0']
    """
    import numpy as np

    tables, offsets = _tables()
    width = max(map(len, messages), default=0)
    # A CRC of zeros is 0 except for its start value, which is XORed into the first four bytes. So
    # zeros in front of a message change nothing, and pad all messages to the longest one's length.
    rows = b"".join(
        part
        for message in messages
        for part in (bytes(width - len(message)), message[:4].translate(_INVERTED), message[4:])
    )
    places: Any = np.frombuffer(rows, np.uint8).reshape(len(messages), width)
    states: Any = np.zeros(len(messages), "<u4")
    for start in range(-(-width % _BLOCK_BYTES), width, _BLOCK_BYTES):
        block = places[:, max(0, start) : start + _BLOCK_BYTES].copy()
        block[:, :4] ^= states.view(np.uint8).reshape(-1, 4)[:, : block.shape[1]]
        found = tables.take(offsets[-block.shape[1] :] + block)
        states = np.bitwise_xor.reduce(found, axis=1)
    # The part of the start value that does not fit into a message of fewer than four bytes.
    rests = (0xFFFFFFFF >> 8 * len(message) for message in messages)
    return [int(state) ^ rest ^ 0xFFFFFFFF for state, rest in zip(states, rests, strict=True)]


@functools.cache
def _tables() -> tuple[Any, Any]:
    """The contribution of each byte to the checksum, by its distance from the end of a block.

    A CRC is linear: the XOR of the CRCs of each byte alone, followed by zeros.

    Returns:
        Table k at entries 256·k to 256·k + 255, for a byte followed by k others; and the offset
        256·k for each position of a block, from its start.
    """
    import numpy as np

    first: Any = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = (first >> 1) ^ np.where(first & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    tables = np.empty((_BLOCK_BYTES, 256), np.uint32)
    tables[0] = first
    for k in range(1, _BLOCK_BYTES):
        tables[k] = (tables[k - 1] >> 8) ^ first[tables[k - 1] & 0xFF]
    return tables.ravel(), 256 * np.arange(_BLOCK_BYTES - 1, -1, -1)


@functools.lru_cache(maxsize=1024)
def _checksum_of_length(length: bytes) -> bytes:
    return _CRC.pack(_masked(*crc32c([length])))


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The end offset and data of each complete record; stops at a torn or damaged one."""
    end = 0
    while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
        (size,) = _LENGTH.unpack(head[: _LENGTH.size])
        if _CRC.unpack(head[_LENGTH.size :])[0] != _masked(*crc32c([head[: _LENGTH.size]])):
            return
        data = file.read(size)
        checksum = file.read(_CRC.size)
        if len(data) < size or checksum != _CRC.pack(_masked(*crc32c([data]))):
            return
        end += _HEAD_BYTES + size + _CRC.size
        yield end, data
