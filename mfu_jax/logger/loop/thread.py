"""The thread that runs the loop: the only one whose steps are logged."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from threading import get_ident

from mfu_jax.logger.loop.phases import PhaseBook
from mfu_jax.logger.loop.spans import LoopSpans
from mfu_jax.logger.timing.compile_events import CompileEvent
from mfu_jax.util.failsafe import Once

_log = logging.getLogger("mfu_jax")


class LoopThread:
    """Finds out which thread runs the loop, and tells a logger what that thread compiles.

    It is the one that records first: the thread that makes a logger may only start the loop.
    Another one takes over once it has ended, or if Python did not start it: XLA may run each
    callback of a step (``jax.io_callback``) on another thread. In a forked child no thread does.

    Args:
        spans: a compilation inside a pause or a wait is part of that; their timer and log note any
            other.
        phases: the current phase notes it, too.

    Attributes:
        ident: the thread's id; 0 if it is not known.
    """

    def __init__(self, spans: LoopSpans, phases: PhaseBook) -> None:
        self.ident = 0
        self._spans = spans
        self._phases = phases
        self._owner: threading.Thread | None = None
        self._early: list[CompileEvent] = []  # compiled before the thread was known
        self._lock = threading.Lock()
        self._process_id = os.getpid()
        self._is_first = Once()
        _in_this_process.add(self)

    def is_here(self) -> bool:
        """Whether this thread runs the loop, or may begin to."""
        if self.ident == get_ident():
            return True
        if os.getpid() != self._process_id:
            return False
        owner = self._owner
        return owner is None or not owner.is_alive() or isinstance(owner, threading._DummyThread)

    def claim(self) -> bool:
        """Whether this thread runs the loop; if it may begin to, it does from now on."""
        if not self.is_here():  # before the lock, which may be held in a forked child
            return False
        with self._lock:
            if self.ident != get_ident() and self.is_here():
                self._owner, self.ident = threading.current_thread(), get_ident()
                early, self._early = self._early, []
                for event in early:
                    if event.thread_id == self.ident:
                        self._spans.timer.compiling(event)
        return self.ident == get_ident()

    def refuses(self, what: str) -> bool:
        """Whether this thread may not run the loop; the first time, says that of `what`."""
        if self.is_here():
            return False
        owner = self._owner
        if owner is not None and os.getpid() == self._process_id and self._is_first():
            _log.warning(
                "%s of thread %r is not logged: thread %r runs the loop; expected one thread for "
                "each logger\nhint: usually an actor and a learner share a logger, or an "
                "instrumented function is called in jax.debug.callback or io_callback; give each "
                "thread its own MetricLogger, or call it from the loop",
                *(what, threading.current_thread().name, owner.name),
            )
        return True

    def on_compile(self, event: CompileEvent) -> None:
        """Called when JAX has finished a stage of a compilation, on the thread that compiled."""
        if self.ident not in (0, event.thread_id):
            return
        self._spans.log.compiled(event)
        if self._spans.open is None:
            self._phases.compiling()
            if self.ident:
                self._spans.timer.compiling(event)
            else:
                self._early.append(event)


_in_this_process = weakref.WeakSet[LoopThread]()


def _after_fork() -> None:
    """The thread that forked has the same id in the child, where the logger is off."""
    for thread in _in_this_process:
        thread.ident = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
