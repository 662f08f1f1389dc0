"""`RunLog`: what one process writes down, in order. The log is the truth; all else follows it.

Each follower gets every item, and keeps those that its sink wants and does not have yet. With a
metrics file, one writes the events beside it (`mfu_jax.logger.run_log.writer`), and the records of
that file are where the others find what was too much for their memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mfu_jax.logger.run_log import events
from mfu_jax.logger.run_log.events import Event, Moment
from mfu_jax.logger.run_log.follower import Follower
from mfu_jax.storage.addresses import path_of

if TYPE_CHECKING:  # a log starts before JAX is imported
    from mfu_jax.logger.records.step_cost import StepCost
    from mfu_jax.logger.run_log.reading import LoggedRecords
    from mfu_jax.logger.run_log.writer import LogWriter
    from mfu_jax.logger.sinks.base import Sink, StepRecord
    from mfu_jax.logger.timing.compile_events import CompileEvent, CompileLog
    from mfu_jax.logger.timing.timed_step import Reading, TimedStep

_log = logging.getLogger("mfu_jax")

_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
_since_boot: Callable[[], float] = (
    time.monotonic if _BOOT_CLOCK is None else functools.partial(time.clock_gettime, _BOOT_CLOCK)
)
"""Seconds since the machine booted, including its sleep where known; one call into C."""

_CLOSE_SECONDS = 2.0
_HUNG_CLOSE_SECONDS = 0.5  # of a disk that has just been waited for in vain


class RunLog:
    """The log of one process. Appending never waits for a disk or a sink.

    Args:
        metrics_file: the run's metrics file, or its address, beside which the events are written;
            empty: the log is in memory only.
        index: number of this process in the job.
        processes: number of processes in the job.
        clock: wall clock in seconds.
        monotonic: the timer's monotonic clock in seconds.
        until_exit: the process exists for this run alone: the log ends when the process does.

    Attributes:
        metrics_file: as given; None if the log is in memory only.
        log_period: see `LoggerConfig`.
        has_steps: a completed step is known.
        lock: held while items are appended.
        own_followers: the one that writes the events beside the metrics file; none in memory only.
        idle_seconds: a function: for how long the device has been idle while the loop waits for
            data; 0 if it does not.
    """

    def __init__(
        self,
        metrics_file: str | os.PathLike[str] = "",
        *,
        index: int = 0,
        processes: int = 1,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        until_exit: bool = False,
    ) -> None:
        path = path_of(metrics_file) if os.fspath(metrics_file) else None
        # The loop may change the working directory.
        self.metrics_file = path.absolute() if isinstance(path, Path) else path
        self.log_period = 1
        self.has_steps = False
        self.idle_seconds: Callable[[], float] = float
        self._clock, self._monotonic = clock, monotonic
        self._is_real = monotonic is time.monotonic
        self._process_id = os.getpid()
        self._is_stopped = self._is_over = False
        self._until_exit = until_exit
        self._length = 0
        self.lock = threading.Lock()
        self._followers: list[Follower] = []
        self._compiled: deque[list[float]] = deque()  # begin in seconds since boot, µs
        self._wait: Event | None = None  # a long one for data
        now = self.now()
        self._steps: StepEvents | None = None
        self.own_followers: tuple[LogWriter, ...] = ()
        self._records: Follower | None = None  # writes the metrics file
        self._behind: dict[str, int] = {}
        if self.metrics_file is None:
            return
        from mfu_jax.logger.run_log.reading import steps_behind
        from mfu_jax.logger.run_log.writer import EventsFile, LogWriter, start_values

        self._behind = steps_behind(self.metrics_file, index)
        self._steps = StepEvents(now[1])
        self.own_followers = (LogWriter(self, EventsFile(self.metrics_file, index, clock)),)
        job = {"version": events.VERSION, "process": index, "processes": processes}
        self.event(events.START, now, **job, **start_values(now[1], is_real=self._is_real))
        atexit.register(self._end)

    # What happens, in order.

    def append(self, items: Sequence[Any]) -> None:
        """Appends records and events; returns at once."""
        if not items:
            return
        with self.lock:
            numbered = [
                item._replace(number=number) if isinstance(item, Event) else item
                for number, item in enumerate(items, self._length)
            ]
            self._length += len(items)
            for follower in (*self._followers, *self.own_followers):
                follower.put(numbered)

    def event(self, kind: str, at: Moment | None = None, /, **values: Any) -> None:
        """Appends an event, by default of now."""
        self.append([Event(kind, at or self.now(), values)])

    def steps(self, steps: Sequence[tuple[TimedStep, StepRecord | None]]) -> None:
        """Appends that steps were completed in this order, and their records, if they were made."""
        found = () if self._steps is None else self._steps.of(steps, self._asleep_seconds())
        self.has_steps |= bool(steps)
        self.append([*(record for _, record in steps if record is not None), *found])

    def begin(self, name: str, at: Moment, last: TimedStep | None = None) -> Event:
        """A part of the process begins; `end` takes the event.

        Args:
            name: such as ``eval``.
            at: when.
            last: the step that it waited for, if any.
        """
        values: dict[str, Any] = {"name": name}
        if last is not None:
            values |= {"step": int(last.step), "step_us": round(1e6 * last.seconds / last.steps)}
        begun = Event(events.SPAN, at, values)
        self.append([begun])
        return begun

    def end(self, begun: Event, at: Moment) -> None:
        """The part ends."""
        self.event(*begun[:2], **begun.values, us=round(1e6 * (at[1] - begun.at[1])))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Context manager for a part of the process outside the loop, such as ``restore``."""
        begun = self.begin(name, self.now())
        try:
            yield
        finally:
            self.end(begun, self.now())

    def begin_wait(self, idle_seconds: float) -> None:
        """The device has been idle for that long, because the loop waits for data."""
        if self._wait is None:
            t, m = self.now()
            self._wait = self.begin(events.DATA_WAIT, (t - idle_seconds, m - idle_seconds))

    def end_wait(self) -> None:
        """The loop waits no longer."""
        wait, self._wait = self._wait, None
        if wait is not None:
            self.end(wait, self.now())

    def compiled(self, event: CompileEvent) -> None:
        """A stage of a compilation that the run waited for has just ended, as have those in it."""
        begin = self.now()[1] - event.seconds
        self._compiled.append([round(begin, 6), round(1e6 * event.seconds)])

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
            self.event(events.STOP, how=how)

    # What follows it.

    def follow(self, sink: Sink, *, start_step: int = 0) -> Follower:
        """Passes everything from now on to a sink, on a thread of its own.

        A sink that fell behind in an earlier process first gets what it lacks, from the file.

        Args:
            sink: the sink.
            start_step: first step of this process; 0: nothing of an earlier one counts.
        """
        follower = Follower(self, sink)
        lacks = getattr(sink, "missing", range(0))  # the class may not derive from `Sink`
        last: int | None = lacks.start - 1 if lacks else self._behind.get(follower.name)
        reader = None
        if self._records is None and self.is_file(sink):
            self._records = follower
            for writer in self.own_followers:
                writer.sink.fsync_seconds = getattr(sink, "fsync_seconds", -1.0)
        elif start_step > 0 and last is not None:
            reader = self.reader(last)
        if reader is not None:
            follower.begin_behind(reader)
        elif lacks:
            _log.warning(
                "%s ends at step %d, but the run resumes at %d: the steps between are missing",
                *(getattr(sink, "path", follower.name), lacks.start - 1, lacks.stop),
            )
        # The file first: what it drops, no other follower can get from it.
        self._followers.insert(0 if self._records is follower else len(self._followers), follower)
        follower.start()
        return follower

    def is_file(self, sink: Any) -> bool:
        """Whether a sink writes the metrics file beside which this log is written."""
        return getattr(sink, "metrics_file", None) == self.metrics_file is not None

    def reader(self, after: StepRecord | int | None) -> LoggedRecords | None:
        """Reads records back from the file; None if this log has no file of records.

        Args:
            after: a record or the number of a step, after which to begin; None: at the beginning
                of this process.
        """
        path = None if self._records is None else getattr(self._records.sink, "path", None)
        if path is None:
            return None
        from mfu_jax.logger.run_log.reading import LoggedRecords

        return LoggedRecords(path, self.log_period, after=after)

    def is_on_disk(self, follower: Follower, record: StepRecord | None = None) -> bool:
        """Whether what a follower lacks, or one such record, can be read back from the file."""
        file = self._records
        if file is None or file is follower:
            return False
        has_dropped = record is not None and file.drops(record)
        return not (file.has_hung or file.is_failing or has_dropped)

    def leave(self, followers: Sequence[Follower]) -> None:
        """Forgets followers that have ended."""
        self._followers = [f for f in self._followers if f not in followers]
        self._records = None if self._records in followers else self._records

    def flush(self) -> None:
        """Waits at most two seconds until all events so far are on disk."""
        for writer in self.own_followers:
            writer.settle().wait(_CLOSE_SECONDS)

    def close(self) -> None:
        """Writes everything within two seconds; with `until_exit`, the log goes on."""
        if not self._until_exit:
            self._end()

    def now(self) -> Moment:
        """Wall time, and seconds since boot."""
        return self._clock(), (_since_boot if self._is_real else self._monotonic)()

    def settle_compilations(self) -> None:
        """Appends the compilations that have ended since the last call."""
        if spans := [self._compiled.popleft() for _ in range(len(self._compiled))]:
            self.event(events.COMPILE, spans=spans)

    def moment(self, at: Reading) -> Moment:
        """Converts a reading of both clocks so that it includes the machine's sleep."""
        return at[0], at[1] + self._asleep_seconds()

    def _asleep_seconds(self) -> float:
        """How long the machine has slept since boot, which the monotonic clock does not count."""
        return _since_boot() - time.monotonic() if self._is_real else 0.0

    def _end(self) -> None:
        if self.own_followers and os.getpid() == self._process_id and not self._is_over:
            self.stop(_uncaught() or "clean")
            atexit.unregister(self._end)
            self._is_over = True
            for writer in self.own_followers:
                writer.close(_HUNG_CLOSE_SECONDS if writer.has_hung else _CLOSE_SECONDS)


def _uncaught() -> str:
    """The exception that ends this process, as ``exception: KeyError``; empty without one."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return "" if error is None or hasattr(sys, "ps1") else f"exception: {type(error).__name__}"


class StepEvents:
    """Makes the ``steps`` events of one process.

    Args:
        began: start of the log, in seconds since boot.
    """

    def __init__(self, began: float) -> None:
        self._last_end = began
        self._cost: object = None
        self._at_peak: dict[str, float] = {}

    def of(
        self, steps: Sequence[tuple[TimedStep, StepRecord | None]], asleep_seconds: float
    ) -> Iterator[Event]:
        """The events of steps that were completed in this order: one for all that are alike.

        Args:
            steps: with their records; None: no record could be made.
            asleep_seconds: what the monotonic clock lacks to the time since boot.
        """
        rows = [(step, self._cost_of(step, record)) for step, record in steps]
        alike = itertools.groupby(enumerate(rows), lambda row: (row[1][1], row[1][0].step - row[0]))
        for (cost, _), same in alike:
            some = [step for _, (step, _) in same]
            ends = [step.ended_monotonic + asleep_seconds for step in some]
            before, self._last_end = [self._last_end, *ends], ends[-1]
            us = [round(1e6 * step.seconds) for step in some]
            gaps = [
                max(0, round(1e6 * (end - last)) - own)
                for last, end, own in zip(before, ends, us, strict=False)
            ]
            waits = [round(1e6 * step.spans.get(events.DATA_WAIT, 0.0)) for step in some]
            columns = {"gap_us": gaps, "data_us": waits}
            known = {name: column for name, column in columns.items() if any(column)}
            values = {"first": int(some[0].step), "us": us, **known, **cost}
            yield Event(events.STEPS, (some[-1].ended_at, ends[-1]), values)

    def _cost_of(self, step: TimedStep, record: StepRecord | None) -> dict[str, Any]:
        """Its kind, unless it is a usual one, and its seconds at the peak, where they are known."""
        if record is None:
            return {}
        kind = {} if record.kind == "step" else {"kind": record.kind}
        if step.cost is not self._cost:
            self._cost, cost = step.cost, cast("StepCost", step.cost)  # the builder has set it
            known = {"optimal_s": cost.model_seconds, "executed_s": cost.executed_seconds}
            self._at_peak = {k: float(f"{s:.9g}") for k, s in known.items() if s is not None}
        return kind | self._at_peak
