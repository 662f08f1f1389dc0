"""Runs one sink on its own thread, so that a sink that fails, stalls or hangs affects nothing else.

A record that can never be written is dropped and counted; any other failure is retried in order,
with back-off. Records that do not fit in memory go to the sink's backlog on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.strict_json import encodable
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.base import Sink, is_permanent
from mfu_jax.util.failsafe import Boundary

if TYPE_CHECKING:
    from mfu_jax.logger.delivery.backlog import Backlog
    from mfu_jax.logger.delivery.backlog_files import Segment

logger = logging.getLogger("mfu_jax")

# Most records held in memory for a sink that falls behind: with a backlog on disk, and without.
QUEUE_RECORDS = 1000
MOST_QUEUE_RECORDS = 10_000
# Number of queued records that wakes a sink that writes only periodically.
MANY_RECORDS = 250
# Records in one write, and the pause after it, in which other threads can take the GIL.
BATCH_RECORDS = 25
BREATH_SECONDS = 1e-4
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
# Pauses between the attempts at the end of a run.
LAST_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.4)
# A record is given up after this many attempts if the next record succeeds; at the end of the run,
# after one.
POISON_ATTEMPTS = 5

Call = Callable[[], None]


class SinkWorker:
    """Passes records and calls to a sink, in order, on one daemon thread.

    Args:
        sink: the sink.
        backlog: where records go that do not fit in memory; None: the oldest are dropped.
        period_seconds: how often records come; the sink writes every `periods_per_write` periods.
        monotonic: clock in seconds, for the time between attempts.

    Attributes:
        name: the sink's class name.
        dropped: number of records that were never written, by reason.
        has_hung: the sink did not finish in the time allowed for its last `settle`.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        backlog: Backlog | None = None,
        period_seconds: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = type(sink).__name__
        self.dropped: Counter[str] = Counter()
        self.has_hung = False
        self._sink = sink
        self._backlog = backlog
        periods = getattr(sink, "periods_per_write", 1)
        self._pause_seconds = periods * period_seconds if periods > 1 else 0.0
        self._is_asleep = self._has_written = False
        self._monotonic = monotonic
        self._queue: deque[StepRecord | Call] = deque()
        self._lock = threading.Lock()  # of the queue; never held while the sink or a disk works
        self._wake = Alarm()
        self._requests: deque[threading.Event] = deque()
        self._finish: Call | None = None
        self._is_over = self._is_abandoned = self._is_last = False
        self._retry_seconds = self._retry_at = 0.0
        self._attempts = 0
        self._reported: set[str] = set()
        self._closed = threading.Event()
        if backlog is not None:
            backlog.on_written = self._wake.set
            if backlog.old:
                self._wake.set()
        self._thread = Boundary().thread(
            f"mfu_jax {self.name}", f"{self.name} gets no more records", self._run
        )
        self._thread.start()

    def put(self, items: Iterable[StepRecord | Call]) -> None:
        """Queues calls, and the records that the sink wants; returns at once."""
        takes_all = self._sink.keeps_every_step
        wanted = [item for item in items if takes_all or callable(item) or item.is_logged]
        if wanted:
            with self._lock:
                self._enqueue(wanted)
            if self._is_asleep or len(self._queue) >= MANY_RECORDS:
                self._wake.set()

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of the sink; a failure is reported and not retried."""
        try:
            getattr(self._sink, method)(*arguments)
        except BaseException as error:  # nothing that a sink raises may end this thread
            if self._is_first(error, method):
                logger.warning("%s.%s failed: %s", self.name, method, _text(error))

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
        return done

    def finish(self, summary: Summary) -> threading.Event:
        """Asks the sink to write the summary and close; the returned event is set when done."""

        def last() -> None:
            if summary.has_steps:
                self.call("write_summary", summary)
            self.call("close")
            self._closed.set()

        self._finish = last
        self._wake.set()
        return self._closed

    def abandon(self) -> None:
        """Gives up a hung sink: it gets no more records, and another thread closes it."""
        self._is_abandoned = True
        self._wake.set()
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread at exit
            threading.Thread(
                target=self.call, args=("close",), name=f"mfu_jax {self.name}", daemon=True
            ).start()

    def keep_rest(self, timeout: float) -> None:
        """Moves unwritten records to the backlog; those that do not fit count as dropped."""
        with self._lock:
            rest = [item for item in self._queue if isinstance(item, StepRecord)]
            self._queue.clear()
        kept, backlog = 0, self._backlog
        if backlog is not None and (rest or backlog.is_open or backlog.old):
            kept = backlog.keep(rest, timeout)
        lost = len(rest) - kept
        if lost:
            self.dropped["not written in time"] += lost
            logger.warning("%s: %d records could not be written", self.name, lost)
        if self._backlog is not None and self._backlog.left:
            logger.warning(
                "%s: %d records wait in %s; the next run that resumes writes them, or mfu-jax "
                "replay does",
                self.name,
                self._backlog.left,
                self._backlog.folder,
            )

    def losses(self) -> Counter[str]:
        """`dropped`, plus the records that the backlog could not keep."""
        losses = self.dropped.copy()
        if self._backlog is not None and self._backlog.dropped:
            losses["backlog full"] += self._backlog.dropped
        return losses

    def _enqueue(self, items: Sequence[StepRecord | Call]) -> None:
        if self._backlog is not None and (
            self._backlog.is_open or len(self._queue) + len(items) > QUEUE_RECORDS
        ):
            self._queue.extend(item for item in items if callable(item))
            self._backlog.add([item for item in items if isinstance(item, StepRecord)])
            return
        self._queue.extend(items)
        while len(self._queue) > MOST_QUEUE_RECORDS:
            self.dropped["backlog full"] += isinstance(self._queue.popleft(), StepRecord)

    def _run(self) -> None:
        while not self._is_over:
            self._sleep()
            self._has_written = bool(self._queue)
            try:
                self._work()
            except BaseException as error:
                self._back_off()
                if self._is_first(error):
                    logger.warning(
                        "%s gets its records later: %s; please report this", self.name, _text(error)
                    )

    def _sleep(self) -> None:
        """Waits for work: the next attempt, the next period, or, if idle, a record."""
        if self._retry_seconds:
            self._wake.wait(max(0.0, self._retry_at - self._monotonic()))
        elif self._has_written and self._pause_seconds:
            self._wake.wait(self._pause_seconds)
        else:
            self._is_asleep = True  # set first, so that `put` sees it
            if not self._queue:
                self._wake.wait()
            self._is_asleep = False

    def _work(self) -> None:
        finish, requests = self._finish, list(self._requests)
        try:
            if requests or not self._retry_seconds or self._monotonic() >= self._retry_at:
                self._write_all()
            if requests and self._is_last:
                self._try_again()
            if requests and not self._retry_seconds:
                self.call("flush")
        finally:
            for request in requests:
                self._requests.popleft()
                request.set()
            if self._is_abandoned:
                self._is_over = True
            elif finish is not None:
                self._is_over = True
                finish()

    def _try_again(self) -> None:
        """Retries a failed sink now, because there is no later chance."""
        for pause in LAST_RETRY_SECONDS:
            if not self._retry_seconds or self._is_abandoned:
                return
            time.sleep(pause)
            self._write_all()

    def _write_all(self) -> None:
        """Writes what is waiting, oldest first, until nothing is left or the sink fails."""
        while not self._is_abandoned:
            source, batch = self._next()
            if not batch:
                self._retry_seconds = 0.0  # nothing to try again: the thread may sleep
                return
            if isinstance(batch[0], StepRecord):
                self._write(batch, source)  # type: ignore[arg-type]  # a batch is of one kind
            else:
                batch[0]()
                self._advance(source, 1)
            if self._retry_seconds:
                return
            if len(batch) == BATCH_RECORDS:
                time.sleep(BREATH_SECONDS)

    def _next(self) -> tuple[Segment | None, Sequence[StepRecord | Call]]:
        """The next records or call, and the backlog file they come from, if any."""
        backlog = self._backlog
        while backlog is not None and backlog.old:
            if records := backlog.old[0].read(BATCH_RECORDS):
                return backlog.old[0], records
            backlog.old.pop(0).trim()
        with self._lock:
            if self._queue and callable(self._queue[0]):
                return None, [self._queue[0]]
            batch = list(
                itertools.takewhile(
                    lambda item: isinstance(item, StepRecord),
                    itertools.islice(self._queue, BATCH_RECORDS),
                )
            )
        if batch or backlog is None or not backlog.is_open:
            return None, batch
        return self._next_of_overflow(backlog)

    def _next_of_overflow(
        self, backlog: Backlog
    ) -> tuple[Segment | None, Sequence[StepRecord | Call]]:
        for _ in range(2):
            if records := backlog.overflow.read(BATCH_RECORDS):
                return backlog.overflow, records
            backlog.sync()
        with self._lock:
            rest = backlog.finish_reading()
            self._queue.extend(rest or ())
        if rest is not None:
            backlog.tidy()
        return None, rest[:BATCH_RECORDS] if rest else []

    def _advance(self, source: Segment | None, count: int) -> None:
        if source is not None:
            source.advance(count)
        elif not self._is_abandoned:
            with self._lock:
                for _ in range(min(count, len(self._queue))):
                    self._queue.popleft()

    def _write(self, records: Sequence[StepRecord], source: Segment | None) -> None:
        """Writes records until the sink fails."""
        many = self._sink.write_many
        if many is not None and len(records) > 1:
            try:
                many(records)
            except BaseException:  # none written; one by one shows which is at fault
                pass
            else:
                self._works()
                self._advance(source, len(records))
                return
        done = 0
        while done < len(records) and not self._is_abandoned:
            passed = self._write_one(records[done : done + 2])
            if not passed:
                return
            self._advance(source, passed)  # at once: if the next one hangs, this one is written
            done += passed

    def _write_one(self, records: Sequence[StepRecord]) -> int:
        """Writes the first record; returns how many are finished, 0 if the sink has failed.

        Args:
            records: that record, and the one after it, if any.
        """
        error = self._attempt(records[0])
        if error is not None and not is_permanent(error):
            self._attempts += 1
            if self._attempts < POISON_ATTEMPTS and not self._is_last:
                self._fail(records[0], error)
                return 0
            # If it fails again and the next one succeeds, the record is at fault, not the sink.
            error = self._attempt(records[0])
        if error is None:
            self._works()
            return 1
        if is_permanent(error):
            self._drop(records[0], error)
            return 1
        if len(records) == 2 and self._attempt(records[1]) is None:
            self._drop(records[0], error)
            self._works()
            return 2
        self._fail(records[0], error)
        return 0

    def _attempt(self, record: StepRecord) -> BaseException | None:
        try:
            self._sink.write(record)
        except BaseException as error:
            return error
        return None

    def _drop(self, record: StepRecord, error: BaseException) -> None:
        self._attempts = 0
        self.dropped["could not be written"] += 1
        self._retry_seconds = 0.0
        if self._is_first(error):
            logger.warning(
                "%s cannot write the record of step %d, which is dropped: %s",
                self.name,
                record.step,
                _text(error),
            )

    def _fail(self, record: StepRecord, error: BaseException) -> None:
        if not self._retry_seconds:
            logger.warning(
                "%s failed at step %d: %s; training goes on, its records are kept and tried again",
                self.name,
                record.step,
                _text(error),
            )
        self._back_off()

    def _back_off(self) -> None:
        self._retry_seconds = min(
            2 * self._retry_seconds or FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS
        )
        self._retry_at = self._monotonic() + self._retry_seconds

    def _is_first(self, error: BaseException, method: str = "") -> bool:
        """True once per method and type of error, so that each is reported once."""
        kind = f"{method} {type(error).__name__}"
        is_first = kind not in self._reported
        self._reported.add(kind)
        return is_first

    def _works(self) -> None:
        self._attempts = 0
        if self._retry_seconds:
            self._retry_seconds = 0.0
            logger.warning("%s works again; %d records were lost", self.name, self.losses().total())


def _text(error: BaseException) -> str:
    return encodable(f"{type(error).__name__}: {error}")
