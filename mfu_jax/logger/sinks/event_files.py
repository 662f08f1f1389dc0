"""TensorBoard's file format: records with checksums, cut at a step when a run resumes."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.parts import load_part

# Ours among the files of a folder: other writers' files are left alone.
ENDING = ".mfu_jax"
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected (RFC 3720, appendix B.4)
_BLOCK_BYTES = 512
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _LENGTH.size + _CRC.size


def framed(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, the data, its checksum."""
    length = _LENGTH.pack(len(data))
    return length + _checksum_of_length(length) + data + _CRC.pack(_masked(data))


def as_field(number: int, message: bytes) -> bytes:
    """A serialised message as a field of another: key, length in base 128, content."""
    size, length = len(message), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes((number << 3 | 2, *length, size)) + message


def cut(path: Path, stop: int, event_class: Any) -> None:
    """Ends a file of ours just before its first event of step `stop` or later, or a torn one.

    Args:
        path: an event file; its steps never decrease.
        stop: first step to drop.
        event_class: the protobuf class ``Event``.
    """
    kept = 0
    with open(path, "rb") as file:
        for end, data in _records(file):
            if event_class.FromString(data).step >= stop:
                break
            kept = end
    if kept < path.stat().st_size:
        os.truncate(path, kept)


def steps(folder: Path) -> Iterator[int]:
    """The steps with scalars in our event files of a folder."""
    event_class = load_part(
        "tensorboardX.proto.event_pb2", "the sink 'tensorboard'", install="tensorboardX"
    ).Event
    for path in ours(folder):
        with open(path, "rb") as file:
            for _, data in _records(file):
                event = event_class.FromString(data)
                if any(value.HasField("simple_value") for value in event.summary.value):
                    yield event.step


def set_aside(folder: Path) -> str:
    """Moves our files of an earlier run to a free ``previousN`` within the folder.

    TensorBoard shows it as a run of its own.

    Returns:
        A note that says so; empty if there are none.
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


def crc32c(data: bytes) -> int:
    """The CRC-32C of `data`, a tenth of the time of a loop over its bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    import numpy as np

    tables, offsets = _tables()
    state = 0xFFFFFFFF
    for start in range(0, len(data), _BLOCK_BYTES):
        block = bytearray(data[start : start + _BLOCK_BYTES])
        size = len(block)
        for i in range(min(4, size)):
            block[i] ^= (state >> 8 * i) & 0xFF
        places = offsets[_BLOCK_BYTES - size :] + np.frombuffer(block, np.uint8)
        state = (state >> 8 * size) ^ int(np.bitwise_xor.reduce(tables[places]))
    return state ^ 0xFFFFFFFF


@functools.cache
def _tables() -> tuple[Any, Any]:
    """What each byte adds to the checksum, by its distance from the end of a block.

    A CRC is linear: it is the XOR of what each byte gives alone, followed by zeros.

    Returns:
        Table k at rows 256·k to 256·k + 255, for a byte followed by k others; and 256·k for each
        place of a block, from its start.
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
    return _CRC.pack(_masked(length))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Where each complete record ends, and its data; stops at a torn or damaged one."""
    end = 0
    while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
        (size,) = _LENGTH.unpack(head[: _LENGTH.size])
        if _CRC.unpack(head[_LENGTH.size :])[0] != _masked(head[: _LENGTH.size]):
            return
        data = file.read(size)
        checksum = file.read(_CRC.size)
        if len(data) < size or checksum != _CRC.pack(_masked(data)):
            return
        end += _HEAD_BYTES + size + _CRC.size
        yield end, data
