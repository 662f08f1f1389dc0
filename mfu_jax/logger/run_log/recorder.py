"""The recorder: turns timed steps into records, off the training thread, and appends them.

The training thread appends the step to a queue and goes on. Every `write_period_seconds`, one
thread takes what has arrived, turns it into records, shows them to the monitors, and appends them
to the run log, which its followers pass on. A killed process therefore loses at most the steps of
its last period; if steps are longer than a period, each is passed on at once.

Waking a thread costs the waking thread tens of microseconds, and the process as much again. So the
recorder's is not woken while steps arrive faster than the periods; it polls. Its periods are short
at first: a whole one would be all but the first step of a run that is killed within it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfu_jax.logger.alarm import Alarm
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.records.non_finite import LossWatch, NonFiniteLossError
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.run_log import events
from mfu_jax.logger.run_log.monitor import Monitor
from mfu_jax.logger.run_log.record_builder import RecordBuilder
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.logger.timing.timed_step import NOTHING, TimedStep
from mfu_jax.util.failsafe import Boundary, Once, failsafe
from mfu_jax.util.formatting import strict

# How often the thread looks at its queue while no items arrive.
IDLE_SECONDS = 1.0
# The first period, and the part of its age that a young run loses in a kill.
FIRST_PERIOD_SECONDS = 0.05
_PART_OF_AGE = 0.2
# Longest wait for room if items arrive faster than they are handled; then the oldest are dropped.
# This budget recovers at the given fraction of elapsed time: no run is slowed by more.
PATIENCE_SECONDS = 1.0
_REGAINED = 0.01
_log = logging.getLogger("mfu_jax")
# Longest wait for all followers together: at a flush, and at the end of the run.
DRAIN_SECONDS = 10.0
# Of that, reserved at the end for summaries and closing.
CLOSE_SECONDS = 1.0
# The limit for a sink that has hung before, so that no later checkpoint waits for it.
HUNG_DRAIN_SECONDS = 0.5
# The GIL is released between slices of work by a short sleep: otherwise the training thread may
# wait for it for 5 ms, which is a whole step.
SLICE = 25
BREATH_SECONDS = 1e-4
# Records are appended this long after the first of them was begun, at the latest: each append wakes
# a thread for each sink.
_LONG_SECONDS = 0.1


@dataclasses.dataclass(eq=False)
class RecorderThread:
    """Handles items in order on one daemon thread.

    Args:
        handle: takes a batch of non-callable items; callable items are called instead.
        size: number of items that may wait. If the thread is too slow, `put` waits for one second,
            and from then on for 1% of the time; after that, each new item drops the oldest one.
        period_seconds: how often items are taken while they arrive; 0: each at once. Counted from
            the last time that some were taken, so that slow handling does not add to it.

    Attributes:
        dropped: number of non-callable items that were never handled.
    """

    handle: Callable[[Sequence[Any]], None]
    _: dataclasses.KW_ONLY
    size: int = 256
    period_seconds: float = 0.1

    def __post_init__(self) -> None:
        self.dropped = 0
        self._began, self._took_at = math.inf, 0.0  # when items were taken: the first and the last
        self._patience_seconds, self._waited_at = PATIENCE_SECONDS, time.monotonic()
        self._queue: deque[Any] = deque()
        self._wake = Alarm()
        self._has_moved = threading.Event()
        self._is_asleep = self._is_over = False
        self._is_first = Once()
        self._hurried = 0
        self._most = 0  # items that may wait before `put` calls `_attend`
        boundary = Boundary()
        self._failsafe = failsafe("some metrics were lost", boundary)
        self._thread = boundary.thread("mfu_jax recorder", "no more metrics are written", self._run)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queues one item; wakes the thread only if it is idle or many items wait."""
        queue = self._queue
        queue.append(item)
        if len(queue) > self._most:  # one check, because each costs a step microseconds
            self._attend()

    def flush_soon(self) -> None:
        """Wakes the thread for the step just dispatched, which keeps much memory alive.

        That step is put one step later, after the previous one.
        """
        self._hurried, self._most = 2, 0

    def settle(self, timeout: float) -> bool:
        """Waits until everything put so far has been handled; False on time-out."""
        done = threading.Event()
        self._queue.append(done.set)
        self._wake.set()
        return self._thread.is_alive() and done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Stops the thread; unhandled items count as dropped."""
        self._is_over = True
        self._wake.set()
        self._thread.join(timeout)
        self.dropped += sum(not callable(item) for item in self._take())

    def _attend(self) -> None:
        """Wakes the thread: it is asleep, hurried, or many items wait."""
        if len(self._queue) > self.size:
            self._make_room()
        self._hurried = max(0, self._hurried - 1)
        self._sleeps(False)
        self._wake.set()

    def _sleeps(self, is_asleep: bool) -> None:
        self._is_asleep = is_asleep
        self._most = 0 if is_asleep or self._hurried else (self.size - 1) // 2

    def _make_room(self) -> None:
        begun = time.monotonic()
        regained = _REGAINED * (begun - self._waited_at)
        patience = min(PATIENCE_SECONDS, self._patience_seconds + regained)
        while len(self._queue) > self.size:
            self._has_moved.clear()
            self._wake.set()
            left = begun + patience - time.monotonic()
            if left <= 0 or not self._has_moved.wait(left):
                self._drop_oldest()
                break
        self._waited_at = time.monotonic()
        self._patience_seconds = max(0.0, patience - (self._waited_at - begun))

    def _drop_oldest(self) -> None:
        if self._is_first():
            _log.warning(
                "making records is stuck or too slow: %d steps wait; training goes on, the oldest "
                "steps are left out\n"
                "hint: usually a metric that is a slow function, or an output that "
                "never gets ready",
                self.size,
            )
        with contextlib.suppress(IndexError):  # the thread moved after all
            self.dropped += not callable(self._queue.popleft())

    def _run(self) -> None:
        waits = False
        while not self._is_over:
            self._sleeps(not waits)
            if waits or not self._queue:
                self._wake.wait(self._due_seconds() if waits else IDLE_SECONDS)
            self._sleeps(False)
            items = self._take()
            # Calls alone, such as a set-up just before the loop, must not delay the first step.
            waits = self.period_seconds > 0 and not all(map(callable, items))
            self._handle_all(items)

    def _due_seconds(self) -> float:
        """Until the next items are to be taken."""
        now = time.monotonic()
        self._began = min(self._began, self._took_at)
        period = period_at(now - self._began, self.period_seconds)
        return max(0.0, self._took_at + period - now)

    def _take(self) -> list[Any]:
        self._took_at = time.monotonic()
        items: list[Any] = []
        with contextlib.suppress(IndexError):  # the oldest were dropped
            for _ in range(len(self._queue)):
                items.append(self._queue.popleft())
        self._has_moved.set()
        return items

    def _handle_all(self, items: list[Any]) -> None:
        """Empties `items`, so that during a call nothing keeps the steps before it alive."""
        while items:
            steps = list(itertools.takewhile(lambda item: not callable(item), items))
            del items[: len(steps)]
            with self._failsafe:
                if steps:
                    self.handle(steps)
                else:
                    items.pop(0)()
            del steps


def period_at(age: float, longest: float) -> float:
    """Seconds between two batches, `age` seconds after the first one.

    >>> [period_at(age, 0.5) for age in (0.0, 1.0, 10.0)]
    [0.05, 0.2, 0.5]
    """
    return min(max(FIRST_PERIOD_SECONDS, _PART_OF_AGE * age), longest)


class Recorder:
    """Makes a record of every step and appends it to the run log, off the training thread.

    Args:
        builder: makes records and keeps the statistics.
        log: where records go.
        sinks: follow the log; closed with the recorder.
        config: which losses count as failures, and how often records are written.
        monitors: shown every record, in this order.

    Attributes:
        failure: the first non-finite loss that aborts the run; every step up to it has been
            written, and no later step is.
    """

    def __init__(
        self,
        builder: RecordBuilder,
        log: RunLog,
        sinks: Sequence[Sink],
        config: LoggerConfig,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        self.failure: NonFiniteLossError | None = None
        self._boundary = Boundary()
        self._builder = builder
        self._log = log
        self._monitors = monitors
        log.log_period = config.log_period
        log.event(events.LOGGER, log_period=config.log_period)
        self._followers = [
            log.follow(sink, start_step=config.start_step)
            for sink in sorted(sinks, key=log.is_file, reverse=True)  # the others may read it back
        ]
        self._losses = LossWatch(
            abort_on_nan=config.abort_on_nan_loss, abort_on_inf=config.abort_on_inf_loss
        )
        self._lost_steps = 0
        self._thread = RecorderThread(self._handle, period_seconds=config.write_period_seconds)
        self.put: Callable[[TimedStep | Callable[[], object]], None] = self._thread.put
        self.flush_soon: Callable[[], None] = self._thread.flush_soon

    @property
    def dropped_by_sink(self) -> dict[str, int]:
        """Records that were not delivered, by sink and reason."""
        lost = Counter(
            {
                "all sinks: steps came too fast": self._thread.dropped,
                "all sinks: no record could be made": self._lost_steps,
            }
        )
        for follower in self._followers:
            lost.update({f"{follower.name}: {why}": count for why, count in follower.lost.items()})
        return {name: count for name, count in lost.items() if count}

    def tell(self, kind: str, **values: Any) -> None:
        """Appends an event in sequence with the steps; its texts are made encodable."""
        self.put(functools.partial(self._log.event, kind, **strict(values)))

    def flush(self) -> None:
        """Waits until every working follower has all records on disk."""
        self._settle(time.monotonic() + DRAIN_SECONDS)

    def close(
        self,
        last: TimedStep | None,
        spans: Mapping[str, float],
        summarize: Callable[[], Summary],
    ) -> None:
        """Writes the last step and the summary, closes the sinks and ends the threads.

        Takes at most `DRAIN_SECONDS`.

        Args:
            last: the last step of the run.
            spans: time since then not attributed to any step: name → seconds.
            summarize: called once all steps are in the statistics.
        """
        end = time.monotonic() + DRAIN_SECONDS
        if last is not None:
            last.is_last = True
            self.put(last)
        self.put(functools.partial(self._builder.add_spans, spans))
        try:
            self._settle(end - CLOSE_SECONDS, is_last=True)
        except BaseException:  # an impatient user's Ctrl-C
            end = min(end, time.monotonic() + CLOSE_SECONDS)
            raise
        finally:
            self._end(end, summarize)

    def _end(self, end: float, summarize: Callable[[], Summary]) -> None:
        """Ends the threads; what a sink lacks is said."""
        self._thread.close(HUNG_DRAIN_SECONDS)
        for follower in self._followers:  # a failure in one does not affect the others
            with failsafe(f"{follower.name} may have lost its last records", self._boundary):
                if follower.has_hung:
                    follower.abandon()
                follower.count_rest(is_on_disk=self._log.is_on_disk(follower))
        summary = summarize()
        self._log.event(events.SUMMARY, **summary.to_json())
        closed = [f.finish(summary) for f in self._followers if not f.has_hung]
        for event in closed:
            event.wait(max(0.0, end - time.monotonic()))
        self._log.leave(self._followers)
        for monitor in self._monitors:
            with failsafe("monitoring may not stop", self._boundary):
                monitor.close()

    def _settle(self, deadline: float, *, is_last: bool = False) -> None:
        """Waits until everything is recorded and written; `deadline` is on `time.monotonic`."""
        limit_seconds = deadline - time.monotonic()
        # A stuck recorder must not use up all of the sinks' time.
        self._thread.settle(limit_seconds / 2)
        followers = [*self._followers, *self._log.own_followers]
        known = {follower for follower in followers if follower.has_hung}
        soon = time.monotonic() + HUNG_DRAIN_SECONDS
        requests = {follower: follower.settle(is_last=is_last) for follower in followers}
        try:
            for follower, done in requests.items():
                limit = min(deadline, soon) if follower in known else deadline
                done.wait(max(0.0, limit - time.monotonic()))
        finally:  # an impatient user's Ctrl-C
            for follower, done in requests.items():
                follower.has_hung = not done.is_set()
        if late := [f.name for f in followers if f.has_hung and f not in known]:
            _log.warning(
                "metrics were not all written within %.0f s: %s; training goes on\nhint: usually a "
                "disk or network that hangs",
                limit_seconds,
                ", ".join(late),
            )

    def _handle(self, steps: Sequence[TimedStep]) -> None:
        """Makes the records of steps and appends them, all at once unless it takes long."""
        made: list[tuple[TimedStep, StepRecord | None]] = []
        due = time.monotonic() + _LONG_SECONDS
        self._builder.prepare(steps)
        parts = [part for step in steps for part in self._parts(step)]
        for number, step in enumerate(parts, 1):
            if self.failure is not None:
                break
            made.append((step, self._record(step)))
            if number % SLICE == 0:
                time.sleep(BREATH_SECONDS)
            if time.monotonic() > due:
                self._log.steps(made)
                made, due = [], time.monotonic() + _LONG_SECONDS
        self._log.steps(made)

    def _parts(self, step: TimedStep) -> list[TimedStep]:
        if step.steps > 1:
            with failsafe("the steps of a call are in one record", self._boundary):
                return step.parts()
        return [step]

    def _record(self, step: TimedStep) -> StepRecord | None:
        """The record of a step; None if making it failed."""
        record = None
        try:  # a `failsafe` around each of these would take a sixth of their time
            step.measure()
            record = self._builder.build(step)
            step.metrics = NOTHING  # its arrays are freed while they are in the caches
            for monitor in self._monitors:
                try:
                    record = monitor.on_record(step, record)
                except Exception as error:
                    missing = "slow-step, drift and host findings may be missing"
                    self._boundary.caught(error, missing)
            self._builder.activity.add(record.scalars)
        except Exception as error:
            self._boundary.caught(error, f"the metrics of step {step.step} were lost")
        if record is None:
            self._lost_steps += 1
            return None
        self.failure = self._losses.check(step.step, record.scalars.get("learning/loss"))
        return record
