"""Detects a hung run: no step has completed for much longer than steps usually take.

A thread checks the clock a few times a second at most; the training thread only notes when it
records a step. If the run hangs, the stacks of all threads and the last records are written to a
file. A heartbeat file tells an external supervisor that the process is alive, and at which step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.storage.addresses import path_of
from mfu_jax.storage.files import replace_file
from mfu_jax.util.failsafe import Boundary, failsafe
from mfu_jax.util.formatting import readable
from mfu_jax.util.jax_internals import is_compiling

_log = logging.getLogger("mfu_jax")

# With fewer intervals than this, a median means nothing.
_FEWEST_INTERVALS = 5
# XLA may need half an hour for a very large step; a longer compilation counts as a hang.
_COMPILE_SECONDS = 1800.0
# If the thread wakes up this late, it was not running: the machine slept or the process stopped.
_STOPPED_SECONDS = 5.0
_LAST_RECORDS = 20
# Kept between two checks; in a faster loop the oldest are dropped.
_MOST_COMPLETIONS = 1000
_KEPT_REPORTS = 5

HEARTBEAT_SECONDS = 10.0
HANG_EXIT_CODE = 75
"""Exit code after a hang with `abort_on_hang`: EX_TEMPFAIL of sysexits.h, "try again"."""


class Watchdog:
    """Watches the steps of one logger.

    Args:
        config: limits and files, under the keys ``hang_…`` and ``heartbeat_file``.
        boundary: where failures of the watchdog itself are reported.
        monotonic: clock in seconds.
        end: ends the process with an exit code, whatever its other threads are doing.

    Attributes:
        on_step: called with (step, time, thread id) when a step is recorded; a single call into
            C, because the training thread makes it in every step.
        stopped_seconds: how long the process is known not to have run since the last step.
        is_paused: an eval, a checkpoint or similar is in progress.
    """

    def __init__(
        self,
        config: LoggerConfig,
        boundary: Boundary,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.stopped_seconds = 0.0
        self._who_is_silent: Callable[[], str] = str
        self._flush: Callable[[], object] = str
        self._end = end
        self._config = config
        self._boundary = boundary
        # The loop may change the working folder.
        self._folder = Path(config.hang_folder or tempfile.gettempdir()).absolute()
        self._reports: deque[Path] = deque()
        self._hangs = 0
        self._heartbeat: Path | None = None
        self._has_beaten = True
        if config.heartbeat_file:
            self._heartbeat = Path(path_of(config.heartbeat_file)).absolute()
        self._monotonic = monotonic
        self._step = -1
        self._completed_at = self._checked_at = monotonic()
        self._beat_at = float("-inf")
        self._intervals: deque[float] = deque(maxlen=101)
        self._completions: deque[tuple[int, float, int]] = deque(maxlen=_MOST_COMPLETIONS)
        self.on_step: Callable[[tuple[int, float, int]], None] = self._completions.append
        self._lock = threading.RLock()  # of `_catch_up`
        self._records: deque[StepRecord] = deque(maxlen=_LAST_RECORDS)
        self.is_paused = False
        self._is_compiling = False
        self._waits_for = ""
        self._thread_id = threading.get_ident()
        self._is_hung = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._heartbeat is not None:
            self._start()  # so that a supervisor sees the first compilation, too

    @property
    def period_seconds(self) -> float:
        """Time between two checks: short enough to see a hang in time, and for the heartbeat."""
        return max(0.05, min(self._config.hang_seconds / 4, 5.0))

    def _catch_up(self) -> None:
        """Processes what the training thread has noted since the last call."""
        with self._lock:
            while self._completions:
                step, now, thread = self._completions.popleft()
                if self._step >= 0 and not self._is_compiling:
                    self._intervals.append(now - self._completed_at)
                self._completed_at, self._step, self._thread_id = now, step, thread
                self._is_compiling = False
                self.stopped_seconds = 0.0

    def connect(self, who_is_silent: Callable[[], str], flush: Callable[[], object]) -> None:
        """Connects the functions that a hang report needs.

        Args:
            who_is_silent: names the job's processes that are behind; empty if none is known.
            flush: writes the metrics in bounded time; called before the process is ended.
        """
        self._who_is_silent, self._flush = who_is_silent, flush

    def on_record(self, record: StepRecord) -> None:
        """Keeps a record for a hang report; the first one starts the thread."""
        if self._thread is None and self._config.hang_factor > 0:
            self._checked_at = self._monotonic()  # unchecked before: a step may have compiled
            self._start()
        self._records.append(record)

    def compiling(self, stage: str) -> None:
        """Called when JAX has traced, lowered or compiled something for the step."""
        self._catch_up()
        self._is_compiling = stage != "compile"
        self._completed_at = self._monotonic()

    def pause(self) -> None:
        """An eval, a checkpoint or similar begins, which may take any length of time."""
        self.is_paused = True

    def wait(self, name: str) -> None:
        """The loop begins to wait for `name`; an empty name ends the wait."""
        self._waits_for = name

    def resume(self) -> None:
        """The pause ends; timing restarts."""
        self._catch_up()
        self._completed_at = self._monotonic()
        self.is_paused = False

    def limit_seconds(self) -> float | None:
        """Longest time without a completed step; None: too few steps to tell, or hang_factor=0."""
        self._catch_up()
        intervals = list(self._intervals)
        if self._config.hang_factor <= 0 or len(intervals) < _FEWEST_INTERVALS:
            return None
        return max(
            self._config.hang_seconds, self._config.hang_factor * statistics.median(intervals)
        )

    def check(self) -> None:
        """Checks the clock once: reports a hang, notes a stopped process, writes the heartbeat."""
        self._catch_up()
        now = self._monotonic()
        late = now - self._checked_at - self.period_seconds
        self._checked_at = now
        if late > _STOPPED_SECONDS:
            self.stopped_seconds += late
            _log.warning(
                "the process did not run for %.0f s: the machine slept, or the process was "
                "stopped; step %d takes longer by as much",
                late,
                self._step + 1,
            )
        spent = now - self._completed_at - self.stopped_seconds
        limit = self.limit_seconds()
        is_hung = limit is not None and not self.is_paused and spent > limit
        if is_hung and spent <= _COMPILE_SECONDS:  # JAX reports a stage only at its end
            is_hung = not (self._is_compiling or is_compiling(self._thread_id))
        is_new = is_hung and not self._is_hung
        if is_new:
            self._report(spent)
        elif self._is_hung and not is_hung:
            _log.warning("steps complete again: step %d", self._step)
        if is_hung != self._is_hung:
            self._beat_at = float("-inf")  # tell a supervisor at once
        self._is_hung = is_hung
        if now - self._beat_at >= HEARTBEAT_SECONDS:
            self._beat_at = now
            self._beat("hung" if is_hung else "paused" if self.is_paused else "running")
        self._checked_at = self._monotonic()  # a slow disk is not a sleeping machine
        if is_new and self._config.abort_on_hang:
            self._abort()

    def close(self) -> None:
        """Stops the thread; the heartbeat's last state is ``ended``."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # a hung disk must not hold up the end of the run
            if not self._thread.is_alive():
                self._beat("ended")
            self._thread = None

    def _start(self) -> None:
        thread = self._boundary.thread("mfu_jax watchdog", "nobody watches for hangs", self._run)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while not self._closing.wait(self.period_seconds):
            self.check()

    def _report(self, spent: float) -> None:
        self._hangs += 1
        median = statistics.median(list(self._intervals))
        head = (
            f"no step completed for {readable(spent)} s after step {self._step} "
            f"(median {readable(median)} s)"
        )
        try:
            where = f"stacks of all threads and the last records are in {self._dump(head)}"
            if self._hangs > 1:
                where += f" (report {self._hangs} of this run; the last {_KEPT_REPORTS} are kept)"
        except OSError as error:
            where = f"the stacks could not be written ({error.strerror or error})"
        cause = "the run seems to hang, or its loop is over"
        if self._waits_for:
            cause = f"the loop waits for {self._waits_for}"
        if silent := self._who_is_silent():
            cause += f" ({silent})"
        _log.warning("%s: %s; %s", head, cause, where)

    def _abort(self) -> None:
        """Writes the metrics and ends the process: its main thread may never return."""
        _log.error("abort_on_hang: the process ends with exit code %d", HANG_EXIT_CODE)
        with failsafe("metrics may not all be written", self._boundary):
            self._flush()
        self._end(HANG_EXIT_CODE)

    def _dump(self, head: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"hang-after-step{self._step}-pid{os.getpid()}.txt"
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {head}\n\n{_stacks()}")
            file.write(f"\nThe last {len(self._records)} records, the newest last:\n")
            for record in list(self._records):
                file.write(f"step {record.step} [{record.kind}] {dict(record.scalars)}\n")
        self._keep(path)
        return path

    def _keep(self, path: Path) -> None:
        """Keeps this report and the last few before it: every eval without a pause adds one."""
        if path not in self._reports:
            self._reports.append(path)
        while len(self._reports) > _KEPT_REPORTS:
            self._reports.popleft().unlink(missing_ok=True)

    def _beat(self, state: str) -> None:
        path = self._heartbeat
        if path is None:
            return
        self._catch_up()
        values: dict[str, Any] = {
            "state": state,
            "unix_seconds": time.time(),
            "last_step": self._step if self._step >= 0 else None,
            "seconds_since_step": round(self._monotonic() - self._completed_at, 3),
            "pid": os.getpid(),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [f"{json.dumps(values)}\n".encode()])
        except OSError as error:
            if self._has_beaten:
                _log.warning(
                    "the heartbeat %s cannot be written: %s; it is tried again every %.0f s",
                    path,
                    error,
                    HEARTBEAT_SECONDS,
                )
            self._has_beaten = False
            return
        if not self._has_beaten:
            _log.warning("the heartbeat %s is written again", path)
        self._has_beaten = True


def _stacks() -> str:
    """The stacks of all threads, the main thread's first; faulthandler would stop after 100."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)}, innermost call last:\n"
        f"{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
