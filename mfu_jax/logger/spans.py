"""Parts of the loop outside steps: pauses, waits, and the step that is held for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mfu_jax.logger.pipeline import RecordPipeline
from mfu_jax.logger.timing.timer import Reading, StepTimer, TimedStep


class LoopSpans:
    """Measures spans of the loop outside steps; holds the step that a pause has drained.

    Attributes:
        held: a timed step to which a later eval or pause may still add.
        late: results of an eval whose step is already written; the next record takes them.
        active: whether a span is open; a span inside another is part of the outer one.
    """

    def __init__(self, timer: StepTimer, pipeline: RecordPipeline) -> None:
        self.held: TimedStep | None = None
        self.late: dict[str, Any] = {}
        self.active = False
        self._timer = timer
        self._pipeline = pipeline

    def release(self) -> None:
        """Passes the held step on."""
        held, self.held = self.held, None
        if held is not None:
            self._pipeline.put(held)

    def hold(self, step: TimedStep) -> None:
        """Holds a step, and passes on the one held before it."""
        self.release()
        self.held = step

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the results of an eval to the step's record, or otherwise to the next one."""
        if self.held is not None and self.held.step == step:
            self.held.extra |= metrics
        else:
            self.late |= {**metrics, "step": step}

    def take_late(self) -> dict[str, Any]:
        """Returns `late` and clears it."""
        late, self.late = self.late, {}
        return late

    def take_last(self) -> TimedStep | None:
        """Releases the held step, with all late results because no step comes after it."""
        last, self.held = self.held, None
        if last is not None:
            last.extra |= self.take_late()
        return last

    @contextlib.contextmanager
    def pause(self, name: str, check: Callable[[], None]) -> Iterator[None]:
        """Waits for the step in flight, calls `check`, and attributes the time inside to `name`."""
        if self.active:
            yield
            return
        finished = self._timer.drain()
        start = self._timer.read()
        if finished is not None:
            self.hold(finished)
        check()
        self.active = True
        try:
            yield
        finally:
            self.active = False
            self._timer.cut(name, start, self._timer.read())
            if self.held is not None:
                for span, spent in self._timer.take_spans().items():
                    self.held.spans[span] = self.held.spans.get(span, 0.0) + spent

    def wait(self, name: str) -> Wait:
        """Measures the part of a wait in which the device is idle."""
        return Wait(self, self._timer, self._pipeline, name)


class Wait:
    """See `LoopSpans.wait`. A class, because a generator costs twice as much per step."""

    __slots__ = ("_idle_since", "_name", "_outermost", "_pipeline", "_spans", "_timer")

    def __init__(
        self, spans: LoopSpans, timer: StepTimer, pipeline: RecordPipeline, name: str
    ) -> None:
        self._spans = spans
        self._timer = timer
        self._pipeline = pipeline
        self._name = name
        self._outermost = False
        self._idle_since: Reading | None = None

    def __enter__(self) -> None:
        spans = self._spans
        if not spans.active:
            self._outermost = spans.active = True
            self._idle_since = self._timer.begin_wait()

    def __exit__(self, *error: object) -> None:
        spans = self._spans
        if self._outermost:
            spans.active = False
            finished = self._timer.end_wait(f"{self._name}_wait", self._idle_since)
            if finished is not None:
                spans.release()
                self._pipeline.put(finished)
