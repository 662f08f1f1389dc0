"""Detects a hung run: no step has completed for much longer than steps usually take.

A thread checks the clock a few times a second at most; all others only note what happens. If the
run hangs, the stacks of all threads and the last records are written to a file. A heartbeat file
tells an external supervisor that the process is alive, and at which step.
"""

from __future__ import annotations

import gc
import json
import logging
import math
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
from types import FrameType

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.run_log.monitor import Monitor
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.storage.addresses import path_of
from mfu_jax.storage.files import replace_file
from mfu_jax.util.failsafe import Boundary, failsafe
from mfu_jax.util.formatting import counted, readable
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
_MOST_NOTED = 1000
_KEPT_REPORTS = 5
# Two that switch the collector off and on again would each take the other's off for the user's.
_ONE_ASKS = threading.Lock()

HEARTBEAT_SECONDS = 10.0
HANG_EXIT_CODE = 75
"""Exit code after a hang with `abort_on_hang`: EX_TEMPFAIL of sysexits.h, "try again"."""


class Watchdog(Monitor):
    """Watches the steps of one logger.

    The loop itself tells it of steps and pauses, since the recorder's thread may hang, too.

    Args:
        config: limits and files, under the keys ``hang_…`` and ``heartbeat_file``.
        boundary: where failures of the watchdog itself are reported.
        monotonic: clock in seconds.

    Attributes:
        on_step: called with (step, time, thread id) when a step is recorded; a single call into
            C, because the training thread makes it in every step.
        stopped_seconds: how long the process is known not to have run since the last step.
        is_paused: an eval, a checkpoint or similar is in progress.
        who_is_silent: a function that names the job's processes that are behind, for hang reports;
            it returns an empty text if none is known.
        waits_for: a function that names what the loop waits for; likewise.
        tell: a function that is told of a hang: its step, and a text.
        folder: where the stacks of a hung run are written; not a relative one, as the loop may
            change the working folder.
        flush: a function that writes the metrics in bounded time before the process is ended.
    """

    def __init__(
        self,
        config: LoggerConfig,
        boundary: Boundary,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._boundary, self._monotonic = config, boundary, monotonic
        self.period_seconds = max(0.05, min(config.hang_seconds / 4, 5.0))
        self.who_is_silent: Callable[[], str] = str
        self.waits_for: Callable[[], str] = str
        self.tell: Callable[[int, str], object] = lambda step, text: None
        self.flush: Callable[[], object] = str
        self._reports: list[Path] = []
        self._records: deque[StepRecord] = deque(maxlen=_LAST_RECORDS)
        self._noted: deque[tuple[int | None, float, int]] = deque(maxlen=_MOST_NOTED)
        self.on_step: Callable[[tuple[int, float, int]], None] = self._noted.append
        self._step, self._thread_id = -1, threading.get_ident()
        self._intervals: deque[float] = deque(maxlen=101)
        self._since = self._checked_at = monotonic()
        self.stopped_seconds = self._compiling_seconds = 0.0
        self.is_paused = self._is_hung = self._has_failed = False
        self._beat_at = -math.inf
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._heartbeat, self.folder = "", Path(tempfile.gettempdir())
        if config.heartbeat_file:
            self._heartbeat = os.path.abspath(path_of(config.heartbeat_file))
            self.folder = Path(self._heartbeat).parent
            self._start()  # so that a supervisor sees the first compilation, too

    def on_record(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """Keeps the record for a hang report; the first one starts the thread."""
        if self._thread is None and self._config.hang_factor > 0:
            self._checked_at = self._monotonic()  # unchecked before: a step may have compiled
            self._start()
        self._records.append(record)
        return record

    def pause(self) -> None:
        """An eval, a checkpoint or similar begins, which may take any length of time."""
        self.is_paused = True

    def resume(self) -> None:
        """The pause ends; timing restarts."""
        self._noted.append((None, self._monotonic(), 0))
        self.is_paused = False

    def check(self) -> None:
        """Checks the clock once: reports a hang, notes a stopped process, writes the heartbeat."""
        self._take_noted()
        now = self._monotonic()
        self._excuse(now)
        spent = now - self._since - self.stopped_seconds
        excused = self._compiling_seconds if spent <= _COMPILE_SECONDS else 0.0
        was_hung = self._is_hung
        self._is_hung = not self.is_paused and spent - excused > self._limit_seconds()
        is_new = self._is_hung and not was_hung
        if is_new:
            self._report(spent)
        elif was_hung and not self._is_hung:
            _log.warning("steps complete again: step %d", self._step)
        # A supervisor is told of a hang at once.
        if self._is_hung != was_hung or now - self._beat_at >= HEARTBEAT_SECONDS:
            self._beat_at = now
            self._beat("hung" if self._is_hung else "paused" if self.is_paused else "running")
        self._checked_at = self._monotonic()  # a slow disk is not a sleeping machine
        if is_new and self._config.abort_on_hang:  # the main thread may never return
            _log.error("abort_on_hang: the process ends with exit code %d", HANG_EXIT_CODE)
            with failsafe("metrics may not all be written", self._boundary):
                self.flush()
            os._exit(HANG_EXIT_CODE)

    def close(self) -> None:
        """Stops the thread; the heartbeat's last state is ``ended``."""
        self._closing.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout=1.0)  # a hung disk must not hold up the end of the run
            if not self._thread.is_alive():
                self._take_noted()
                self._beat("ended")

    def _start(self) -> None:
        missing = "nobody watches for hangs"
        self._thread = self._boundary.thread("mfu_jax watchdog", missing, self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self.period_seconds):
            self.check()

    def _take_noted(self) -> None:
        while self._noted:
            step, now, thread = self._noted.popleft()
            if step is not None:
                if self._step >= 0:
                    self._intervals.append(now - self._since - self._compiling_seconds)
                self._step, self._thread_id = step, thread
            self._since = now
            self.stopped_seconds = self._compiling_seconds = 0.0

    def _excuse(self, now: float) -> None:
        """Notes if no step could complete since the last check."""
        late = now - self._checked_at - self.period_seconds
        if late > _STOPPED_SECONDS:
            self.stopped_seconds += late
            _log.warning(
                "the process did not run for %.0f s: the machine slept, or the process was "
                "stopped; step %d takes longer by as much",
                late,
                self._step + 1,
            )
        elif is_compiling(_frames().get(self._thread_id)):
            self._compiling_seconds += now - max(self._checked_at, self._since)

    def _limit_seconds(self) -> float:
        """Longest time without a completed step; infinite if off, or with too few to tell."""
        factor = self._config.hang_factor
        if factor <= 0 or len(self._intervals) < _FEWEST_INTERVALS:
            return math.inf
        return max(self._config.hang_seconds, factor * statistics.median(self._intervals))

    def _report(self, spent: float) -> None:
        head = (
            f"no step completed for {readable(spent)} s after step {self._step} "
            f"(median {readable(statistics.median(self._intervals))} s)"
        )
        try:
            where = f"stacks of all threads and the last records are in {self._dump(head)}"
            if (reports := len(self._reports)) > 1:
                where += f" (report {reports} of this run; the last {_KEPT_REPORTS} are kept)"
        except OSError as error:
            where = f"the stacks could not be written ({error.strerror or error})"
        cause = "the run seems to hang, or its loop is over"
        if waits_for := self.waits_for():
            cause = f"the loop waits for {waits_for}"
        if silent := self.who_is_silent():
            cause += f" ({silent})"
        _log.warning("%s: %s; %s", head, cause, where)
        self.tell(self._step, f"{head}: {cause}")

    def _dump(self, head: str) -> Path:
        """Writes a report and removes the oldest: every eval without a pause adds one."""
        path = self.folder / f"hang-after-step{self._step}-pid{os.getpid()}.txt"
        lines = [f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {head}\n", _stacks()]
        lines.append(f"The last {counted(len(self._records), 'record')}, the newest last:")
        lines += [f"step {r.step} [{r.kind}] {dict(r.scalars)}" for r in tuple(self._records)]
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")
        self._reports.append(path)
        for old in {*self._reports} - {*self._reports[-_KEPT_REPORTS:]}:
            old.unlink(missing_ok=True)
        return path

    def _beat(self, state: str) -> None:
        if not self._heartbeat:
            return
        values = {
            "state": state,
            "unix_seconds": time.time(),
            "last_step": self._step if self._step >= 0 else None,
            "seconds_since_step": round(self._monotonic() - self._since, 3),
            "pid": os.getpid(),
        }
        news, had_failed = "is written again", self._has_failed
        try:
            os.makedirs(os.path.dirname(self._heartbeat), exist_ok=True)
            replace_file(Path(self._heartbeat), [f"{json.dumps(values)}\n".encode()])
            self._has_failed = False
        except OSError as error:
            news = f"cannot be written: {error}; it is tried again every {HEARTBEAT_SECONDS:.0f} s"
            self._has_failed = True
        if had_failed != self._has_failed:
            _log.warning("the heartbeat %s %s", self._heartbeat, news)


def _frames() -> dict[int, FrameType]:
    """Thread → its innermost frame.

    Before Python 3.11.9 a collection of garbage in the middle of it deadlocks with any thread that
    starts, ends, or asks for the same (python/cpython#106883).
    """
    if sys.version_info >= (3, 11, 9):
        return sys._current_frames()
    with _ONE_ASKS:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _stacks() -> str:
    """The stacks of all threads, the main thread's first; faulthandler would stop after 100."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)}, innermost call last:\n"
        f"{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
