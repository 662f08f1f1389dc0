"""What JAX traced, lowered and compiled, and how long it took; the only use of its event names.

`jax.monitoring` costs nothing while nothing compiles, so a recompile during a run is seen for free.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mfu_jax.util.failsafe import Boundary, failsafe, weakly

# Named in jax._src.dispatch: strings of a public interface, but not guaranteed to stay.
_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


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

    JAX does not keep it alive: it disappears with its step, even if nobody closed it.

    Create it before the first compilation and pass it to `MetricLogger`, so that the summary
    includes the time to compile the step. Several loggers may share one.

    Args:
        monotonic: clock in seconds.
        boundary: where failures are reported; JAX calls the log inside the user's own step.

    Attributes:
        boundary: the one given, or a new one.
        compile_count: executables made so far, on any thread.
        available: False if this version of JAX has no such events.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        boundary: Boundary | None = None,
    ) -> None:
        self.boundary = self._boundary = boundary or Boundary()
        self.compile_count = 0
        self._monotonic = monotonic
        self._subscribers: list[Callable[[CompileEvent], None]] = []
        self._finished_seconds = 0.0
        # Spans that a longer one may still turn out to contain, by thread: (start, end).
        self._spans: dict[int, list[tuple[float, float]]] = {}
        self._lock = threading.Lock()
        self._listener = weakly(self._on_duration)
        self._is_open = self.available = _register(self._listener)
        weakref.finalize(self, _GONE.append, self._listener).atexit = False

    @property
    def seconds(self) -> float:
        """Seconds during which a stage ran, summed over threads; a nested trace counts once."""
        with self._lock:
            spans = [span for thread in self._spans.values() for span in thread]
            return self._finished_seconds + sum(end - start for start, end in spans)

    def subscribe(self, listener: Callable[[CompileEvent], None]) -> None:
        """Calls `listener` with every event, on the thread that compiles."""
        if not self._is_open:
            self._is_open = _register(self._listener)
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
            _unregister(self._listener)

    @failsafe("a compilation is not known")
    def _on_duration(self, name: str, seconds: float, **details: Any) -> None:
        stage = _STAGES.get(name)
        if stage is None:
            return
        thread_id = threading.get_ident()
        event = CompileEvent(
            stage=stage,
            function=str(details.get("fun_name", "")),
            seconds=seconds,
            own_seconds=self._add_span(thread_id, seconds),
            thread_id=thread_id,
        )
        if stage == "compile":
            self.compile_count += 1
        for listener in tuple(self._subscribers):
            listener(event)

    def _add_span(self, thread_id: int, seconds: float) -> float:
        end = self._monotonic()
        start = end - seconds
        known = 0.0
        with self._lock:
            spans = self._spans.setdefault(thread_id, [])
            # Events arrive when a stage ends, so an inner trace arrives before the enclosing one.
            while spans and spans[-1][0] >= start:
                inner_start, inner_end = spans.pop()
                known += inner_end - inner_start
            if spans:  # the two clocks differ slightly
                start = min(end, max(start, spans[-1][1]))
            spans.append((start, end))
            if len(spans) > 256:  # the oldest cannot lie inside anything still running
                self._finished_seconds += sum(end - start for start, end in spans[:128])
                del spans[:128]
        return max(0.0, end - start - known)


# Listeners of logs that are gone. They are removed from JAX's list when the next log registers:
# garbage may be collected while JAX iterates over that list.
_GONE: list[Callable[..., None]] = []


def _register(listener: Callable[..., None]) -> bool:
    while _GONE:
        _unregister(_GONE.pop())
    try:
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(listener)
    except (ImportError, AttributeError):
        return False
    return True


def _unregister(listener: Callable[..., None]) -> None:
    try:
        from mfu_jax.util.jax_internals import unregister_event_duration_listener

        unregister_event_duration_listener(listener)
    except (ImportError, ValueError, AssertionError):
        return  # this JAX cannot unregister; the listener has no subscribers and does nothing
