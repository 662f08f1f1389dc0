"""The one reader of user-named files: regular files of limited size, errors on one line.

A FIFO without a writer hangs its reader, and ``/dev/zero`` has no end, so both are refused.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mfu_jax.errors import UserError

_LONGEST_LINE = 2**24  # bytes; a file with a longer line is not text
_BLOCK_BYTES = 2**20


@contextlib.contextmanager
def opened(path: str | Path, expected: str, most_bytes: float = float("inf")) -> Iterator[BinaryIO]:
    """Opens the file for reading.

    Args:
        path: a regular file, or a link to one.
        expected: what the file should be, for the error message.
        most_bytes: the maximum size.

    Raises:
        UserError: the file is missing, unreadable, not a regular file, or too large.
    """
    try:
        _refuse_irregular(path, expected, most_bytes)
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error.strerror or str(error), expected) from None


def _refuse_irregular(path: str | Path, expected: str, most_bytes: float) -> None:
    try:
        status = os.stat(path)
    except ValueError as error:  # a NUL, or characters that no file's name can have
        is_nul = "\0" in os.fspath(path)
        reason = "its name holds a NUL" if is_nul else f"no name of a file: {error}"
        raise unreadable(path, reason, expected) from None
    if stat.S_ISDIR(status.st_mode):
        raise unreadable(path, os.strerror(errno.EISDIR), expected)
    if not stat.S_ISREG(status.st_mode):
        raise unreadable(path, "not a regular file", expected)
    if status.st_size > most_bytes:
        raise too_large(path, status.st_size, most_bytes, expected)


def read_bytes(path: str | Path, expected: str, most_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        UserError: the file cannot be read, or is too large.
    """
    with opened(path, expected, most_bytes) as file:
        content = file.read(most_bytes + 1)  # files in /proc report size 0, but have content
    if len(content) > most_bytes:
        raise too_large(path, len(content), most_bytes, expected)
    return content


def read_text(path: str | Path, expected: str, most_bytes: int) -> str:
    """The text of a file, without the byte order mark that Windows' editors write.

    Raises:
        UserError: the file cannot be read, exceeds `most_bytes`, or is not UTF-8.
    """
    try:
        return read_bytes(path, expected, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text: {error.reason} at byte {error.start}"
        raise unreadable(path, reason, expected) from None


def line_blocks(file: BinaryIO, path: str | Path, expected: str) -> Iterator[bytes]:
    """An open file in blocks of whole lines; the last line may lack its newline.

    Raises:
        UserError: a line is too long for a text file.
    """
    rest = b""
    while piece := file.read(_BLOCK_BYTES):
        whole = rest + piece
        end = whole.rfind(b"\n") + 1
        rest = whole[end:]
        if len(rest) >= _LONGEST_LINE:
            raise unreadable(path, f"a line of over {_LONGEST_LINE:,} bytes", expected)
        if end:
            yield whole[:end]
    if rest:
        yield rest


def text_lines(block: bytes) -> Iterator[str]:
    """The lines of a block as text; bytes that are not UTF-8 are replaced."""
    yield from io.StringIO(block.decode("utf-8", "replace"), newline=None)


def too_large(path: str | Path, size: int, most_bytes: float, expected: str) -> UserError:
    """The error for a file larger than `most_bytes`."""
    sizes = f"{size / 2**20:,.0f} MiB, more than {most_bytes / 2**20:,.0f}"
    return unreadable(path, sizes, expected)


def unreadable(path: str | Path, reason: str, expected: str) -> UserError:
    """The error for a file that cannot be read.

    Args:
        path: the file.
        reason: why.
        expected: which file was; after a semicolon, the usual cause and the fix.
    """
    expected, _, hint = expected.partition("; ")
    return UserError(f"{str(path)!r} cannot be read ({reason}); expected {expected}", hint=hint)
