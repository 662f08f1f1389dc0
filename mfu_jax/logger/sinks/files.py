"""Files that stay readable whatever happens: killed processes, full disks, resumed runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from mfu_jax.errors import UserError


class AppendOnlyFile:
    """A file that grows only in whole pieces: each is written completely, or not at all.

    Args:
        path: the file; its folder is created.
        what: the setting that names it, for errors.

    Raises:
        UserError: the path cannot be written to.
    """

    def __init__(self, path: Path, what: str) -> None:
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise unwritable(path, what, error) from error
        self._good_size = self._file.seek(0, os.SEEK_END)

    def append(self, piece: bytes) -> None:
        """Adds `piece`, or raises `OSError` and leaves the file as it was."""
        try:
            written = self._file.write(piece)
            while written < len(piece):  # a nearly full disk takes only a part
                written += self._file.write(piece[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), self._good_size)
            raise
        self._good_size += len(piece)

    def sync(self) -> None:
        """Flushes everything to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """`path`, after its folder has been created.

    Raises:
        UserError: it is not on this machine, it is a folder itself, or its folder cannot be
            created.
    """
    if "://" in os.fspath(path):
        raise UserError(
            f"{what} {os.fspath(path)!r} is not a path on this machine; expected a local or "
            f"mounted folder; usually a bucket's address; write locally and copy, or mount it"
        )
    if Path(path).is_dir():
        raise unwritable(path, what, IsADirectoryError("it is a folder, not a file"))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, what, error) from error
    return Path(path)


def unwritable(path: str | os.PathLike[str], what: str, error: OSError) -> UserError:
    """The error to raise if `path` cannot be written to from the start."""
    return UserError(
        f"{what} {os.fspath(path)!r} cannot be written ({error.strerror or error}); expected a "
        f"path that this user may write to; usually a typo, or a full or read-only disk; pass "
        f"another path"
    )


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes `pieces` so that at any moment `path` is either the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside(path: Path) -> str:
    """Renames an earlier run's file to a free ``<path>.previousN``; returns a note that says so."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.previous{number}")
        if not kept.exists():
            break
    os.replace(path, kept)
    return f"{path} held an earlier run, which is now {kept}"
