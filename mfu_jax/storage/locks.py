"""One writer at a time: a lock that is released when its process dies."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

from mfu_jax.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("mfu_jax")
_ATTEMPTS = 10


class FileLock:
    """An advisory lock on a file that exists while it is held; it is freed if the holder is killed.

    A second lock in the same process takes it over, with a warning: a logger that was not closed,
    as when a notebook cell is re-run, must not block the next one. A lock that does not protect, as
    where the file system has none, is a warning, too.

    Args:
        path: the lock's file, in an existing folder.
        what: what it protects, for messages.

    Attributes:
        has_superseded: it has taken over an earlier lock of this process.
        is_sole: it protects, and nobody in this process wrote to the file before.
        is_superseded: a later lock of this process has taken it over.
        settle: writes what the holder has not written yet, called before it is taken over.

    Raises:
        UserError: another process holds it; the message names the process.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.has_superseded = self.is_superseded = False
        self.settle: Callable[[], object] | None = None
        self._path = Path(os.path.realpath(path))
        self._what = what
        self._descriptor: int | None = None
        if (earlier := _HELD.get(self._path)) is not None:
            if earlier.settle is not None:
                earlier.settle()
            self._descriptor, earlier._descriptor = earlier._descriptor, None
            self.has_superseded = earlier.is_superseded = True
            _log.warning(
                "%s is still open in this process, by a logger that was not closed, and now "
                "belongs to the new one; close a logger before the next one opens its files, or, "
                "for two steps of a loop, share one: instrument(update, logger=rollout.logger)",
                what,
            )
        else:
            self._acquire()
        _HELD[self._path] = self

    @property
    def is_sole(self) -> bool:
        return self._descriptor is not None and not self.has_superseded

    def renew(self) -> None:
        """Takes the lock again if its file was deleted.

        Raises:
            BlockingIOError: another process has taken it in the meantime.
        """
        if self._descriptor is None or self._is_there(self._descriptor):
            return
        os.close(self._descriptor)
        self._descriptor = None
        try:
            self._acquire()
        except UserError as error:
            raise BlockingIOError(str(error)) from None

    def release(self) -> None:
        """Frees the lock and deletes its file."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # somebody closed it, or the folder is read-only now
                if self._is_there(self._descriptor):
                    self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
        if _HELD.get(self._path) is self:
            del _HELD[self._path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self) -> None:
        if fcntl is None:
            self._unprotected("this system has no file locks")
            return
        try:
            for _ in range(_ATTEMPTS):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                if self._take(descriptor):
                    return
            self._unprotected("its file does not stay")
        except OSError as error:  # read-only, or a network file system without locks
            self._unprotected(error.strerror or str(error))

    def _take(self, descriptor: int) -> bool:
        """Locks an open file; False if its last holder has just deleted it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_there(descriptor):
                os.close(descriptor)
                return False
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"{self._what} is in use by {holder or 'another process'}; expected one writer "
                "at a time",
                hint="usually a run that still goes on; end it, or give another path",
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # a full disk; the lock holds anyway
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return True

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except OSError:
            return False

    def _unprotected(self, reason: str) -> None:
        _log.warning(
            "%s cannot be locked (%s); make sure that only one run writes to it",
            *(self._what, reason),
        )


_HELD: dict[Path, FileLock] = {}


def _forget() -> None:
    """A forked child must not keep the lock when its parent is killed."""
    for lock in _HELD.values():
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
    _HELD.clear()


def _release_all() -> None:
    for lock in list(_HELD.values()):
        lock.release()


# Registered before any logger's own exit handler, so that it runs after it.
atexit.register(_release_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
