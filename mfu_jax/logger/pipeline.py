"""What happens to a timed step off the training thread: values, rates, sinks, and the NaN check."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.non_finite import LossWatch, NonFiniteLossError
from mfu_jax.logger.records import RecordBuilder
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.logger.summary import Summary
from mfu_jax.logger.timing.timer import TimedStep
from mfu_jax.logger.writer import BackgroundWriter, GuardedSink

_log = logging.getLogger("mfu_jax")

# Longest wait for the sinks when everything must be written: at a flush and at the end.
DRAIN_SECONDS = 30.0
# Shorter after a sink has hung, so that later checkpoints do not wait for it again.
HUNG_DRAIN_SECONDS = 0.5


class RecordPipeline:
    """Builds a record of every step and passes it to all sinks, on one background thread.

    Args:
        builder: makes records and keeps the statistics.
        sinks: where records go; closed with the pipeline.
        config: which losses are failures, and how many steps may wait.
        on_step: called first with every step, on the background thread.

    Attributes:
        failure: the first loss that is not finite; every step up to it has been written, and no
            later step is.
    """

    def __init__(
        self,
        builder: RecordBuilder,
        sinks: Sequence[Sink],
        config: LoggerConfig,
        *,
        on_step: Callable[[TimedStep], None] = lambda step: None,
    ) -> None:
        self.failure: NonFiniteLossError | None = None
        self._builder = builder
        self._patience_seconds = DRAIN_SECONDS
        self._on_step = on_step
        self._sinks = [GuardedSink(sink) for sink in sinks]
        for sink in sinks:
            for warning in sink.warnings:
                _log.warning("%s", warning)
        self._losses = LossWatch(
            abort_on_nan=config.abort_on_nan_loss, abort_on_inf=config.abort_on_inf_loss
        )
        self._writer = BackgroundWriter(self._write, size=config.queue_size)
        self.put: Callable[[TimedStep], None] = self._writer.put
        self.is_idle = self._writer.is_idle

    @property
    def dropped_records(self) -> int:
        """Steps that could not be queued because writing was stuck."""
        return self._writer.dropped

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of every sink, in order with the steps."""
        self._writer.put(functools.partial(self._tell, method, *arguments))

    def flush(self) -> None:
        """Waits until everything handed over is written and on disk."""
        self._writer.put(self._flush)
        self._expect(self._writer.flush(self._patience_seconds))

    def close(
        self,
        last: TimedStep | None,
        spans: Mapping[str, float],
        summarize: Callable[[], Summary],
    ) -> Summary:
        """Writes the last step and the summary, closes the sinks and ends the thread.

        Args:
            last: the last step of the run.
            spans: time since then not attributed to any step, by name.
            summarize: called once all steps are in the statistics.
        """
        if last is not None:
            self._writer.put(functools.partial(self._write, last, is_last=True))
        self._writer.put(functools.partial(self._close, spans, summarize))
        self._expect(self._writer.close(self._patience_seconds))
        return summarize()

    def _expect(self, is_written: bool) -> None:
        if not is_written and self._patience_seconds == DRAIN_SECONDS:
            _log.warning(
                "metrics were not all written within %.0f s; training goes on; usually a disk or "
                "network that hangs",
                DRAIN_SECONDS,
            )
        self._patience_seconds = DRAIN_SECONDS if is_written else HUNG_DRAIN_SECONDS

    def _write(self, step: TimedStep, *, is_last: bool = False) -> None:
        self._on_step(step)
        if self.failure is not None:
            return
        record = self._builder.build(step, is_last=is_last)
        for sink in self._sinks:
            sink.write(record)
        self.failure = self._losses.judge(step.step, record.scalars.get("learning/loss"))

    def _tell(self, method: str, *arguments: Any) -> None:
        for sink in self._sinks:
            sink.call(method, *arguments)

    def _flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def _close(self, spans: Mapping[str, float], summarize: Callable[[], Summary]) -> None:
        self._builder.add_spans(spans)
        summary = summarize()
        for sink in self._sinks:
            if summary.has_steps:
                sink.call("write_summary", summary)
            sink.close()
