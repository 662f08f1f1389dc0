"""A follower of the run log: passes it on to one sink, from where that sink left off.

Each has a thread of its own, so a sink that fails, stalls or hangs affects nothing else. A record
that the sink can never take is skipped, named and counted; any other failure is tried again, in
order, with back-off.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.run_log import events
from mfu_jax.logger.run_log.events import Event
from mfu_jax.logger.sinks.base import StepRecord, is_permanent
from mfu_jax.util.failsafe import Boundary, Once
from mfu_jax.util.formatting import counted, encodable

if TYPE_CHECKING:
    from mfu_jax.logger.records.summary import Summary
    from mfu_jax.logger.run_log.reading import LoggedRecords
    from mfu_jax.logger.run_log.run_log import RunLog

_log = logging.getLogger("mfu_jax")

# Items that wait for a sink; in their place it gets records of the file, if there is one.
MOST_ITEMS = 10_000
_MOST_TEXTS = 1000
# Items in one write, and the pause after it, in which other threads can take the GIL.
BATCH_ITEMS = 100
BREATH_SECONDS = 1e-4
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# Pauses between the attempts at the end of a run.
LAST_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.4)
# A record is given up after this many attempts if the next record succeeds; at the end of the run,
# after two.
POISON_ATTEMPTS = 5

# What a sink gets besides records: the method, and the event's fields that are its arguments.
TEXTS = {
    events.SETUP: ("write_setup", "values", "texts"),
    events.TEXT: ("write_text", "tag", "text"),
    events.ALARM: ("write_alarm", "text"),
    events.FAILURE: ("write_failure", "reason"),
}


class Follower:
    """Passes what a run log has to a sink, in order, on one daemon thread.

    Args:
        log: the log.
        sink: the sink.
        name: for messages; by default the sink's class name.

    Attributes:
        sink: as given.
        name: of the sink, for messages.
        lost: number of records that the sink will never get, by reason.
        last: the last record that the sink has.
        has_hung: the sink did not finish in the time allowed for its last `settle`.
    """

    def __init__(
        self,
        log: RunLog,
        sink: Any,
        *,
        name: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name or type(sink).__name__
        self.lost: Counter[str] = Counter()
        self.last: StepRecord | None = None
        self.has_hung = False
        self.sink = sink
        # Read once: in `put`, on the log's thread, a property that raises would cost other sinks.
        self._keeps_every_step = bool(sink.keeps_every_step)
        self._log, self._monotonic = log, monotonic
        self._queue: deque[Any] = deque()
        self._texts: deque[Event] = deque(maxlen=_MOST_TEXTS)  # for which it had no room
        self._misses = False  # it had none for records either, which the file has
        self._reader: LoggedRecords | None = None
        self._batch: list[Any] = []  # taken from the file or the queue, and not yet written
        self._wake = Alarm()
        self._requests: deque[threading.Event] = deque()
        self._summary: Summary | None = None
        self._is_asleep = self._is_behind = self._is_abandoned = False
        self._is_last = self._ends = self._is_over = False
        self._retry_seconds = self._retry_at = 0.0
        self._attempts = 0
        self._is_first = Once()
        self._has_said = False  # that it fails
        self._thread = Boundary().thread(
            f"mfu_jax {self.name}", f"{self.name} gets no more records", self._run
        )

    @property
    def is_failing(self) -> bool:
        """Whether the sink's last write failed."""
        return self._retry_seconds > 0

    def drops(self, record: StepRecord) -> bool:
        """Whether a record older than what waits has no room here, rather than being written."""
        is_new = self.last is None or record.unix_seconds > self.last.unix_seconds
        return is_new and len(self._queue) >= MOST_ITEMS

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def begin_behind(self, reader: LoggedRecords) -> None:
        """Lets it read records of the file before those that come; call it while it is idle."""
        self._reader, self._is_behind = reader, True
        self._wake.set()

    def put(self, items: Sequence[Any]) -> None:
        """Takes what the log has got; returns at once. The log holds its lock."""
        self._queue.extend(filter(self._wants, items))
        while len(self._queue) > MOST_ITEMS:
            item = self._queue.popleft()
            if isinstance(item, Event):
                self._texts.append(item)
            elif self._log.is_on_disk(self, item):
                self._misses = True
            else:
                self.lost["too far behind"] += 1
        if self._queue and self._is_asleep:
            self._wake.set()

    def settle(self, *, is_last: bool = False) -> threading.Event:
        """Asks the sink to write everything now and flush it.

        Args:
            is_last: the run is ending.

        Returns:
            An event, set when that is done or the sink has failed.
        """
        self._is_last = is_last
        done = threading.Event()
        self._requests.append(done)
        self._wake.set()
        if self._is_over:  # the run has ended: nobody would answer
            done.set()
        return done

    def finish(self, summary: Summary | None = None) -> threading.Event:
        """Asks the sink to write the summary and close; the returned event is set when done."""
        self._summary, self._ends = summary, True
        return self.settle()

    def abandon(self) -> None:
        """Gives up a hung sink: it gets no more records, and another thread closes it."""
        self._is_abandoned = True
        self._wake.set()
        name, missing = f"mfu_jax {self.name}", f"{self.name} is not closed"
        Boundary().thread(name, missing, self._call, "close").start()

    def count_rest(self, *, is_on_disk: bool) -> None:
        """At the end of the run, says what the sink lacks, or counts it as lost.

        Args:
            is_on_disk: the log's files have everything, so that it can be written later.
        """
        rest, reader = self._batch, self._reader
        if reader is None and self._misses:
            rest, reader = [], self._log.reader(self.last)
        found = copy.copy(reader).read(sys.maxsize) if reader else ()
        rest = [*rest, *filter(self._wants, found)]
        if reader is None or not is_on_disk:
            rest += self._queue
        lacks = sum(not isinstance(item, Event) for item in rest)
        if lacks and is_on_disk:
            self._fall_behind()
            _log.warning(
                "%s lacks %s, which the run log has\n"
                "hint: the next run that resumes writes "
                "them, or mfu-jax replay %s --sink NAME does",
                self.name,
                counted(lacks, "record"),
                self._log.metrics_file,
            )
        elif lacks:
            self.lost["not written in time"] += lacks
            _log.warning("%s: %s could not be written", self.name, counted(lacks, "record"))

    def _run(self) -> None:
        while not (self._is_over or self._is_abandoned):
            self._sleep()
            try:
                self._work()
            except BaseException as error:
                self._back_off()
                if self._is_first(type(error)):
                    _log.warning(
                        "%s gets its records later: %s; please report this", self.name, _text(error)
                    )
        self._is_over = True
        for request in self._requests:
            request.set()

    def _sleep(self) -> None:
        """Waits for work: the next attempt or, if idle, an item."""
        if self._retry_seconds:
            self._wait(max(0.0, self._retry_at - self._monotonic()))
        else:
            self._is_asleep = True  # set first, so that `put` sees it
            if not (self._queue or self._reader):
                self._wait(None)
            self._is_asleep = False

    def _wait(self, seconds: float | None) -> None:
        self._wake.wait(seconds)

    def _work(self) -> None:
        requests = list(self._requests)
        try:
            if self._ends:
                self._end()
                return
            if requests or not self._retry_seconds or self._monotonic() >= self._retry_at:
                self._deliver()
            if requests and self._is_last:
                self._try_again()
            if requests and not self._retry_seconds:
                self._call("flush")
        finally:
            for request in requests:
                self._requests.popleft()
                request.set()

    def _end(self) -> None:
        if not self._retry_seconds:  # what came after the last request, as from a slow recorder
            self._deliver()
        if self._summary is not None and self._summary.has_steps:
            self._call("write_summary", self._summary)
        self._call("close")
        self._is_over = True

    def _try_again(self) -> None:
        """Retries a failed sink now, because there is no later chance."""
        for pause in LAST_RETRY_SECONDS:
            if not self._retry_seconds or self._is_abandoned:
                return
            time.sleep(pause)
            self._deliver()

    def _deliver(self) -> None:
        """Passes on what there is, oldest first, until nothing is left or the sink fails."""
        while self._fill_batch() and not self._is_abandoned:
            is_full = len(self._batch) == BATCH_ITEMS
            of_events, same = next(itertools.groupby(self._batch, lambda i: isinstance(i, Event)))
            (self._tell if of_events else self._write)([*same])
            if self._retry_seconds:
                return
            if is_full:
                time.sleep(BREATH_SECONDS)
        self._retry_seconds = 0.0  # nothing to try again: the thread may sleep

    def _fill_batch(self) -> bool:
        """Takes the next items: what it lacks of the log's file, then what waits in memory."""
        while not self._batch:
            if self._reader is not None:
                found = self._reader.read(BATCH_ITEMS)
                self._batch = [*filter(self._wants, found)]
                if not found:
                    self._drop_passed()
                    self._reader = None
                    self._catch_up()
                continue
            with self._log.lock:  # else some might be missing between them
                misses, self._misses = self._misses, False
                waiting = deque[Any]() if misses else self._texts or self._queue
                self._batch = [waiting.popleft() for _ in range(len(waiting))[:BATCH_ITEMS]]
            if misses:
                self._reader = self._log.reader(self.last)
                self._fall_behind()
            elif not self._batch:
                return False
        return True

    def _drop_passed(self) -> None:
        """Takes from the queue the records that the file had; texts among them come next."""
        with self._log.lock:
            ends = [n for n, item in enumerate(self._queue, 1) if _is_same(item, self.last)]
            passed = [self._queue.popleft() for _ in range(max(ends, default=0))]
            self._texts.extend(item for item in passed if isinstance(item, Event))

    def _advance(self, count: int, last: StepRecord | None = None) -> None:
        self.last = last or self.last
        if not self._is_abandoned:
            del self._batch[:count]

    def _tell(self, items: Sequence[Any]) -> None:
        for event in items:
            method, *fields = TEXTS[event.kind]
            self._call(method, *(event.values[field] for field in fields))
        self._advance(len(items))

    def _call(self, method: str, *arguments: Any) -> None:
        """Calls a method of the sink; a failure is reported and not retried."""
        try:
            getattr(self.sink, method)(*arguments)
        except BaseException as error:  # nothing that a sink raises may end this thread
            if self._is_first((method, type(error))):
                _log.warning("%s.%s failed: %s", self.name, method, _text(error))

    def _wants(self, item: Any) -> bool:
        if isinstance(item, Event):
            return item.kind in TEXTS
        return self._keeps_every_step or bool(item.is_logged)

    def _write(self, items: Sequence[Any]) -> None:
        """Writes records until the sink fails."""
        many = getattr(self.sink, "write_many", None)
        # If that fails, none is written; one by one shows which is at fault.
        if many is not None and len(items) > 1 and self._attempt(many, items) is None:
            self._works()
            self._advance(len(items), items[-1])
            return
        while items and not self._is_abandoned:
            finished = self._write_one(items[:2])
            if not finished:
                return
            # At once: if the next one hangs, this one is written.
            self._advance(finished, items[finished - 1])
            items = items[finished:]

    def _write_one(self, items: Sequence[Any]) -> int:
        """Writes the first of two; returns how many are finished, 0 if the sink has failed."""
        write = self.sink.write
        error, finished = self._attempt(write, items[0]), 1
        if error is not None and not is_permanent(error):
            self._attempts += 1
            is_suspect = self._attempts >= (2 if self._is_last else POISON_ATTEMPTS)
            if not is_suspect or len(items) < 2 or self._attempt(write, items[1]) is not None:
                self._fail(error, items[0])
                return 0
            finished = 2
        if error is not None:
            self.lost["could not be written"] += 1
            if self._is_first(type(error)):
                is_event = isinstance(items[0], Event)
                what = "an event" if is_event else f"the record of step {items[0].step}"
                _log.warning(
                    "%s cannot write %s, which is skipped: %s",
                    *(self.name, what, _text(error)),
                )
        self._works()
        return finished

    def _attempt(self, write: Callable[[Any], None], what: Any) -> BaseException | None:
        try:
            write(what)
        except BaseException as error:
            return error
        return None

    def _fail(self, error: BaseException, item: Any) -> None:
        if not self._has_said and self._is_worth_a_line:
            self._has_said = True
            where = "" if isinstance(item, Event) else f" at step {item.step}"
            _log.warning(
                "%s failed%s: %s; training goes on, the log keeps its records and it is tried "
                "again",
                *(self.name, where, _text(error)),
            )
        self._back_off()
        self._fall_behind()

    @property
    def _is_worth_a_line(self) -> bool:
        return True

    def _back_off(self) -> None:
        self._retry_seconds = min(
            2 * self._retry_seconds or FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
        )
        self._retry_at = self._monotonic() + self._retry_seconds

    def _fall_behind(self) -> None:
        """Notes in the log how far the sink got, for the next process."""
        if not self._is_behind:
            self._is_behind = True
            step = -1 if self.last is None else self.last.step
            self._log.event(events.BEHIND, sink=self.name, step=step)

    def _works(self) -> None:
        self._attempts, self._retry_seconds = 0, 0.0
        if self._has_said:
            self._has_said = False
            _log.warning("%s works again; %s lost", self.name, counted(self.lost.total(), "record"))
        self._catch_up()

    def _catch_up(self) -> None:
        """Notes in the log that the sink has fallen behind no longer."""
        if self._is_behind and self._reader is None:
            self._is_behind = False
            self._log.event(events.CAUGHT_UP, sink=self.name)


def _is_same(item: Any, record: StepRecord | None) -> bool:
    return (
        not isinstance(item, Event)
        and record is not None
        and (item.step, item.unix_seconds) == (record.step, record.unix_seconds)
    )


def _text(error: BaseException) -> str:
    return encodable(f"{type(error).__name__}: {error}")
