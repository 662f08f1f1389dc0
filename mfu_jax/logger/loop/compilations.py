"""Tracks the compilations that steps wait for: those on the threads that run the steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mfu_jax.logger.loop.phases import PhaseBook
from mfu_jax.logger.loop.spans import LoopSpans
from mfu_jax.logger.timing.compile_events import CompileEvent
from mfu_jax.logger.timing.timer import StepTimer

if TYPE_CHECKING:
    from mfu_jax.logger.run_log.run_log import RunLog
    from mfu_jax.logger.watchdog import Watchdog


class LoopCompilations:
    """Informs the parts of a logger of compilations made for its steps.

    Until the first step it is unknown which thread will run the steps: the thread that creates the
    logger may only start it. Until then, what other threads compile is kept for the one that will.

    Args:
        journal: notes each compilation.
        spans: a compilation inside a pause or a wait is part of that.
        phases: the current phase notes it, too.
        timer: a step for which something was compiled is not measured.
        watchdog: a compilation may take any length of time.

    Attributes:
        known: ids of threads that have run a step.
    """

    def __init__(
        self,
        journal: RunLog,
        spans: LoopSpans,
        phases: PhaseBook,
        timer: StepTimer,
        watchdog: Watchdog,
    ) -> None:
        self._journal = journal
        self._spans = spans
        self._phases = phases
        self._timer = timer
        self._watchdog = watchdog
        self.known: set[int] = set()
        self._threads = {threading.get_ident()}
        self._early: list[CompileEvent] | None = []

    def run_here(self) -> None:
        """Notes that this thread runs a step; not needed if it is in `known`."""
        thread = threading.get_ident()
        if self._early is not None:
            self._first_step(thread)
        self._threads.add(thread)
        self.known.add(thread)

    def on_compile(self, event: CompileEvent) -> None:
        """Called when JAX has finished a stage of a compilation, on the thread that compiled."""
        if event.thread_id in self._threads:
            self._journal.compiled(event)
            if not self._spans.active:
                self._phases.compiling()
                self._timer.compiling(event)
                self._watchdog.compiling(event.stage)
        elif self._early is not None and not self._spans.active:
            self._early.append(event)

    def _first_step(self, thread: int) -> None:
        early, self._early = self._early or [], None
        self._threads = {thread}
        for event in early:
            if event.thread_id == thread:
                self._timer.compiling(event)
