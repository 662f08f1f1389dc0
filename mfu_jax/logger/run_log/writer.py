"""The log's own follower, which writes its files: the records, and the events of this process."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfu_jax.logger.run_log import events
from mfu_jax.logger.run_log.events import Event
from mfu_jax.logger.run_log.follower import Follower
from mfu_jax.logger.sinks.base import Sink, StepRecord
from mfu_jax.storage.addresses import Address
from mfu_jax.storage.files import AppendOnlyFile
from mfu_jax.storage.targets import OutputTarget, SpooledTarget
from mfu_jax.util.optional_deps import versions_of

if TYPE_CHECKING:
    from mfu_jax.logger.run_log.run_log import RunLog

_MOST_PROCESSES = 1000
_LONGEST_COMMAND = 2000
# Part of a command that no file may have: Slack's, Discord's and Mattermost's have "hook" in them.
_SECRET = re.compile(r"(webhook[_-]url[= ])\S+|https?://\S*hook\S*")
# A run that cannot write at all says so itself after importing JAX, and ends.
_PATIENCE_SECONDS = 20.0


class LogWriter(Follower):
    """The log's own follower, which writes its files and shows that the process is alive.

    Args:
        log: the log.
        events_file: where events go.

    Attributes:
        records: writes the records, if this process has any.
    """

    def __init__(self, log: RunLog, events_file: EventsFile) -> None:
        super().__init__(log, _NoRecords(), name="run log")
        self.records: Sink | None = None
        self._events_file = events_file
        self._began = self._wrote_at = self._looked_at = self._monotonic()
        self._look_seconds = 0.0
        self.start()

    def add_records(self, sink: Sink) -> None:
        """From now on the records are written by this sink, beside the events."""
        self._sink = self.records = sink
        self.name = type(sink).__name__

    def close(self, timeout: float) -> None:
        """Writes what is left and closes the files, within `timeout` seconds."""
        self._is_last = self._is_over = True
        self._wake.set()
        self._thread.join(timeout)

    def _close(self) -> None:
        super()._close()
        self._call("close", of=self._events_file)

    def _end(self) -> None:
        """Closes the file of records; events may still come."""
        super()._close()
        self._sink, self.records = _NoRecords(), None
        self._retry_seconds = 0.0  # the records that it could not write are given up

    def _run(self) -> None:
        super()._run()
        self._deliver()
        self._close()

    def _sleep(self) -> None:
        super()._sleep()
        if self._monotonic() - self._looked_at >= self._look_seconds:
            self._look()
        else:  # what it is about to write shows life, too
            self._log.settle_compilations()

    def _wait(self, seconds: float | None) -> None:
        """Waits, and shows meanwhile that the process is alive, twenty times a second at first."""
        now = self._monotonic()
        end = math.inf if seconds is None else now + seconds
        while not self._wake.wait(min(self._look_seconds, max(0.0, end - now))):
            self._look()
            if (now := self._looked_at) >= end:
                return

    def _look(self) -> None:
        """Shows life, and notes what only this thread sees: compilations, long waits, silence."""
        log, now = self._log, self._monotonic()
        self._looked_at, self._look_seconds = now, events.alive_seconds(now - self._began)
        self._call("show_life", of=self._events_file)
        log.settle_compilations()
        # A wait for data that lasts longer than the time between two signs of life.
        if (idle := log.idle_seconds()) > self._look_seconds:
            log.begin_wait(idle)
        if now - self._wrote_at > events.QUIET_SECONDS:
            log.event(events.ALIVE)

    def _advance(self, count: int, last: StepRecord | None = None) -> None:
        super()._advance(count, last)
        self._wrote_at = self._monotonic()

    def _flush(self) -> None:
        super()._flush()
        self._call("flush", of=self._events_file)

    def _tell(self, happened: Sequence[Event]) -> None:
        try:
            fsync_seconds = getattr(self._sink, "fsync_seconds", -1.0)
            self._events_file.write_events(happened, fsync_seconds)
        except BaseException as error:
            self._fail(error)
        else:
            self._works()
            self._advance(len(happened))

    @property
    def _is_worth_a_line(self) -> bool:
        waited = self._monotonic() - self._began > _PATIENCE_SECONDS
        return self._events_file.is_open or self._log.has_steps or waited


class _NoRecords(Sink):
    """Stands for the file of records in a process that has none."""

    def write_many(self, records: Sequence[StepRecord]) -> None: ...


class EventsFile:
    """The events of one process.

    It is opened by the first write, and locked while its process lives: one that overlaps with it
    writes ``….events.0.2.jsonl``.

    Args:
        metrics_file: the run's metrics file, or its address; the events are written beside it.
        index: number of this process in the job.
        clock: wall clock in seconds, for the sign of life.
    """

    def __init__(
        self, metrics_file: Path | Address, index: int, clock: Callable[[], float]
    ) -> None:
        self._place = metrics_file.parent / events.events_name(metrics_file.name, index)
        self._clock = clock
        self._start = self._last_sign = b""
        self._file: AppendOnlyFile | None = None
        self._target: OutputTarget | None = None

    @property
    def is_open(self) -> bool:
        """Whether the file could be opened."""
        return self._file is not None

    def write_events(self, happened: Sequence[Event], fsync_seconds: float) -> None:
        """Appends events, or raises having written none; for `fsync_seconds`, see the file."""
        text = b"".join(map(events.line, happened))
        self._start = self._start or text.partition(b"\n")[0] + b"\n"
        if self._file is None:
            self._file = self._opened()
        self._file.fsync_seconds = fsync_seconds
        self._file.append(self._last_sign + text)
        self._last_sign = b""
        self._target_of_run().wrote()

    def show_life(self) -> None:
        """Sets the file's time to now."""
        if self._file is not None:
            self._file.touch(self._clock())
            self._target_of_run().wrote()

    def flush(self) -> None:
        """Flushes everything to disk."""
        if self._file is not None:
            self._file.sync()
            self._target_of_run().flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._target_of_run().close()

    def _opened(self) -> AppendOnlyFile:
        path = self._target_of_run().path
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MOST_PROCESSES):
            name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
            # After a move by another program, a new file begins with the start of the process.
            file = AppendOnlyFile(name, "run log", restart=self._start)
            if file.is_alone():
                if path == self._place:  # else its time is that of a download
                    self._last_sign = _last_sign(name)
                file.cut_torn_line()
                return file
            file.close()
        raise OSError(f"{_MOST_PROCESSES} processes write to run logs beside {path}")

    def _target_of_run(self) -> OutputTarget:
        """Where it is; the folder of a local one may be missing, and a store out of reach."""
        if self._target is None:
            if isinstance(self._place, Address):
                self._target = SpooledTarget(self._place, "run log", is_folder=False, keep=True)
            else:
                self._target = OutputTarget(self._place, "run log", lock=None)
        return self._target


def _last_sign(path: Path) -> bytes:
    """The time of the file as a line: an earlier process set it, and it is about to change."""
    status = path.stat()
    return f'{{"e":"alive","t":{status.st_mtime:.6f}}}\n'.encode() if status.st_size else b""


def start_values(now: float, *, is_real: bool) -> dict[str, Any]:
    """What the first event says of this process.

    Args:
        now: seconds since boot.
        is_real: false: another clock stands in for the real one.
    """
    python, *words = sys.orig_argv or [""]
    command = shlex.join([Path(python).name, *words])
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _boot_id() if is_real else "",
        "began_m": round(_began(now) if is_real else now, 6),
        "command": _SECRET.sub(r"\1***", command)[:_LONGEST_COMMAND],
        "versions": versions_of(("mfu-jax", "jax", "jaxlib")),
        "commit": commit_of(Path()),
    }


def commit_of(folder: Path) -> str:
    """The commit that is checked out in a folder's git repository; empty if there is none."""
    try:
        folder = folder.absolute()
        git = next(p / ".git" for p in (folder, *folder.parents) if (p / ".git").exists())
        if git.is_file():  # of a worktree
            git = git.parent / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name, common = head.removeprefix("ref: "), git / "commondir"
        git = git / common.read_text().strip() if common.exists() else git
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next(line.split()[0] for line in packed if line.endswith(f" {name}"))
    except (OSError, ValueError, StopIteration):
        return ""


_has_begun = False


def _began(now: float) -> float:
    """When this process was started, in seconds since boot; `now` if unknown or meaningless.

    It is known only on Linux. In a notebook, and for a second log of a process, the process is
    older than the run.
    """
    global _has_begun
    if _has_begun or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    _has_begun = True
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        return min(now, (ticks + 0.5) / os.sysconf("SC_CLK_TCK"))  # ticks are rounded down
    return now


def _boot_id() -> str:
    """An id shared by all processes with the same monotonic clock; empty if not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
