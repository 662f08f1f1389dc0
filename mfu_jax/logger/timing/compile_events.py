"""What JAX traced, lowered and compiled, and how long it took; the only use of its event names.

`jax.monitoring` costs nothing while nothing compiles, so a recompile during a run is seen for free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, MutableSequence
from typing import Any

from jax import monitoring

from mfu_jax.util import jax_internals
from mfu_jax.util.failsafe import Boundary, failsafe

# Named in jax._src.dispatch: strings of a public interface, but not guaranteed to stay.
_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}

# Spans of a thread that a longer one may still turn out to contain; an older one counts for itself.
_MOST_SPANS = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompileEvent:
    """One stage of one compilation.

    Attributes:
        stage: ``trace``, ``lower`` or ``compile``; only the last one means a new executable.
        function: JAX's name of the function, such as ``jit(train_step)``; empty if not given.
        seconds: how long the stage took.
        own_seconds: the part of `seconds` not counted by an earlier event on the same thread.
        thread_id: the thread on which it ran.
    """

    stage: str
    function: str
    seconds: float
    own_seconds: float
    thread_id: int


class CompileLog:
    """Listens to JAX's compile events from its creation until its last subscriber leaves.

    Create it before the first compilation and pass it to `MetricLogger`, so that the summary
    includes the time to compile the step. Several loggers may share one.

    Args:
        monotonic: clock in seconds.
        boundary: where failures are reported; JAX calls the log inside the user's own step.

    Attributes:
        boundary: the one given, or a new one.
        seconds: how long a stage ran, summed over threads; a nested trace counts once.
        compile_count: executables made so far, on any thread.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        boundary: Boundary | None = None,
    ) -> None:
        self.boundary = self._boundary = boundary or Boundary()
        self.seconds = 0.0
        self.compile_count = 0
        self._monotonic = monotonic
        self._subscribers: list[Callable[[CompileEvent], None]] = []
        self._spans: dict[int, deque[tuple[float, float]]] = {}  # by thread: (start, end)
        self._lock = threading.Lock()
        self._is_open = False
        self._listen()

    def subscribe(self, listener: Callable[[CompileEvent], None]) -> None:
        """Calls `listener` with every event, on the thread that compiles."""
        self._listen()
        self._subscribers.append(listener)

    def unsubscribe(self, listener: Callable[[CompileEvent], None]) -> None:
        """Stops calling `listener`, and listening if it was the last; an unknown one is ignored."""
        if listener in self._subscribers:
            self._subscribers.remove(listener)
            if not self._subscribers:
                self.close()

    def close(self) -> None:
        """Stops listening; the counts stay readable."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(ValueError, AssertionError):  # the user has cleared JAX's list
                jax_internals.unregister_event_duration_listener(self._on_duration)

    def _listen(self) -> None:
        if not self._is_open:
            self._is_open = True
            monitoring.register_event_duration_secs_listener(self._on_duration)

    @failsafe("a compilation is not known")
    def _on_duration(self, event: str, duration_secs: float, **details: Any) -> None:
        stage = _STAGES.get(event)
        if stage is None:
            return
        thread_id = threading.get_ident()
        compiled = CompileEvent(
            stage=stage,
            function=str(details.get("fun_name", "")),
            seconds=duration_secs,
            own_seconds=self._add_span(thread_id, duration_secs),
            thread_id=thread_id,
        )
        if stage == "compile":
            self.compile_count += 1
        for listener in tuple(self._subscribers):
            listener(compiled)

    def _add_span(self, thread_id: int, seconds: float) -> float:
        """Adds to `seconds` what no earlier event has; returns that."""
        end = self._monotonic()
        with self._lock:
            spans = self._spans.setdefault(thread_id, deque(maxlen=_MOST_SPANS))
            own = add_span(spans, end - seconds, end)
            self.seconds += own
        return own


def add_span(spans: MutableSequence[tuple[float, float]], begin: float, end: float) -> float:
    """Adds a stage of a compilation to earlier ones; returns the seconds that none of them had.

    A stage is reported when it ends, so those inside it come before it.

    >>> spans = [(1.0, 2.0), (13.0, 14.0)]
    >>> add_span(spans, 10.0, 20.0), spans
    (9.0, [(1.0, 2.0), (10.0, 20.0)])
    """
    known = 0.0
    while spans and spans[-1][0] >= begin:
        inner_begin, inner_end = spans.pop()
        known += inner_end - inner_begin
    if spans:  # its clock and JAX's differ slightly
        begin = min(end, max(begin, spans[-1][1]))
    spans.append((begin, end))
    return max(0.0, end - begin - known)
