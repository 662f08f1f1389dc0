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
        self.has_hung = False
        self._log = log
        self._sink = sink
        self._monotonic = monotonic
        self._queue: deque[Any] = deque()
        self._batch: list[Any] = []  # taken from the file or the queue, and not yet written
        self._misses = False  # the queue had no room for some, which the file has
        self._texts: deque[Event] = deque(maxlen=_MOST_TEXTS)  # for which it had no room either
        self._reader: LoggedRecords | None = None
        self.last: StepRecord | None = None
        self._wake = Alarm()
        self._is_asleep = self._is_behind = False
        self._requests: deque[threading.Event] = deque()
        self._finish: Callable[[], None] | None = None
        self._is_over = self._is_abandoned = self._is_last = False
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

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def begin_behind(self, reader: LoggedRecords) -> None:
        """Lets it read records of the file before those that come; call it while it is idle."""
        self._reader, self._is_behind = reader, True
        self._wake.set()

    def put(self, items: Sequence[Any]) -> None:
        """Takes what the log has got; returns at once. The log holds its lock."""
        self._queue.extend(items)
        while len(self._queue) > MOST_ITEMS:
            item = self._queue.popleft()
            if isinstance(item, Event):
                self._texts.append(item)
            elif self._log.is_on_disk(self):
                self._misses = True
            else:
                self.lost["too far behind"] += self._wants(item)
        if items and self._is_asleep:
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

    def finish(self, summary: Summary) -> threading.Event:
        """Asks the sink to write the summary and close; the returned event is set when done."""
        done = threading.Event()

        def last() -> None:
            if summary.has_steps:
                self._call("write_summary", summary)
            self._end()
            done.set()

        self._finish = last
        self._wake.set()
        return done

    def abandon(self) -> None:
        """Gives up a hung sink: it gets no more records, and another thread closes it."""
        self._is_abandoned = True
        self._wake.set()
        name, missing = f"mfu_jax {self.name}", f"{self.name} is not closed"
        Boundary().thread(name, missing, self._close).start()

    def count_rest(self, *, is_on_disk: bool) -> None:
        """At the end of the run, says what the sink lacks, or counts it as lost.

        Args:
            is_on_disk: the log's files have everything, so that it can be written later.
        """
        rest, reader = self._batch, self._reader
        if reader is None and self._misses:
            rest, reader = [], self._log.reader(self.last)
        rest = [*rest, *(copy.copy(reader).read(sys.maxsize) if reader else ())]
        if reader is None or not is_on_disk:
            rest += self._queue
        lacks = sum(not isinstance(item, Event) and self._wants(item) for item in rest)
        if not lacks:
            return
        if is_on_disk:
            self._fall_behind()
            _log.warning(
                "%s lacks %s, which the run log has\n"
                "hint: the next run that resumes writes "
                "them, or mfu-jax replay %s --sink NAME does",
                self.name,
                counted(lacks, "record"),
                self._log.metrics_file,
            )
        else:
            self.lost["not written in time"] += lacks
            _log.warning("%s: %s could not be written", self.name, counted(lacks, "record"))

    def _close(self) -> None:
        self._call("close")

    def _end(self) -> None:
        self._close()
        self._is_over = True

    def _run(self) -> None:
        while not self._is_over:
            self._sleep()
            try:
                self._work()
            except BaseException as error:
                self._back_off()
                if self._is_first(type(error)):
                    _log.warning(
                        "%s gets its records later: %s; please report this", self.name, _text(error)
                    )
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
        finish, requests = self._finish, list(self._requests)
        try:
            if requests or not self._retry_seconds or self._monotonic() >= self._retry_at:
                self._deliver()
            if requests and self._is_last:
                self._try_again()
            if requests and not self._retry_seconds:
                self._flush()
        finally:
            for request in requests:
                self._requests.popleft()
                request.set()
            self._is_over |= self._is_abandoned
            if finish is not None:
                self._finish = None
                finish()

    def _flush(self) -> None:
        self._call("flush")

    def _try_again(self) -> None:
        """Retries a failed sink now, because there is no later chance."""
        for pause in LAST_RETRY_SECONDS:
            if not self._retry_seconds or self._is_abandoned:
                return
            time.sleep(pause)
            self._deliver()

    def _deliver(self) -> None:
        """Passes on what there is, oldest first, until nothing is left or the sink fails."""
        while not self._is_abandoned:
            if not self._fill_batch():
                self._retry_seconds = 0.0  # nothing to try again: the thread may sleep
                return
            is_full = len(self._batch) == BATCH_ITEMS
            of_events, same = next(itertools.groupby(self._batch, lambda i: isinstance(i, Event)))
            if of_events:
                self._tell([*same])
            else:
                self._write([*same])
            if self._retry_seconds:
                return
            if is_full:
                time.sleep(BREATH_SECONDS)

    def _fill_batch(self) -> bool:
        """Takes the next items: what it lacks of the log's file, then what waits in memory."""
        while not self._batch:
            if self._reader is not None:
                self._batch = self._reader.read(BATCH_ITEMS)
                if not self._batch:
                    self._drop_passed()
                    self._reader = None
                    self._catch_up()
            elif self._misses:
                self._misses, self._reader = False, self._log.reader(self.last)
                self._fall_behind()
            elif self._texts:
                self._batch = [self._texts.popleft() for _ in range(len(self._texts))]
            elif not self._fill():
                break
        return bool(self._batch)

    def _fill(self) -> bool:
        """Takes the next items from the queue; False if there are none."""
        with self._log.lock:  # else some might be missing between them
            is_whole = not (self._misses or self._texts)
            if is_whole:
                self._batch = [self._queue.popleft() for _ in range(len(self._queue))[:BATCH_ITEMS]]
            return bool(self._batch) or not is_whole

    def _drop_passed(self) -> None:
        """Takes from the queue what the file had, up to the last record; tells texts among it."""
        with self._log.lock:
            count = len(self._queue)
            for item in reversed(self._queue):
                if self.last is not None and _is_same(item, self.last):
                    break
                count -= 1
            passed = [*self._texts, *(self._queue.popleft() for _ in range(count))]
            self._texts.clear()
        for item in passed:
            if isinstance(item, Event):
                self._tell_text(item)

    def _advance(self, count: int, last: StepRecord | None = None) -> None:
        self.last = last or self.last
        if not self._is_abandoned:
            del self._batch[:count]

    def _tell(self, happened: Sequence[Event]) -> None:
        for event in happened:
            self._tell_text(event)
        self._advance(len(happened))

    def _tell_text(self, event: Event) -> None:
        method, *fields = TEXTS[event.kind]
        self._call(method, *(event.values[field] for field in fields))

    def _call(self, method: str, *arguments: Any, of: Any = None) -> None:
        """Calls a method of the sink, or `of` another; a failure is reported and not retried."""
        try:
            getattr(of or self._sink, method)(*arguments)
        except BaseException as error:  # nothing that a sink raises may end this thread
            if self._is_first((method, type(error))):
                _log.warning("%s.%s failed: %s", self.name, method, _text(error))

    def _wants(self, record: StepRecord) -> bool:
        return bool(self._sink.keeps_every_step or record.is_logged)

    def _write(self, records: Sequence[StepRecord]) -> None:
        """Writes records until the sink fails."""
        wanted = [record for record in records if self._wants(record)]
        many = getattr(self._sink, "write_many", None)
        if many is not None and len(wanted) > 1:
            try:
                many(wanted)
            except BaseException:  # none written; one by one shows which is at fault
                pass
            else:
                self._works()
                self._advance(len(records), records[-1])
                return
        done = 0
        while done < len(records) and not self._is_abandoned:
            passed = 1
            if self._wants(records[done]):
                passed = self._write_one(records[done : done + 2])
            if not passed:
                return
            # At once: if the next one hangs, this one is written.
            self._advance(passed, records[done + passed - 1])
            done += passed

    def _write_one(self, records: Sequence[StepRecord]) -> int:
        """Writes the first record; returns how many are finished, 0 if the sink has failed.

        Args:
            records: that record, and the one after it, if any.
        """
        error = self._attempt(records[0])
        if error is None:
            self._works()
            return 1
        if is_permanent(error):
            self._skip(records[0], error)
            return 1
        self._attempts += 1
        is_suspect = self._attempts >= (2 if self._is_last else POISON_ATTEMPTS)
        if is_suspect and len(records) == 2 and self._attempt(records[1]) is None:
            self._skip(records[0], error)
            self._works()
            return 2
        self._fail(error, records[0])
        return 0

    def _attempt(self, record: StepRecord) -> BaseException | None:
        try:
            self._sink.write(record)
        except BaseException as error:
            return error
        return None

    def _skip(self, record: StepRecord, error: BaseException) -> None:
        self._attempts = 0
        self.lost["could not be written"] += 1
        self._retry_seconds = 0.0
        if self._is_first(type(error)):
            _log.warning(
                "%s cannot write the record of step %d, which is skipped: %s",
                self.name,
                record.step,
                _text(error),
            )

    def _fail(self, error: BaseException, record: StepRecord | None = None) -> None:
        if not self._has_said and self._is_worth_a_line:
            self._has_said = True
            where = "" if record is None else f" at step {record.step}"
            _log.warning(
                "%s failed%s: %s; training goes on, the log keeps its records and it is tried "
                "again",
                self.name,
                where,
                _text(error),
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


def _is_same(item: Any, record: StepRecord) -> bool:
    return not isinstance(item, Event) and (item.step, item.unix_seconds) == (
        record.step,
        record.unix_seconds,
    )


def _text(error: BaseException) -> str:
    return encodable(f"{type(error).__name__}: {error}")
