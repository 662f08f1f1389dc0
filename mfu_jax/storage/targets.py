"""Where a run writes: a local file or folder, or a spool that is uploaded to an object store."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mfu_jax.errors import UserError, first_line
from mfu_jax.storage.addresses import Address, check_path, filesystem_of
from mfu_jax.storage.files import local_path, remove_stale, replace_file, unwritable
from mfu_jax.storage.locks import FileLock

_log = logging.getLogger("mfu_jax")

UPLOAD_SECONDS = 60.0
# At most a twentieth of the time is spent on uploads, however large the files grow.
_REST_PER_UPLOAD = 19.0
_RUN_LOG = re.compile(r"\.events\.\d+(\.\d+)?\.jsonl$")


class OutputTarget:
    """A local path, locked until `close`.

    Args:
        path: the file, or the folder.
        what: the setting that names it, for errors.
        lock: the lock's file; None if nobody else can write there.

    Attributes:
        path: where to write.
        place: what was requested: `path`, or an address.
        lock: held until `close`.

    Raises:
        UserError: it cannot be written, or another process writes to it.
    """

    def __init__(self, path: Path, what: str, *, lock: Path | None) -> None:
        self.path = path
        self.place: Path | Address = path
        self.lock = None if lock is None else FileLock(lock, f"{what} {os.fspath(path)!r}")

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Context for opening the files: checks that they are writable, else frees the lock."""
        try:
            yield
            self.check()
        except BaseException:
            self.abandon()
            raise

    def check(self) -> None:
        """Raises `UserError` if written data cannot be stored."""

    def wrote(self) -> None:
        """Called after a write; never raises."""

    def flush(self) -> None:
        """Stores everything written so far."""

    def close(self) -> None:
        """Stores everything and frees the lock."""
        self.abandon()

    def abandon(self) -> None:
        """Frees the lock."""
        if self.lock is not None:
            self.lock.release()


class SpooledTarget(OutputTarget):
    """A local folder whose files are uploaded whole, because object stores cannot append.

    They are uploaded at `flush` (each checkpoint), at `close` and every 60 s in between, less often
    if uploads take long. If a machine is lost, so is what it wrote after its last upload.

    Args:
        address: of the file or folder.
        what: the setting that names it, for errors.
        is_folder: whether the address names a folder.
        keep: whether to continue an existing file or folder (its files whose names end with
            `ending`); otherwise it is renamed to ``….previousN``.
        ending: suffix of the names of our files in the folder.
        monotonic: clock in seconds.

    Raises:
        UserError: the store cannot be reached or written.
    """

    def __init__(
        self,
        address: Address,
        what: str,
        *,
        is_folder: bool,
        keep: bool,
        ending: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._monotonic = monotonic
        self._files, remote = filesystem_of(address, what)
        self._spool = Path(tempfile.mkdtemp(prefix="mfu_jax-spool-"))
        self._remote = remote.rstrip("/") if is_folder else remote.rpartition("/")[0]
        path = self._spool if is_folder else self._spool / address.name
        super().__init__(path, what, lock=None)
        self.place = address
        self._what = what
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._next_upload = monotonic() + UPLOAD_SECONDS
        self._fails = False
        try:
            found = self._find(remote, is_folder, ending)
            if keep:
                self._fetch(found)
            else:
                self._set_aside(found, is_folder)
        except Exception as error:  # of the store's own package
            self.abandon()
            raise _unreachable(address, what, error) from error

    def check(self) -> None:
        try:
            self.flush()
        except Exception as error:
            raise _unreachable(self._address, self._what, error) from error

    def wrote(self) -> None:
        if self._monotonic() < self._next_upload:
            return
        try:
            self.flush()
            self._fails = False
        except Exception as error:
            if not self._fails:
                _log.warning(
                    "%s cannot be uploaded (%s); it is kept in %s and tried again",
                    self._address,
                    first_line(error),
                    self._spool,
                )
            self._fails = True

    def flush(self) -> None:
        started = self._monotonic()
        try:
            for file in sorted(self._spool.rglob("*")):
                status = file.stat()
                version = (status.st_size, status.st_mtime_ns)
                if file.is_file() and self._uploaded.get(file) != version:
                    name = file.relative_to(self._spool).as_posix()
                    self._files.put_file(str(file), f"{self._remote}/{name}")
                    self._uploaded[file] = version
        finally:
            ended = self._monotonic()
            rest = max(UPLOAD_SECONDS, _REST_PER_UPLOAD * (ended - started))
            self._next_upload = ended + rest

    def close(self) -> None:
        try:
            self.flush()
        except Exception as error:
            raise OSError(
                f"{self._address} could not be uploaded ({first_line(error)}); "
                f"what is missing there is kept in {self._spool}; copy it from there"
            ) from error
        self.abandon()

    def abandon(self) -> None:
        shutil.rmtree(self._spool, ignore_errors=True)

    def _find(self, remote: str, is_folder: bool, ending: str) -> list[str]:
        """Our files from earlier runs."""
        self._files.invalidate_cache()
        if not self._files.exists(remote):
            return []
        if not is_folder:
            return [remote]
        found = self._files.ls(remote, detail=False)
        return sorted(name for name in found if name.endswith(ending))

    def _fetch(self, found: Sequence[str]) -> None:
        for name in found:
            self._files.get_file(name, str(self._spool / name.rpartition("/")[2]))

    def _set_aside(self, found: Sequence[str], is_folder: bool) -> None:
        if not found:
            return
        names = {name.rstrip("/") for name in self._files.ls(self._remote, detail=False)}
        base = f"{self._remote}/" if is_folder else f"{found[0]}."
        number = next(n for n in range(1, len(names) + 2) if f"{base}previous{n}" not in names)
        for name in found:
            ending = f"/{name.rpartition('/')[2]}" if is_folder else ""
            self._files.mv(name, f"{base}previous{number}{ending}")
        kept = f"{self._address.rstrip('/')}{'/' if is_folder else '.'}previous{number}"
        _log.warning("%s held an earlier run, which is now %s", self._address, kept)


def file_target(path: str | os.PathLike[str], what: str, *, keep: bool) -> OutputTarget:
    """The target of one file.

    Args:
        path: a local path or an address.
        what: the setting that names it, for errors.
        keep: whether to continue an existing file in a store, or set it aside.

    Raises:
        UserError: it cannot be written, or another process writes to it.
    """
    found = check_path(path, what)
    if isinstance(found, Address):
        return SpooledTarget(found, what, is_folder=False, keep=keep)
    local = local_path(found, what)
    real = Path(os.path.realpath(local))  # the lock is beside the target of a symbolic link
    target = OutputTarget(local, what, lock=real.with_name(f"{real.name}.lock"))
    if target.lock is not None and target.lock.is_sole:
        remove_stale(local)
    return target


def folder_target(
    path: str | os.PathLike[str], what: str, *, keep: bool, ending: str, lock: str
) -> OutputTarget:
    """The target of a folder of files.

    Args:
        path: a local path or an address.
        what: the setting that names it, for errors.
        keep: whether to continue existing files in a store, or set them aside.
        ending: suffix of the names of our files.
        lock: name of the lock file in a local folder.

    Raises:
        UserError: it cannot be written, or another process writes to it.
    """
    found = check_path(path, what)
    if isinstance(found, Address):
        return SpooledTarget(found, what, is_folder=True, keep=keep, ending=ending)
    file = local_path(found / lock, what)
    return OutputTarget(file.parent, what, lock=file)


def write_whole(path: str | os.PathLike[str], what: str, content: bytes) -> None:
    """Writes a whole file atomically: at any moment `path` is the old content or the new.

    Args:
        path: a local path or an address; existing content is replaced.
        what: the setting that names it, for errors.
        content: the file's content.

    Raises:
        UserError: it cannot be written, or holds a run's records.
    """
    found = check_path(path, what)
    if isinstance(found, Address):
        files, remote = filesystem_of(found, what)
        try:
            # Only what may be records is looked for: asking a store takes time.
            beside = _RUN_LOG.search(found) or (
                found.endswith(".jsonl") and files.glob(f"{glob.escape(remote)}.events.*.jsonl")
            )
            if not beside:
                files.pipe_file(remote, content)
        except Exception as error:  # of the store's own package
            raise _unreachable(found, what, error) from error
        if beside:
            raise _has_records(found, what)
        return
    local = _local(found, what)
    try:
        replace_file(local, [content])
    except OSError as error:
        raise unwritable(local, what, error) from error


def check_whole(path: str | os.PathLike[str], what: str) -> None:
    """Checks that `write_whole` can write there, before the work that makes the content.

    A folder is created; a store is not asked, which takes time.

    Raises:
        UserError: as in `write_whole`.
    """
    found = check_path(path, what)
    if not isinstance(found, Address):
        folder = os.path.dirname(os.path.realpath(_local(found, what)))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise unwritable(path, what, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _local(path: Path, what: str) -> Path:
    """The absolute path of a local file that may be replaced, in a folder that exists."""
    local = local_path(path, what)
    file = Path(os.path.realpath(local))
    if file.is_file() and (_RUN_LOG.search(file.name) or [*run_logs(file)]):
        raise _has_records(str(local), what)
    return local


def _has_records(name: str, what: str) -> UserError:
    return UserError(
        f"{what} {name!r} holds a run's records, which would be lost",
        hint="usually the run's file in place of the one to write; pass another path",
    )


def run_logs(path: Path) -> Iterator[Path]:
    """The run logs beside a metrics file."""
    return path.parent.glob(f"{glob.escape(path.name)}.events.*.jsonl")


def _unreachable(address: Address, what: str, error: Exception) -> UserError:
    return UserError(
        f"{what} {address!r} cannot be read or written ({first_line(error)})",
        hint="usually a missing bucket or permission; check the address and the account",
    )
