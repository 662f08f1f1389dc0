"""Named parts of the loop: spans, and the step held back for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from mfu_jax.logger.records.non_finite import RERAISED
from mfu_jax.logger.timing.readiness import block_until_ready
from mfu_jax.logger.timing.timed_step import Reading, TimedStep
from mfu_jax.logger.timing.timer import StepTimer
from mfu_jax.util.failsafe import ITSELF, Boundary, failsafe

if TYPE_CHECKING:
    from mfu_jax.logger.run_log.events import Event
    from mfu_jax.logger.run_log.recorder import Recorder
    from mfu_jax.logger.run_log.run_log import RunLog
    from mfu_jax.logger.watchdog import Watchdog

_log = logging.getLogger("mfu_jax")


class Span:
    """A named part of the loop; each subclass is a rule by which its time counts.

    `Pause` is cut out of the step around it, `Wait` only while the device is idle; a
    `mfu_jax.logger.loop.phases.Phase` is part of a step, and a ``StepScope`` is one. A class,
    because a generator would cost twice as much per step.
    """

    __slots__ = ("_boundary", "name")

    def __init__(self, name: str, boundary: Boundary) -> None:
        self.name = name
        self._boundary = boundary

    @failsafe("{0} is not logged", passes=RERAISED, instead=ITSELF)
    def __enter__(self) -> Self:
        self._begin()
        return self

    @failsafe("{0} is not logged", passes=RERAISED)
    def __exit__(self, *error: object) -> None:
        self._end(has_failed=bool(error) and error[0] is not None)

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self, *, has_failed: bool) -> None:
        raise NotImplementedError


@dataclasses.dataclass(eq=False)
class LoopSpans:
    """The pauses and waits of one loop; holds the step that a pause waited for.

    Args:
        timer: the clocks.
        pipeline: where a step goes once nothing more can be added to it.
        watchdog: suspended during pauses.
        boundary: where failures are reported.
        log: of this process; has the pauses.

    Attributes:
        open: the open pause or wait; one inside it is part of it.
        held: a timed step to which a later eval or pause may still add.
        late: results of an eval whose step is already written, and numbers that belong to no
            particular step; the next record takes them.
    """

    timer: StepTimer
    pipeline: Recorder
    watchdog: Watchdog
    boundary: Boundary
    log: RunLog

    def __post_init__(self) -> None:
        self.log.idle_seconds = self._idle_seconds
        self.watchdog.waits_for = self.waits_for
        self.open: Span | None = None
        self.held: TimedStep | None = None
        self.late: dict[str, Any] = {}

    def waits_for(self) -> str:
        """What the loop waits for; empty if it does not. Callable from any thread."""
        span = self.open
        return span.name if isinstance(span, Wait) else ""

    def _idle_seconds(self) -> float:
        return self.timer.open_wait_seconds() if self.waits_for() == "data" else 0.0

    def release(self) -> None:
        """Passes the held step on."""
        held, self.held = self.held, None
        if held is not None:
            self.pipeline.put(held)

    def hold(self, step: TimedStep) -> None:
        """Holds a step, and passes on the one held before it."""
        self.release()
        self.held = step

    def add(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Adds values to the held record if they are of its step, otherwise to the next one.

        Args:
            values: such as the results of an eval.
            step: the step that they belong to; None: they fit any record.
        """
        if self.held is not None and step in (None, self.held.step):
            self.held.extra = {**self.held.extra, **values}
        else:
            self.late.update(values if step is None else {**values, "step": step})

    def add_call(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Adds an instrumented call to the open pause, whose time it is; False if none is open.

        Args:
            step: the last step before it.
            metrics: of the call; those of an eval are averaged over all its calls.
        """
        if not isinstance(self.open, Pause):
            return False
        self.open.calls.append((step, metrics))
        return True

    def add_means(self, calls: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Adds the means of an eval's calls, but for what the loop itself has given."""
        known = {*self.late, *(self.held.extra if self.held is not None else ())}
        means = means_of([metrics for _, metrics in calls])
        self.add({n: mean for n, mean in means.items() if n not in known}, calls[-1][0])

    def take_late(self) -> dict[str, Any]:
        """Returns `late` and clears it."""
        late, self.late = self.late, {}
        return late

    def hold_last(self) -> None:
        """Waits for the step in flight and holds it."""
        try:
            last = self.timer.drain(is_last=True)
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


class Pause(Span):
    """Waits for the step in flight; the time inside counts as the pause's alone.

    Args:
        spans: the loop's.
        name: what the time counts as.
        check: called when it has begun; what it raises ends the pause.
    """

    __slots__ = ("_begun", "_check", "_resumes", "_spans", "_start", "calls")

    def __init__(
        self, spans: LoopSpans, name: str, check: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name, spans.boundary)
        self._spans = spans
        self._check = check
        self._start: Reading | None = None
        self._begun: Event | None = None  # in the log
        self._resumes = False
        self.calls: list[tuple[int, Mapping[str, Any]]] = []  # after which step, its metrics

    def __str__(self) -> str:
        return f"the pause {self.name}"

    def _begin(self) -> None:
        spans = self._spans
        if spans.open is not None:
            self._resumes = not spans.watchdog.is_paused
            spans.watchdog.pause()
            return
        finished = spans.timer.drain()
        if finished is not None:
            spans.hold(finished)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the loop hits it when it reads them
            block_until_ready(spans.timer.part)
        self._start = spans.timer.read()
        spans.open = self
        spans.watchdog.pause()
        self._begun = spans.log.begin(self.name, spans.log.moment(self._start), finished)
        try:
            if self._check is not None:
                self._check()
        except BaseException:
            self._finish(self._start)
            raise

    def _end(self, *, has_failed: bool) -> None:
        if self._resumes:
            self._spans.watchdog.resume()
        if self._start is None:
            return
        try:
            calls, self.calls = self.calls, []  # the loop may enter it again
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the loop hits it, too
                for _, metrics in calls:  # their time is the pause's
                    block_until_ready(metrics)
            if calls and self.name == "eval":
                self._spans.add_means(calls)
        finally:  # even after Ctrl-C while waiting
            self._finish(self._start)

    def _finish(self, start: Reading) -> None:
        spans, timer = self._spans, self._spans.timer
        spans.open = self._start = None
        spans.watchdog.resume()
        end = timer.read()
        timer.cut(self.name, start, end)
        if self._begun is not None:
            spans.log.end(self._begun, spans.log.moment(end))
        if spans.held is not None:
            before, more = spans.held.spans, timer.take_spans()
            spans.held.spans = {**before, **{k: before.get(k, 0.0) + more[k] for k in more}}


class Wait(Span):
    """The device may go on; only the time during which it is idle counts as the wait's.

    Args:
        spans: the loop's.
        name: what is waited for; the time counts as ``<name>_wait``.
    """

    __slots__ = ("_idle_since", "_spans")

    def __init__(self, spans: LoopSpans, name: str) -> None:
        self.name = name  # without a call: it is made in every step
        self._boundary = spans.boundary
        self._spans = spans
        self._idle_since: Reading | None = None

    def __str__(self) -> str:
        return f"the wait for {self.name}"

    def _begin(self) -> None:
        spans = self._spans
        if spans.open is None:
            self._idle_since = spans.timer.begin_wait()
            spans.open = self  # only now: other threads ask for how long

    def _end(self, *, has_failed: bool) -> None:
        spans = self._spans
        if spans.open is not self:
            return
        spans.open = None
        spans.log.end_wait()
        finished = spans.timer.end_wait(f"{self.name}_wait", self._idle_since)
        if finished is not None:
            spans.release()
            spans.pipeline.put(finished)


def means_of(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means of metrics over calls, as functions; also of nested ones."""
    found: dict[str, list[Any]] = {}
    for metrics in calls:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {
        name: means_of(values)
        if all(isinstance(value, Mapping) for value in values)
        else functools.partial(_mean_of_calls, values)
        for name, values in found.items()
    }


def _mean_of_calls(values: Sequence[Any]) -> Any:
    return np.mean([np.asarray(value) for value in values], axis=0)
