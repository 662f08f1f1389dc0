"""Times each step one step behind, so that the device never idles for a clock reading.

Step N is dispatched first; then the timer waits for step N−1's outputs and reads the clocks. The
difference between two such readings is the time of step N−1. If the host is slower than the device,
the timer ends a step when the host comes back to dispatch the next one. Where nobody comes back, a
step ends when its outputs are ready, as seen by a thread: during declared waits, while JAX
compiles, and after the last step. Spans outside training (eval, checkpoints, exposed waits for
data) are cut out of the interval that contains them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mfu_jax.logger.timing.compile_events import CompileEvent
from mfu_jax.logger.timing.readiness import Watcher, block_until_ready, is_ready
from mfu_jax.logger.timing.timed_step import NOTHING, Reading, TimedStep
from mfu_jax.util.failsafe import Boundary, failsafe, is_interrupt

# Waking the watcher costs both threads tens of microseconds. After this many consecutive waits
# below this time, as with a loader that has the next batch ready, it is no longer woken.
SHORT_WAIT_SECONDS = 1e-3
SHORT_WAITS = 10
# What the loop does for so long between a step and a pause is no part of that step; longer than the
# watcher goes without a look.
LATE_SECONDS = 0.25
# The watcher returns this soon from a step that was ready before it began to wait.
_AT_ONCE_SECONDS = 1e-3


class DeferredInterrupt:
    """Ctrl-C, or another exception raised by a signal, while the loop waited inside the logger.

    Raised at once, it would lose the step being recorded; raised from an instrumented call, it
    would lose the call's outputs, and the state donated for them.

    Attributes:
        pending: the exception, and the id of the thread it is for; None if there is none.
    """

    def __init__(self) -> None:
        self.pending: tuple[BaseException, int] | None = None

    def defer(self, error: BaseException) -> bool:
        """Keeps `error` for this thread; False if it is not an interrupt."""
        if not is_interrupt(error):
            return False
        self.pending = error, threading.get_ident()
        return True

    def raise_pending(self) -> None:
        """Raises what was kept for this thread, if anything was."""
        if self.pending is not None and self.pending[1] == threading.get_ident():
            error, self.pending = self.pending[0], None
            raise error


class StepTimer:
    """Computes step times on the training thread, without rates or sinks.

    Args:
        clock: wall clock in seconds, used to measure step time.
        monotonic: monotonic clock in seconds, trusted when the two disagree.
        watcher: watches the device while the training thread is busy elsewhere.

    Attributes:
        interrupt: one caught during the wait in `dispatched`.
        watcher: as given, or a new one.
        part: outputs of the newest of several calls that make a step, until it is dispatched.
        waited_seconds: how long the last call of `dispatched` waited.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        watcher: Watcher | None = None,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self.watcher = watcher or Watcher(self.read)
        self._follow = self.watcher.follow
        self._short_waits = 0
        self._last_seconds = 0.0
        self._pending: TimedStep | None = None
        self._newest: TimedStep | None = None  # during a wait: the step in flight, or `part`
        self.part: Mapping[str, Any] = NOTHING
        self._spans: dict[str, float] = {}
        self._compile_events: list[CompileEvent] = []
        self._started = self._mark = self._wait_began = self.read()
        self.waited_seconds = 0.0
        self._gc_seconds = _GC.seconds
        self._left_at: float | None = None  # end of the last `dispatched`, unless paused since
        self._called_at: float | None = None
        self._is_called = False  # whether the newest step's call was announced
        self._loop_waits = 0.0
        self.interrupt = DeferredInterrupt()

    def read(self) -> Reading:
        """Both clocks, read now."""
        return self._clock(), self._monotonic()

    def elapsed_seconds(self) -> float:
        """Seconds since the timer was made."""
        return self._monotonic() - self._started[1]

    def begin_call(self) -> None:
        """Called just before the next step is called; never waits.

        If the step in flight is done by now, this is its end time: the time of the call itself,
        such as a compilation, belongs to the next step.
        """
        step = self._pending
        self._called_at = self._monotonic()
        if step is not None and step.completed is None and is_ready(step.metrics):
            step.completed = self.read()  # at once: a thread may lose its turn between two clocks

    def dispatched(self, step: TimedStep) -> TimedStep | None:
        """Takes the step just dispatched and returns the one before it.

        The returned step has its readings but is not measured yet: code that runs so seldom is
        cold, and the recorder's thread measures a whole batch at a time. Blocks until that step is
        done, for `waited_seconds`. An interrupt of that wait is kept in `interrupt`; raise it when
        both steps are safe.
        """
        previous = self._pending
        self.waited_seconds = 0.0
        self._follow(step)
        before = left_at = self._monotonic()
        if previous is not None:
            self._pending = None  # a device error is raised only once
            try:
                block_until_ready(previous.metrics)
            except BaseException as error:
                if not self.interrupt.defer(error):
                    raise
            now = self._clock(), self._monotonic()
            left_at = now[1]
            self.waited_seconds = left_at - before
            self._end(previous, previous.completed or now)
        gc_seconds = _GC.seconds
        if self._left_at is not None:
            (previous or step).loop = (  # a `LoopTimes`, but for the cost of making one
                before - self._left_at,
                self._loop_waits,
                0.0 if self._called_at is None else before - self._called_at,
                left_at - before,
                gc_seconds - self._gc_seconds,
            )
        self._left_at, self._gc_seconds = left_at, gc_seconds
        self._is_called = self._called_at is not None
        self._called_at, self._loop_waits = None, 0.0
        if self._spans or self._compile_events:
            self._take(step)
        self._pending, self.part = step, NOTHING
        return previous

    def timed_elsewhere(self, step: TimedStep, seconds: float) -> TimedStep | None:
        """Takes a step timed by the caller; returns the step in flight, timed."""
        previous = self.drain()
        self._left_at = None
        self.waited_seconds = 0.0
        self._take(step)
        self._finish(step, self.read())
        step.seconds = seconds
        step.clock_jump_seconds = None
        return previous

    def drain(self, *, is_last: bool = False) -> TimedStep | None:
        """Waits for the step in flight and returns it, timed; None if there is none.

        Args:
            is_last: no step comes after it, so what the loop did since is not part of its time.
        """
        step, self._pending = self._pending, None
        if step is None:
            return None
        was_ready = is_ready(step.metrics)
        try:
            block_until_ready(step.metrics)
        except BaseException as error:
            if is_interrupt(error):
                self._pending = step  # keep it for the end of the run
            raise
        now = self.read()
        if was_ready and step.completed is None:
            waits = self.watcher.waits
            if waits is not None and waits[0] is step:
                step.see(waits[1], now)  # ended just now: the loop woke before the watcher
            (self._end_last if is_last else self._end_before)(step, now)
        self._finish(step, step.completed or now)
        return step

    def _end_last(self, step: TimedStep, now: Reading) -> None:
        """Sets when the last step ended, which was before `now`."""
        begun, ready = step.seen or (now, now)
        # The loop may have come back so late from the step before that this one was over, too.
        is_seen = ready[1] - begun[1] > _AT_ONCE_SECONDS and ready[1] > self._mark[1]
        if is_seen or not self._last_seconds:
            step.completed = max(ready, self._mark, key=lambda reading: reading[1])
            return
        # It ended between two looks, or before it was recorded, as where the loop had read its
        # loss: assume the duration of the step before.
        ended = _before(begun, max(0.0, begun[1] - self._mark[1] - self._last_seconds))
        if self._is_called:  # when its call began is known: it ended after that had returned
            returned = _before(now, max(0.0, now[1] - (self._left_at or 0.0)))
            step.completed = max(ended, returned, self._mark, key=lambda reading: reading[1])
            return
        step.completed = max(ended, self._mark, key=lambda reading: reading[1])
        self._mark = _before(step.completed, self._last_seconds)

    def _end_before(self, step: TimedStep, now: Reading) -> None:
        """Sets when a step ended if the loop then did other things for long, until `now`.

        They belong to the next step, as without a pause; after the last one, to none.
        """
        usual = self._last_seconds
        if not usual or now[1] - self._mark[1] < 3 * usual + LATE_SECONDS:
            return  # the loop came as it always does
        begun, ready = step.seen or (now, now)
        if ready[1] - begun[1] > _AT_ONCE_SECONDS and ready[1] > self._mark[1]:
            late = now[1] - ready[1]
        else:  # unseen: assume the duration of the step before, from when it was dispatched
            late = now[1] - max(self._mark[1], self._left_at or 0.0) - usual
        if late > LATE_SECONDS:
            step.completed = _before(now, late)

    def cut(self, name: str, start: Reading, end: Reading) -> None:
        """Cuts a span outside the loop out of the step whose interval contains it."""
        self._left_at = None
        self._cut(name, start, end)

    def _cut(self, name: str, start: Reading, end: Reading) -> None:
        seconds = end[1] - start[1]
        # Each clock is advanced by its own difference, so that a jump inside the span stays there.
        self._mark = (self._mark[0] + end[0] - start[0], self._mark[1] + seconds)
        self._spans[name] = self._spans.get(name, 0.0) + seconds

    def take_spans(self) -> dict[str, float]:
        """Returns and clears the spans not yet given to a step."""
        spans, self._spans = self._spans, {}
        return spans

    def open_wait_seconds(self) -> float:
        """Device idle seconds since the last wait began; callable from any thread."""
        step, began = self._newest, self._wait_began
        idle_since = began if step is None else step.completed
        return 0.0 if idle_since is None else self._monotonic() - max(idle_since[1], began[1])

    def begin_wait(self) -> Reading | None:
        """A wait on the host begins. Returns its start if the device is already idle."""
        step = self._newest = self._pending
        now = self._wait_began = self.read()
        watches = self._short_waits < SHORT_WAITS
        if self.part:  # of the step after it
            if step is not None and is_ready(step.metrics):
                step.completed = step.completed or now
            elif step is not None and watches:
                self._watch(step)
            step = self._newest = TimedStep()
            step.metrics = self.part
        if step is None:
            return now
        if is_ready(step.metrics):
            step.completed = step.completed or now
            return now
        if watches:
            self._watch(step)
        return None

    def end_wait(self, name: str, idle_since: Reading | None) -> TimedStep | None:
        """A wait on the host ends. Returns the step in flight, timed, if it ended before this.

        Only the part during which the device was idle is cut out: the rest cost nothing.
        """
        step = self._pending
        newest, self._newest = self._newest, None
        now = self.read()
        is_short = now[1] - self._wait_began[1] < SHORT_WAIT_SECONDS
        self._short_waits = self._short_waits + 1 if is_short else 0
        self._loop_waits += now[1] - self._wait_began[1]
        if idle_since is None and newest is not None:
            if not is_ready(newest.metrics):
                self._spans.setdefault(name, 0.0)
                return None
            idle_since = newest.completed or self._likely_end(newest, now)
        start = idle_since or now
        if step is not None:
            end = step.completed or (
                start if step is newest else min(start, self._likely_end(step, now))
            )
            self._pending = None
            self._finish(step, end)
        self._cut(name, start, now)
        return step

    def _likely_end(self, step: TimedStep, now: Reading) -> Reading:
        """Estimated end of a step that ended unobserved during the wait that ends now."""
        if step.watched:
            return now  # the watcher is a moment late, so the idle time is about zero
        # An unexpected long wait after many short ones: assume the previous step's duration.
        # A part of the step after the one in flight took less than that again.
        usual = self._last_seconds * (1 if step is self._pending else 2)
        end = max(self._wait_began[1], self._mark[1] + usual)
        return _before(now, max(0.0, now[1] - end))

    def compiling(self, event: CompileEvent) -> None:
        """Called when the training thread compiles in order to dispatch the next step."""
        step = self._pending
        if step is not None and step.completed is None and not step.watched:
            if is_ready(step.metrics):
                # Whether it ended before or during this compilation is unknown.
                step.is_compile = True
                step.completed = self.read()
            self._watch(step)
        self._compile_events.append(event)

    def close(self) -> None:
        """Stops the watcher's thread."""
        self.watcher.close()

    def _watch(self, step: TimedStep) -> None:
        if step.completed is None and not step.watched:
            step.watched = True
            self.watcher.watch(step)

    def _take(self, step: TimedStep) -> None:
        if self._spans:
            step.spans, self._spans = self._spans, {}
        if self._compile_events:
            step.compile_events, self._compile_events = self._compile_events, []
            step.is_compile = any(event.stage == "compile" for event in step.compile_events)

    def _end(self, step: TimedStep, end: Reading) -> None:
        begin, self._mark = self._mark, end
        self._last_seconds = 0.0 if step.is_compile else end[1] - begin[1]
        step.readings = begin, end

    def _finish(self, step: TimedStep, end: Reading) -> None:
        self._end(step, end)
        step.measure()


def _before(reading: Reading, seconds: float) -> Reading:
    return reading[0] - seconds, reading[1] - seconds


class GcPauses:
    """Adds up the time of all collections from now on, on any thread.

    The collector's callback costs less than a microsecond per collection.

    Attributes:
        seconds: the sum so far.

    >>> pauses = GcPauses()
    >>> found = gc.collect()
    >>> pauses.seconds > 0
    True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._boundary = Boundary()
        self._began: float | None = None
        gc.callbacks.append(self._on_collection)

    @failsafe("pauses of the garbage collector are not known")
    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        elif self._began is not None:
            self.seconds += time.monotonic() - self._began
            self._began = None


_GC = GcPauses()
"""The one of all loggers: collections stop the whole process, and callbacks stay."""
