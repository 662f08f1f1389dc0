"""Files that stay readable whatever happens: killed processes, full disks, deleted folders."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mfu_jax.errors import UserError
from mfu_jax.storage.locks import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("mfu_jax")

_LONGEST_NAME_BYTES = 255
_LONGEST_SUFFIX = len(".summary.json.4194304.tmp")
_PIECE_BYTES = 2**20


@dataclasses.dataclass(eq=False)
class AppendOnlyFile:
    """A file that grows only in whole pieces: each is written completely or not at all.

    If the file is deleted while open, it is rewritten with all its content; if it is renamed or
    replaced, a new one is started. Either logs one warning at the next piece.

    Args:
        path: the file.
        what: the setting that names it, for errors.
        header: first bytes of a new file, also of one begun because the first was moved away.
        lock: held by this writer; a file is not recreated over another writer's.
        fsync_seconds: longest time between two flushes to disk while pieces arrive, which is what
            a power cut may lose. 0: after every piece; negative: only in `sync`.
        monotonic: clock in seconds.

    Raises:
        UserError: the path cannot be written to.
    """

    path: Path
    what: str
    _: dataclasses.KW_ONLY
    header: bytes = b""
    lock: FileLock | None = None
    fsync_seconds: float = -1.0
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._synced_at = self.monotonic()
        self._fsync_fails = self._is_torn = False
        try:
            self._file = _open_regular(self.path)
            self._size = self._file.seek(0, os.SEEK_END)
            # Without stable inode numbers, a renamed file cannot be distinguished from this one.
            mine = os.fstat(self._file.fileno())
            self._has_identity = os.path.samestat(os.stat(self.path), mine)
        except OSError as error:
            raise unwritable(self.path, self.what, error) from error

    def append(self, piece: bytes) -> None:
        """Appends `piece`, or raises `OSError` and leaves the file unchanged."""
        self.find_again()
        self._write(piece if self._size else self.header + piece)
        if 0 <= self.fsync_seconds <= self.monotonic() - self._synced_at:
            self._sync_quietly()

    def find_again(self) -> None:
        """Ensures that the path is still this file; if not, recreates it and logs what was lost.

        Raises:
            OSError: it cannot be recreated.
        """
        if self.lock is not None and self.lock.is_superseded:
            return  # a later logger of this process owns the path; this one keeps its file
        mine = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(self.path)
            if os.path.samestat(found, mine) or not self._has_identity:
                self._check_size(mine.st_size)
                return
        self._recreate(mine.st_nlink)

    def sync(self) -> None:
        """Flushes everything to disk."""
        self.find_again()
        os.fsync(self._file.fileno())
        self._synced_at = self.monotonic()

    def touch(self, unix_seconds: float) -> None:
        """Sets the file's time, a sign of life that costs no bytes."""
        nanoseconds = int(1e9 * unix_seconds)
        os.utime(self._file.fileno(), ns=(nanoseconds, nanoseconds))

    def is_alone(self) -> bool:
        """Locks the file until it is closed; False if another process, or logger, has it."""
        try:
            if fcntl is not None:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def cut_torn_line(self) -> None:
        """Cuts the last line if it has no end, as after a kill."""
        for begin in range(self._size, 0, -_PIECE_BYTES):
            start = max(0, begin - _PIECE_BYTES)
            end = os.pread(self._file.fileno(), begin - start, start).rfind(b"\n") + 1
            if end or not start:
                os.ftruncate(self._file.fileno(), start + end)
                self._size = self._file.seek(0, os.SEEK_END)
                return

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, piece: bytes) -> None:
        if self._is_torn:
            os.ftruncate(self._file.fileno(), self._size)
        self._is_torn = True
        try:
            written = self._file.write(piece)
            while written < len(piece):  # a nearly full disk accepts only a part
                written += self._file.write(piece[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._is_torn = False
        self._size += len(piece)

    def _sync_quietly(self) -> None:
        """Flushes to disk without raising, so that the caller does not rewrite the piece."""
        try:
            os.fsync(self._file.fileno())
            self._fsync_fails = False
        except OSError as error:
            if not self._fsync_fails:
                _log.warning("%s %s is written, but not on disk: %s", self.what, self.path, error)
            self._fsync_fails = True
        self._synced_at = self.monotonic()

    def _check_size(self, size: int) -> None:
        if self._is_torn:
            return
        if size < self._size:
            _log.warning(
                "%s %s was cut from %d to %d bytes by another program",
                *(self.what, self.path, self._size, size),
            )
        self._size = size

    def _recreate(self, links: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.lock is not None:
            self.lock.renew()
        if links or self.path.exists():
            fate = "was moved or replaced by another program: the next steps go to the new file"
        else:
            replace_file(self.path, _pieces(self._file))
            fate = f"was deleted: it is written again, with all {self._size} bytes that it held"
        old, self._file = self._file, _open_regular(self.path)
        old.close()
        self._size, self._is_torn = self._file.seek(0, os.SEEK_END), False
        _log.warning("%s %s %s", self.what, self.path, fate)


def local_path(path: Path, what: str) -> Path:
    """Returns the absolute `path` of a file to write, after creating its folder.

    Raises:
        UserError: its name is too long, it is not a regular file, or its folder cannot be created.
    """
    size = len(os.fsencode(path.name))
    if size + _LONGEST_SUFFIX > _LONGEST_NAME_BYTES:
        raise UserError(
            f"{what} {path.name[:40]!r}… has a name of {size} bytes; expected at most "
            f"{_LONGEST_NAME_BYTES - _LONGEST_SUFFIX}, which leaves room for the files beside it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_special(path)
    except OSError as error:
        raise unwritable(path, what, error) from error
    return path.absolute()  # the loop may change the working directory


def unwritable(path: str | os.PathLike[str], what: str, error: OSError) -> UserError:
    """The error for a `path` that cannot be written to from the start."""
    text = os.fspath(path)
    shown = text if len(text) <= 300 else f"{text[:150]}…{text[-100:]}"
    return UserError(
        f"{what} {shown!r} cannot be written ({error.strerror or error})",
        hint="usually a typo, or a full or read-only disk; pass another path",
    )


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes `pieces` atomically: at any moment `path` is either the old file or the new one.

    A symbolic link is kept and its target replaced.

    Raises:
        OSError: it cannot be written, or is something other than a file.
    """
    target = Path(os.path.realpath(path))
    _refuse_special(target)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale(path: Path) -> None:
    """Deletes leftovers of `replace_file` in killed processes; call it only under the lock."""
    target = Path(os.path.realpath(path))
    for name in (path, target):
        for found in name.parent.glob("*.tmp"):
            kept, _, number = found.name.removesuffix(".tmp").rpartition(".")
            if number.isdecimal() and f"{kept}.".startswith(f"{name.name}."):
                found.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Renames an earlier run's file to a free ``<path>.previousN``, and says so.

    A symbolic link is kept and its target renamed.
    """
    target = Path(os.path.realpath(path))
    kept = free_name(target)
    os.replace(target, kept)
    _log.warning("%s held an earlier run, which is now %s", path, kept)


def free_name(path: Path) -> Path:
    """The first ``<path>.previousN`` that does not exist."""
    names = (path.with_name(f"{path.name}.previous{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def sync_folder(folder: Path) -> None:
    """Makes a folder's new and renamed files survive a power cut, if the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_regular(path: Path) -> io.FileIO:
    """Opens a file for appending and reading; creates it if missing.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    _refuse_special(path)
    is_new = not path.exists()
    # Non-blocking: what was a file a moment ago may now be a FIFO without a reader.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    if is_new:
        sync_folder(path.parent)
    return file


def _refuse_special(path: Path) -> None:
    """Raises `OSError` if `path` is something other than a regular file."""
    with contextlib.suppress(FileNotFoundError):
        if kind := _KINDS.get(stat.filemode(os.stat(path).st_mode)[0]):
            raise OSError(f"it is {kind}, not a file")


_KINDS = {"d": "a folder", "p": "a FIFO", "s": "a socket", "c": "a device", "b": "a device"}
"""What is no regular file, by the first letter in ``ls -l``."""


def _pieces(file: io.FileIO) -> Iterator[bytes]:
    """Yields the whole content of an open file, even if it has been deleted."""
    offset = 0
    while piece := os.pread(file.fileno(), _PIECE_BYTES, offset):
        offset += len(piece)
        yield piece
