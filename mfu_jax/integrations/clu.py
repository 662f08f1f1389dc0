"""CLU: a periodic action that reports utilisation through a ``MetricWriter``."""

from __future__ import annotations

import threading
from typing import Any

from clu import metric_writers, periodic_actions

from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.summary import perf_means
from mfu_jax.logger.sinks.base import Sink


class ReportMfu(periodic_actions.PeriodicAction):
    """Writes the means of what the logger measured since its last report.

    Rates and utilisations are the work of these steps / their time, as in a run's summary.
    Of a step that is measured late (the logger is one step behind) the next report tells.
    Steps that compiled or warmed up are left out.

    >>> action = ReportMfu(metric_writers.LoggingWriter(), every_steps=50)  # doctest: +SKIP
    >>> train_step = mfu_jax.instrument(train_step, sinks=[action.sink])    # doctest: +SKIP

    Args:
        writer: where to.
        every_steps: see ``PeriodicAction``.
        every_secs: likewise.
        on_steps: likewise.
    """

    def __init__(self, writer: metric_writers.MetricWriter, **when: Any) -> None:
        super().__init__(**when)
        self.sink = _Collector()
        self._writer = writer

    def _apply(self, step: int, t: float) -> None:
        if means := self.sink.take_means():
            self._writer.write_scalars(step, means)


class _Collector(Sink):
    """Keeps the metrics of ``perf/`` until they are asked for."""

    keeps_every_step = True

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._lock = threading.Lock()

    def write(self, record: StepRecord) -> None:
        if record.kind == "step":
            own = {n: value for n, value in record.scalars.items() if n.startswith("perf/")}
            with self._lock:
                self._steps.append(own)

    def take_means(self) -> dict[str, float]:
        """Means since the last call; see `perf_means`."""
        with self._lock:
            steps, self._steps = self._steps, []
        return perf_means(steps)
