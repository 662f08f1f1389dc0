"""Parts of the loop outside steps: pauses and waits, and the step held back for them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mfu_jax.logger.loop.loop_lock import acquire_loop_lock, holding, make_loop_lock
from mfu_jax.logger.records.non_finite import RERAISED
from mfu_jax.logger.timing.readiness import block_until_ready
from mfu_jax.logger.timing.timed_step import Reading, TimedStep
from mfu_jax.logger.timing.timer import StepTimer
from mfu_jax.util.failsafe import Boundary, failsafe

if TYPE_CHECKING:
    from mfu_jax.logger.run_log.recorder import Recorder
    from mfu_jax.logger.run_log.run_log import RunLog
    from mfu_jax.logger.watchdog import Watchdog

_log = logging.getLogger("mfu_jax")


class LoopSpans:
    """Measures spans of the loop outside steps; holds the step that a pause waited for.

    Args:
        timer: the clocks.
        pipeline: where a step goes once nothing more can be added to it.
        watchdog: suspended during pauses.
        boundary: where failures are reported.
        journal: records the pauses.

    Attributes:
        held: a timed step to which a later eval or pause may still add.
        late: results of an eval whose step is already written, and numbers that belong to no
            particular step; the next record takes them.
        active: whether a span is open; a nested span is part of the outer one.
        paused: the name of the open pause; empty if none.
        lock: shared by the loop's threads; held to record a step and to begin or end a span.
    """

    lock: threading.RLock

    def __init__(
        self,
        timer: StepTimer,
        pipeline: Recorder,
        watchdog: Watchdog,
        boundary: Boundary,
        journal: RunLog,
    ) -> None:
        self.journal = journal
        journal.idle_seconds = timer.open_wait_seconds
        self.held: TimedStep | None = None
        self.late: dict[str, Any] = {}
        self.active = False
        self.paused = ""
        make_loop_lock(self)
        self._calls: dict[str, list[Any]] = {}
        self._calls_after = -1
        self._pause: object = None
        self._inside = contextvars.ContextVar[object]("mfu_jax_pause", default=None)
        self._timer = timer
        self._pipeline = pipeline
        self._watchdog = watchdog
        self._boundary = boundary

    def release(self) -> None:
        """Passes the held step on."""
        with holding(self.lock):
            held, self.held = self.held, None
            if held is not None:
                self._pipeline.put(held)

    def hold(self, step: TimedStep) -> None:
        """Holds a step, and passes on the one held before it."""
        self.release()
        self.held = step

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the results of an eval to the step's record if held, otherwise to the next one."""
        with holding(self.lock):
            if self.held is not None and self.held.step == step:
                self.held.extra = {**self.held.extra, **metrics}
            else:
                self.late |= {**metrics, "step": step}

    def add_numbers(self, numbers: Mapping[str, float]) -> None:
        """Adds numbers that belong to no particular step to the first unwritten record."""
        if self.held is not None:
            self.held.extra = {**self.held.extra, **numbers}
        else:
            self.late |= numbers

    @property
    def takes_calls(self) -> bool:
        """Whether this thread or asyncio task is inside a pause; others may be running steps."""
        return bool(self.paused) and self._inside.get() is self._pause

    def begin_calls(self, name: str) -> None:
        """Begins a pause on this thread, in this asyncio task and those that it starts."""
        self.paused, self._pause = name, object()
        self._inside.set(self._pause)

    def add_call(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds an instrumented call to the open pause; it does not count as a step.

        Args:
            step: the last step before it.
            metrics: of the call; those of an eval are averaged over all its calls.
        """
        self._calls_after = step
        for name, value in metrics.items():
            self._calls.setdefault(name, []).append(value)

    def end_calls(self) -> None:
        """Waits for the calls made in a pause, so that their time counts as the pause's."""
        calls, self._calls = self._calls, {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the loop hits it when it reads them
            block_until_ready({name: values[-1] for name, values in calls.items()})
        if calls and self.paused == "eval":
            known = {*self.late, *(self.held.extra if self.held is not None else ())}
            new = {n: functools.partial(_mean, v) for n, v in calls.items() if n not in known}
            self.add(self._calls_after, new)

    def take_late(self) -> dict[str, Any]:
        """Returns `late` and clears it."""
        late, self.late = self.late, {}
        return late

    def hold_last(self) -> None:
        """Waits for the step in flight and holds it."""
        try:
            last = self._timer.drain(is_last=True)
        except jax.errors.JaxRuntimeError as error:  # earlier measurements are still written
            _log.warning("the step in flight did not end: %s", error)
            return
        if last is not None:
            self.hold(last)

    def take_last(self) -> TimedStep | None:
        """Returns the held step with all late results, because no step comes after it."""
        last, self.held = self.held, None
        if last is not None:
            last.extra = {**last.extra, **self.take_late()}
        return last

    def pause(self, name: str, check: Callable[[], None]) -> Pause:
        """Waits for the step in flight, calls `check`, and attributes the time inside to `name`."""
        self._timer.interrupt.raise_pending()
        return Pause(self, self._timer, name, check, self._watchdog, self._boundary)

    def wait(self, name: str) -> Wait:
        """Measures the part of a wait during which the device is idle."""
        self._timer.interrupt.raise_pending()
        return Wait(self, self._timer, self._pipeline, name, self._watchdog, self._boundary)


class Pause:
    """See `LoopSpans.pause`."""

    __slots__ = (
        "_boundary",
        "_check",
        "_is_inner",
        "_name",
        "_spans",
        "_start",
        "_timer",
        "_watchdog",
    )

    def __init__(
        self,
        spans: LoopSpans,
        timer: StepTimer,
        name: str,
        check: Callable[[], None],
        watchdog: Watchdog,
        boundary: Boundary,
    ) -> None:
        self._watchdog = watchdog
        self._spans = spans
        self._timer = timer
        self._name = name
        self._check = check
        self._boundary = boundary
        self._start: Reading | None = None
        self._is_inner = False

    @failsafe("the time of {0._name} is not known", passes=RERAISED)
    def __enter__(self) -> None:
        spans = self._spans
        with holding(spans.lock):
            if spans.active:
                self._is_inner = not self._watchdog.is_paused
                if self._is_inner:
                    self._watchdog.pause()
                return
            finished = self._timer.drain()
            start = self._timer.read()
            self._watchdog.pause()
            spans.journal.begin(self._name, start, finished)
            if finished is not None:
                spans.hold(finished)
            spans.active, self._start = True, start
            spans.begin_calls(self._name)
        try:
            self._check()  # unlocked, so that a slow sink delays no other thread's step
        except BaseException:
            spans.active, self._start, spans.paused = False, None, ""
            raise

    @failsafe("the time of {0._name} is not known")
    def __exit__(self, *error: object) -> None:
        spans, start = self._spans, self._start
        if self._is_inner:
            self._watchdog.resume()
        if start is None:
            return
        try:
            spans.end_calls()
        finally:  # even after Ctrl-C while waiting
            self._end(start)

    def _end(self, start: Reading) -> None:
        spans = self._spans
        with holding(spans.lock):
            spans.active, self._start, spans.paused = False, None, ""
            self._watchdog.resume()
            end = self._timer.read()
            self._timer.cut(self._name, start, end)
            spans.journal.end(end)
            if spans.held is not None:
                spans.held.spans = _sum(spans.held.spans, self._timer.take_spans())
                spans.held.waited_seconds = self._timer.total_seconds("data_wait")


class Wait:
    """See `LoopSpans.wait`. A class, because a generator would cost twice as much per step."""

    __slots__ = (
        "_boundary",
        "_idle_since",
        "_name",
        "_outermost",
        "_pipeline",
        "_spans",
        "_timer",
        "_watchdog",
    )

    def __init__(
        self,
        spans: LoopSpans,
        timer: StepTimer,
        pipeline: Recorder,
        name: str,
        watchdog: Watchdog,
        boundary: Boundary,
    ) -> None:
        self._watchdog = watchdog
        self._boundary = boundary
        self._spans = spans
        self._timer = timer
        self._pipeline = pipeline
        self._name = name
        self._outermost = False
        self._idle_since: Reading | None = None

    @failsafe("the wait for {0._name} is not known")
    def __enter__(self) -> None:
        spans = self._spans
        lock = spans.lock
        has_lock = lock.acquire(False) or acquire_loop_lock(lock)
        try:
            if not spans.active:
                self._outermost = spans.active = True
                self._watchdog.wait(self._name)
                self._idle_since = self._timer.begin_wait()
                spans.journal.is_waiting = self._name == "data"
        finally:
            if has_lock:
                lock.release()

    @failsafe("the wait for {0._name} is not known", passes=RERAISED)
    def __exit__(self, *error: object) -> None:
        spans = self._spans
        if not self._outermost:
            return
        lock = spans.lock
        has_lock = lock.acquire(False) or acquire_loop_lock(lock)
        try:
            spans.active = spans.journal.is_waiting = False
            self._watchdog.wait("")
            finished = self._timer.end_wait(f"{self._name}_wait", self._idle_since)
            if finished is not None:
                spans.release()
                self._pipeline.put(finished)
        finally:
            if has_lock:
                lock.release()


def _mean(values: Sequence[Any]) -> Any:
    return np.mean([np.asarray(value) for value in values], axis=0)


def _sum(spans: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {**spans, **{name: spans.get(name, 0.0) + spent for name, spent in more.items()}}
