"""A text file whose last lines are overwritten until they are settled."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MOST_NAMES = 1000


class JournalFile:
    """Settled lines stay; the open ones after them are replaced at each write, all in one call.

    A shorter write is padded with a blank line until the file is truncated, so that readers see
    whole lines, even if the process is killed. The file is locked while its process lives: an
    overlapping process writes another file beside it.

    Args:
        path: ``NAME.jsonl``; if another process writes to it, ``NAME.2.jsonl``, ``.3`` … are used.

    Attributes:
        path: the file actually written.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._descriptor = _locked(path)
        self._offset = self._end = os.fstat(self._descriptor).st_size
        self._first = b""  # the first settled line
        self._open: tuple[bytes, ...] = ()  # the open lines in the file
        self._last: int | None = None  # where the last of them begins
        if self._offset and os.pread(self._descriptor, 1, self._offset - 1) != b"\n":
            self._put(b"\n")  # a torn line stays a line of its own
            self._offset += 1

    def write(self, settled: bytes, *open_lines: bytes) -> None:
        """Settles lines, and replaces the open ones after them, from the first that changed.

        Raises:
            OSError: nothing was settled; the same lines may be passed again.
        """
        before, self._open, self._last = self._open, (), None
        same = 0 if settled else _first_difference(before, open_lines)
        self._replace(b"".join((settled, *open_lines[same:])), sum(map(len, open_lines[:same])))
        self._first = self._first or settled[: settled.find(b"\n") + 1]
        self._offset += len(settled)
        self._open = open_lines
        if open_lines:
            self._last = self._offset + sum(map(len, open_lines[:-1]))

    def overwrite(self, head: bytes) -> bool:
        """Overwrites the beginning of the last open line, in one call; False if there is none.

        Raises:
            OSError: the line may be torn; a later write replaces all open lines.
        """
        if self._last is None:
            return False
        if os.pwrite(self._descriptor, head, self._last) < len(head):
            raise OSError(errno.EIO, "a line was not written whole")
        return True

    def find_again(self) -> None:
        """Recreates the file if it has been deleted or moved.

        The new file has all settled content; after a move, only the first settled line.

        Raises:
            OSError: it cannot be recreated.
        """
        mine = os.fstat(self._descriptor)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(self.path), mine):
                return
        is_kept = mine.st_nlink > 0  # under another name
        content = self._first if is_kept else os.pread(self._descriptor, self._offset, 0)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        path, descriptor = _locked(self.path)
        os.close(self._descriptor)
        self.path, self._descriptor, self._open, self._last = path, descriptor, (), None
        self._offset = self._end = os.fstat(descriptor).st_size
        self._put(content)
        self._offset += len(content)

    def sync(self) -> None:
        """Flushes everything to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file, which frees the lock."""
        os.close(self._descriptor)

    def _replace(self, text: bytes, place: int) -> None:
        """Writes text at `place`, and truncates the file after it."""
        end = self._offset + place + len(text)
        if end >= self._end:
            self._put(text, place)
            return
        self._put(text + b"\n".rjust(self._end - end), place)
        os.ftruncate(self._descriptor, end)
        self._end = end

    def _put(self, text: bytes, place: int = 0) -> None:
        done, begin = 0, self._offset + place
        while done < len(text):  # a nearly full disk takes only a part
            done += os.pwrite(self._descriptor, text[done:], begin + done)
            self._end = max(self._end, begin + done)


def _first_difference(before: Sequence[bytes], after: Sequence[bytes]) -> int:
    """Index of the first changed line; the last old line may have been overwritten."""
    count = max(0, min(len(before) - 1, len(after)))
    return next((i for i in range(count) if before[i] != after[i]), count)


def _locked(path: Path) -> tuple[Path, int]:
    """Opens and locks the file, or the first one beside it that no living process writes to."""
    for number in range(1, _MOST_NAMES):
        name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks
            pass
        return name, descriptor
    raise OSError(f"{_MOST_NAMES} processes write to journals beside it")
