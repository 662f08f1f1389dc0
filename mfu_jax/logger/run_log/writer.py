"""The log's own follower, which writes the events of this process."""

from __future__ import annotations

import contextlib
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
from mfu_jax.logger.sinks.base import Sink
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
    """The log's own follower: writes its events, and shows that the process is alive.

    Args:
        log: the log.
        file: where events go.
    """

    def __init__(self, log: RunLog, file: EventsFile) -> None:
        super().__init__(log, file, name="run log")
        self._began = self._wrote_at = self._monotonic()
        self._look_seconds = 0.0
        self.start()

    def _wants(self, item: Any) -> bool:
        return isinstance(item, Event)

    _tell = Follower._write  # what the disk does not take is tried again

    def close(self, timeout: float) -> None:
        """Writes what is left and closes the file, within `timeout` seconds."""
        self.finish().wait(timeout)

    def _end(self) -> None:
        self._deliver()
        self._try_again()
        super()._end()

    def _sleep(self) -> None:
        super()._sleep()
        self._look()

    def _wait(self, seconds: float | None) -> None:
        """Waits, but not so long that nobody sees that the process is alive."""
        super()._wait(self._look_seconds if seconds is None else min(seconds, self._look_seconds))

    def _look(self) -> None:
        """Shows life, and notes what only this thread sees: compilations, long waits, silence."""
        log, now = self._log, self._monotonic()
        self._look_seconds = events.alive_seconds(now - self._began)
        self._call("show_life")
        log.settle_compilations()
        # A wait for data that lasts longer than the time between two signs of life.
        if (idle := log.idle_seconds()) > self._look_seconds:
            log.begin_wait(idle)
        if now - self._wrote_at > events.QUIET_SECONDS:
            log.event(events.ALIVE)

    def _works(self) -> None:
        super()._works()
        self._wrote_at = self._monotonic()

    def _fall_behind(self) -> None:
        """Nobody else could write what it lacks."""

    @property
    def _is_worth_a_line(self) -> bool:
        waited = self._monotonic() - self._began > _PATIENCE_SECONDS
        return self._log.has_steps or waited


class EventsFile(Sink):
    """The events of one process: a sink whose records they are.

    It is opened by the first write, and locked while its process lives: one that overlaps with it
    writes ``….events.0.2.jsonl``.

    Args:
        metrics_file: the run's metrics file, or its address; the events are written beside it.
        index: number of this process in the job.
        clock: wall clock in seconds, for the sign of life.

    Attributes:
        fsync_seconds: see `AppendOnlyFile`.
    """

    fsync_seconds = -1.0

    def __init__(
        self, metrics_file: Path | Address, index: int, clock: Callable[[], float]
    ) -> None:
        self._place = metrics_file.parent / events.events_name(metrics_file.name, index)
        self._clock = clock
        self._target: OutputTarget | None = None
        self._file: AppendOnlyFile | None = None
        self._start = self._last_sign = b""

    def write_many(self, happened: Sequence[Any]) -> None:
        """Appends events, or raises having written none."""
        text = b"".join(map(events.line, happened))
        self._start = self._start or text.partition(b"\n")[0] + b"\n"
        if self._file is None:
            self._file = self._opened()
        self._file.fsync_seconds = self.fsync_seconds
        self._file.append(self._last_sign + text)
        # After a move by another program, a new file begins with the start of the process.
        self._last_sign, self._file.header = b"", self._start
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
            file = AppendOnlyFile(name, "run log")
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
