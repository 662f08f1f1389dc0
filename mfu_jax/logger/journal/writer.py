"""`Journal`: a log of what a process did, written by its own thread."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfu_jax.errors import first_line
from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.journal import process
from mfu_jax.logger.journal.file import JournalFile
from mfu_jax.logger.journal.line_encoder import LineEncoder
from mfu_jax.logger.journal.lines import (
    VERSION,
    Moment,
    StepMark,
    alive_head,
    alive_line,
    journal_name,
)
from mfu_jax.storage.addresses import Address, path_of
from mfu_jax.util.failsafe import Boundary

if TYPE_CHECKING:  # a journal starts before JAX is imported
    from mfu_jax.logger.records.step_record import StepRecord
    from mfu_jax.logger.timing.compile_events import CompileEvent, CompileLog
    from mfu_jax.logger.timing.timed_step import Reading, TimedStep
    from mfu_jax.storage.targets import SpooledTarget

_log = logging.getLogger("mfu_jax")

_LOOK_SECONDS = 1.0  # how often it checks that its file is still there, or writable again
_CLOSE_SECONDS = 2.0
_PATIENT_LOOKS = 20
# Limits on what is kept while the file cannot be written.
_MOST_BYTES = 2**22
_MOST_EVENTS = 10_000
# Signs of life that write only their time, before one that also writes the silence between them.
_QUICK_SIGNS = 15


class Journal:
    """The journal of one process. Its methods, except `close` and `flush`, only fill a queue.

    Args:
        metrics_file: the run's metrics file, or its address; the journal is written beside it.
        index: number of this process in the job.
        processes: number of processes in the job.
        clock: wall clock in seconds.
        monotonic: the timer's monotonic clock in seconds.
        boundary: where failures are reported.
        until_exit: the process exists for this run alone: journal until the process exits.

    Attributes:
        waited_seconds: a function: how long the device has waited for data so far.
        is_waiting: a wait for data is open.
        has_waited: such a wait has ended; reset once that is written.
        has_steps: a completed step is known.
    """

    def __init__(
        self,
        metrics_file: str | os.PathLike[str],
        *,
        index: int = 0,
        processes: int = 1,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        boundary: Boundary | None = None,
        until_exit: bool = False,
    ) -> None:
        self.waited_seconds: Callable[[], float] = float
        self._clock, self._monotonic = clock, monotonic
        is_real = monotonic is time.monotonic
        self._since_boot = process.since_boot if is_real else monotonic
        self._process_id = os.getpid()
        self._is_over = self._is_stopped = self.is_waiting = self.has_waited = False
        self._until_exit = until_exit
        self._failed_at: float | None = None
        self.has_steps = False
        self._unwritten = b""
        self._waiting: list[threading.Event] = []
        self._wake = Alarm()
        self._queue: deque[Callable[[], object]] = deque(maxlen=_MOST_EVENTS)
        now = self._now()
        self._encoder = LineEncoder(now)
        self._liveness = process.Liveness(now[1])
        self._signs: list[float] = []  # not yet passed to `_liveness`
        self._noted_seconds = 0.0  # data waits already noted with steps
        self._put(self._encoder.event, "start", now, self._start(now, index, processes))
        self._thread = (boundary or Boundary()).thread(
            "mfu_jax journal",
            "the run's journal is not written any more: what restarts cost is not known",
            self._run,
            _absolute(path_of(metrics_file)),
            index,
        )
        self._thread.start()
        atexit.register(self._end)

    def steps(self, steps: Sequence[tuple[TimedStep, StepRecord | None]]) -> None:
        """Notes completed steps with their records, in order."""
        waited = max((step.waited_seconds for step, _ in steps), default=0.0)
        asleep_seconds = self._asleep_seconds()
        marks = [*_marks(steps, asleep_seconds)]
        self._put(self._note, marks, waited)
        if not self.has_steps:
            self.has_steps = True
            self._wake.set()  # else a kill would turn a long first step into start-up

    def begin(self, name: str, at: Reading, last: TimedStep | None = None) -> None:
        """A pause begins; `last` is the step that it waited for, if any."""
        known = None if last is None else (last.step, last.seconds)
        self._put(self._encoder.begin, name, self._moment(at), known)

    def end(self, at: Reading) -> None:
        """The pause ends."""
        self._put(self._encoder.end, self._moment(at))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Context manager for a part of the process outside the loop, such as ``restore``."""
        self.begin(name, (self._clock(), self._monotonic()))
        try:
            yield
        finally:
            self.end((self._clock(), self._monotonic()))

    def restored(self, step: int) -> None:
        """The run continues from a checkpoint; its next step is `step`."""
        self._put(self._encoder.event, "restored", self._now(), {"step": step})

    def went_back(self, step: int) -> None:
        """The process repeats the steps from `step` on."""
        self._put(self._encoder.went_back, self._now(), step)

    def compiled(self, event: CompileEvent) -> None:
        """A stage of a compilation that the run waited for has just ended."""
        self._put(self._encoder.compiled, self._now(), event.seconds)

    @contextlib.contextmanager
    def compiling(self, log: CompileLog) -> Iterator[None]:
        """Context manager that notes this thread's compilations before there is a logger."""
        thread = threading.get_ident()

        def note(event: CompileEvent) -> None:
            if event.thread_id == thread:
                self.compiled(event)

        log.subscribe(note)
        try:
            yield
        finally:
            log.unsubscribe(note)

    def stop(self, how: str) -> None:
        """The run's work is over; the process may live on.

        Args:
            how: ``clean``, the name of a signal, or ``exception: …``; only the first counts.
        """
        if not self._is_stopped:
            self._is_stopped = True
            self._put(self._encoder.event, "stop", self._now(), {"how": how})
            self._wake.set()

    def flush(self) -> None:
        """Waits at most two seconds until everything so far is written."""
        done = threading.Event()
        self._put(self._waiting.append, done)
        self._wake.set()
        done.wait(_CLOSE_SECONDS)

    def close(self) -> None:
        """Writes everything within two seconds; with `until_exit`, journaling continues."""
        if not self._until_exit:
            self._end()

    def _end(self) -> None:
        if os.getpid() == self._process_id and not self._is_over:
            self.stop(process.uncaught() or "clean")
            atexit.unregister(self._end)
            self._is_over = True
            self._wake.set()
            self._thread.join(_CLOSE_SECONDS)

    def _put(self, function: Callable[..., object], *args: Any) -> None:
        self._queue.append(functools.partial(function, *args))

    def _now(self) -> Moment:
        return self._clock(), self._since_boot()

    def _moment(self, at: Reading) -> Moment:
        """Converts a reading of both clocks so that it includes the machine's sleep."""
        return at[0], at[1] + self._asleep_seconds()

    def _asleep_seconds(self) -> float:
        return process.asleep_seconds() if self._monotonic is time.monotonic else 0.0

    def _start(self, now: Moment, index: int, processes: int) -> dict[str, Any]:
        is_real = self._monotonic is time.monotonic
        return {
            "version": VERSION,
            "process": index,
            "processes": processes,
            "host": process.host(),
            "pid": self._process_id,
            "boot": process.boot_id() if is_real else "",
            "began_m": round(process.began(now[1]) if is_real else now[1], 6),
            "mark_us": round(1e6 * self._liveness.interval_seconds),
        }

    def _run(self, metrics_file: Path | Address, index: int) -> None:
        """Writes what has arrived, and that the process is alive."""
        target, path = _opened(metrics_file, index)
        if (file := self._open(path)) is None:
            return
        looked_at = self._monotonic()
        is_over = False
        while not is_over:
            is_over = self._is_over  # read before the queue, so that nothing is left in it
            is_due = time.monotonic() - looked_at > _LOOK_SECONDS
            if is_due:
                looked_at = time.monotonic()
            if is_due or self._queue or self._failed_at is not None or is_over:
                self._drain()
                if is_due or self._failed_at is None:
                    self._write(file, looks=is_due)
            else:
                self._mark(file)
            if target is not None:
                target.wrote()
            if not is_over:
                self._wake.wait(self._liveness.interval_seconds)
        file.close()
        if target is not None:
            target.close()

    def _open(self, path: Path) -> JournalFile | None:
        """The file, once it can be opened; None if it never could be."""
        is_told = False
        for attempt in itertools.count():
            try:
                return JournalFile(path)
            except OSError as error:
                # A run that cannot write at all reports that itself after importing JAX, and ends.
                if not is_told and (self.has_steps or attempt >= _PATIENT_LOOKS):
                    self._warn(path, error)
                    is_told = True
            if self._is_over:
                return None
            self._wake.wait(_LOOK_SECONDS)
        return None

    def _note(self, marks: Sequence[StepMark], waited_seconds: float) -> None:
        self._encoder.steps(marks)
        self._noted_seconds = max(self._noted_seconds, waited_seconds)

    def _drain(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _mark(self, file: JournalFile) -> None:
        """Marks that the process is alive when nothing else has happened, the usual case.

        A young process does this twenty times a second, each time with cold caches.
        """
        try:
            if self.is_waiting or self.has_waited or len(self._signs) >= _QUICK_SIGNS:
                mark = self._alive()
            else:
                m = self._since_boot()
                self._signs.append(m)
                mark = alive_head(self._clock(), m)
            if not file.overwrite(mark):
                self._write(file, looks=False)
        except OSError as error:
            self._fail(file, error)

    def _alive(self) -> bytes:
        now = self._now()
        self.has_waited = False  # first: the loop may set it at any time
        waited_seconds = max(0.0, self.waited_seconds() - self._noted_seconds)
        for sign in (*self._signs, now[1]):
            self._liveness.on_sign(sign)
        self._signs.clear()
        return alive_line(now, waited_seconds, self._liveness.seconds)

    def _write(self, file: JournalFile, *, looks: bool) -> None:
        settled, open_lines = self._encoder.take(self._alive())
        self._unwritten += settled
        try:
            if looks:
                file.find_again()
            file.write(self._unwritten, *open_lines)
            self._unwritten, self._failed_at = b"", None
            while self._waiting:
                self._waiting.pop().set()
        except OSError as error:
            self._fail(file, error)

    def _warn(self, path: Path, error: OSError) -> None:
        why = error.strerror or first_line(error)
        _log.warning(
            "the journal %s cannot be written (%s); it is tried again every second", path, why
        )

    def _fail(self, file: JournalFile, error: OSError) -> None:
        if self._failed_at is None:
            self._warn(file.path, error)
        self._failed_at = time.monotonic()
        if len(self._unwritten) > _MOST_BYTES:
            self._unwritten = b""


def _marks(
    steps: Iterable[tuple[TimedStep, StepRecord | None]], asleep_seconds: float
) -> Iterator[StepMark]:
    mfu_seconds = hfu_seconds = None
    for step, record in steps:
        kind = "step"
        if record is not None:
            kind, scalars = record.kind, record.scalars
            mfu_seconds = _at_peak(scalars.get("perf/mfu"), step.seconds, mfu_seconds)
            hfu_seconds = _at_peak(scalars.get("perf/hfu"), step.seconds, hfu_seconds)
        yield StepMark(
            number=int(step.step),
            end=(step.ended_at, step.ended_monotonic + asleep_seconds),
            us=round(1e6 * step.seconds),
            data_us=round(1e6 * step.spans.get("data_wait", 0.0)),
            cost=(kind, mfu_seconds, hfu_seconds) if record is not None else ("step", None, None),
        )


def _at_peak(utilization: float | None, seconds: float, last: float | None) -> float | None:
    """Seconds at the peak; the previous step's value if only rounding differs."""
    if utilization is None:
        return None
    peak_seconds = utilization * seconds
    if last is not None and abs(peak_seconds - last) <= 1e-9 * last:
        return last
    return float(f"{peak_seconds:.9g}")  # so that steps of equal cost share a line


def _opened(metrics_file: Path | Address, index: int) -> tuple[SpooledTarget | None, Path]:
    """The spool that uploads the journal to an object store, if any, and its local path."""
    name = journal_name(metrics_file.name, index)
    if isinstance(metrics_file, Address):
        from mfu_jax.storage.targets import SpooledTarget

        target = SpooledTarget(metrics_file.parent / name, "journal", is_folder=False, keep=True)
        return target, target.path
    return None, metrics_file.parent / name


def _absolute(path: Path | Address) -> Path | Address:
    """Makes the path absolute, because the loop may change the working directory."""
    return path if isinstance(path, Address) else path.absolute()
