"""Processes timed steps off the training thread: values, rates, the NaN check, and sinks.

The training thread appends the step to a queue and goes on. Every `write_period_seconds`, one
builder thread takes what has arrived, turns it into records, and passes them to one worker thread
per sink. A killed process therefore loses at most the steps of its last period; if steps are longer
than a period, each is passed on at once.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.delivery.builder_thread import BuilderThread
from mfu_jax.logger.delivery.sink_worker import SinkWorker
from mfu_jax.logger.journal.absent import NoJournal
from mfu_jax.logger.records.non_finite import LossWatch, NonFiniteLossError
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.logger.records.strict_json import encodable, strict
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.run_log.record_builder import RecordBuilder
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.storage.addresses import path_of
from mfu_jax.storage.files import replace_file
from mfu_jax.util.failsafe import Boundary, failsafe

if TYPE_CHECKING:
    from mfu_jax.logger.delivery.backlog import Backlog
    from mfu_jax.logger.hosts.monitor import HostMonitor
    from mfu_jax.logger.journal.writer import Journal
    from mfu_jax.logger.run_log.monitor import Monitor

_log = logging.getLogger("mfu_jax")

# Longest wait for all sinks together: at a flush, and at the end of the run.
DRAIN_SECONDS = 10.0
# Of that, reserved at the end for the backlog, and for summaries and closing.
KEEP_SECONDS = 1.0
CLOSE_SECONDS = 1.0
# The limit for a sink that has hung before, so that no later checkpoint waits for it.
HUNG_DRAIN_SECONDS = 0.5

_NO_JOURNAL = NoJournal()


class RecordPipeline:
    """Builds a record of every step and passes it to all sinks, off the training thread.

    Args:
        builder: makes records and keeps the statistics.
        sinks: where records go; closed with the pipeline.
        config: which losses count as failures, and how many steps may wait.
        on_record: called with every step and its record, on the builder's thread.
        journal: where steps are noted.

    Attributes:
        hosts: compares the processes of the job; None if switched off.
        failure: the first non-finite loss that aborts the run; every step up to it has been
            written, and no later step is.
    """

    def __init__(
        self,
        builder: RecordBuilder,
        sinks: Sequence[Sink],
        config: LoggerConfig,
        on_record: Callable[[TimedStep, StepRecord], object] = lambda step, record: None,
        journal: Journal | NoJournal = _NO_JOURNAL,
    ) -> None:
        self.failure: NonFiniteLossError | None = None
        self._process_id = os.getpid()
        self._boundary = Boundary()
        self._health, self.hosts = _monitors(config, self._boundary)
        self._builder = builder
        self._on_record = on_record
        self._journal = journal
        self._workers = []
        for sink, kept in zip(sinks, _backlogs(sinks, config.start_step), strict=True):
            _warn(sink, kept)
            self._workers.append(
                SinkWorker(sink, backlog=kept, period_seconds=config.write_period_seconds)
            )
        self._losses = LossWatch(
            abort_on_nan=config.abort_on_nan_loss, abort_on_inf=config.abort_on_inf_loss
        )
        self._lost_steps = 0
        self._thread = BuilderThread(
            self._handle, size=config.queue_size, period_seconds=config.write_period_seconds
        )
        self.put: Callable[[TimedStep | Callable[[], object]], None] = self._thread.put
        self.flush_soon: Callable[[], None] = self._thread.flush_soon

    def who_is_silent(self) -> str:
        """For a hang report: which processes are behind; empty if that is not known."""
        return "" if self.hosts is None else self.hosts.who_is_silent()

    @property
    def dropped_by_sink(self) -> dict[str, int]:
        """Records that were not delivered, by sink and reason."""
        lost = {
            "all sinks: steps came too fast": self._thread.dropped,
            "all sinks: no record could be made": self._lost_steps,
        }
        for worker in self._workers:
            for reason, count in worker.losses().items():
                name = f"{worker.name}: {reason}"
                lost[name] = lost.get(name, 0) + count
        return {name: count for name, count in lost.items() if count}

    def call_sinks(self, method: str, *arguments: Any) -> None:
        """Calls a method of every sink, in sequence with the steps; makes its texts encodable."""
        plain = [encodable(a) if isinstance(a, str) else strict(a) for a in arguments]

        def call() -> None:
            for worker in self._workers:
                worker.put([functools.partial(worker.call, method, *plain)])

        self.put(call)

    def flush(self) -> None:
        """Waits until every working sink has all its records on disk.

        In a forked child it does nothing: the child has the files, but none of the threads.
        """
        if os.getpid() == self._process_id:
            self._settle(time.monotonic() + DRAIN_SECONDS)

    def close(
        self,
        last: TimedStep | None,
        spans: Mapping[str, float],
        summarize: Callable[[], Summary],
    ) -> Summary:
        """Writes the last step and the summary, closes the sinks and ends the threads.

        Takes at most `DRAIN_SECONDS`. What a sink could not take by then goes to its backlog.

        Args:
            last: the last step of the run.
            spans: time since then not attributed to any step: name → seconds.
            summarize: called once all steps are in the statistics.
        """
        end = time.monotonic() + DRAIN_SECONDS
        if last is not None:
            self.put(functools.partial(self._handle, [last], is_last=True))
        self.put(functools.partial(self._builder.add_spans, spans))
        try:
            self._settle(end - KEEP_SECONDS - CLOSE_SECONDS, is_last=True)
        except BaseException:  # an impatient user's Ctrl-C
            self._end(min(end, time.monotonic() + KEEP_SECONDS + CLOSE_SECONDS), summarize)
            raise
        return self._end(end, summarize)

    def _end(self, end: float, summarize: Callable[[], Summary]) -> Summary:
        """Ends the threads; what is still unwritten goes to the backlogs."""
        self._thread.close(HUNG_DRAIN_SECONDS)
        for watch in (self.hosts, *self._health):
            if watch is not None:
                with failsafe("host and GPU monitoring may not stop", self._boundary):
                    watch.close()
        for worker in self._workers:  # a failure in one does not affect the others
            with failsafe(f"{worker.name} may have lost its last records", self._boundary):
                _keep_rest(worker, end)
        summary = summarize()
        closed = [worker.finish(summary) for worker in self._workers if not worker.has_hung]
        for event in closed:
            event.wait(max(0.0, end - time.monotonic()))
        return summarize()

    def _settle(self, deadline: float, *, is_last: bool = False) -> None:
        """Waits until everything is built and written; `deadline` is on `time.monotonic`."""
        limit_seconds = deadline - time.monotonic()
        # A stuck builder must not use up all of the sinks' time.
        self._thread.settle(limit_seconds / 2)
        known = {worker for worker in self._workers if worker.has_hung}
        soon = time.monotonic() + HUNG_DRAIN_SECONDS
        requests = {worker: worker.settle(is_last=is_last) for worker in self._workers}
        try:
            for worker, done in requests.items():
                limit = min(deadline, soon) if worker in known else deadline
                done.wait(max(0.0, limit - time.monotonic()))
        finally:  # an impatient user's Ctrl-C
            for worker, done in requests.items():
                worker.has_hung = not done.is_set()
        if late := [w.name for w in self._workers if w.has_hung and w not in known]:
            _log.warning(
                "metrics were not all written within %.0f s: %s; training goes on; usually a disk "
                "or network that hangs",
                limit_seconds,
                ", ".join(late),
            )

    def _handle(self, steps: Sequence[TimedStep], *, is_last: bool = False) -> None:
        """Builds the records of steps and passes them to all sinks."""
        if self.failure is not None:
            return
        for step in steps:
            step.measure()
        self._builder.prepare(steps)
        built = [self._build(step, is_last=is_last) for step in steps]
        self._journal.steps(list(zip(steps, built, strict=True)))
        records = [record for record in built if record is not None]
        for worker in self._workers:
            worker.put(records)

    def _build(self, step: TimedStep, *, is_last: bool) -> StepRecord | None:
        """The record of a step; None if building it failed, or after a loss that aborts."""
        if self.failure is not None:
            return None
        record = None
        with failsafe(f"the metrics of step {step.step} were lost", self._boundary):
            record = self._builder.build(step, is_last=is_last)
            if not self._journal.has_steps:  # starting the watches takes time
                self._journal.steps([(step, record)])
            record = self._watch(step, record)
        if record is None:
            self._lost_steps += 1
            return None
        self.failure = self._losses.check(step.step, record.scalars.get("learning/loss"))
        self._on_record(step, record)
        return record

    def _watch(self, step: TimedStep, record: StepRecord) -> StepRecord:
        """The record with the findings of the watches; unchanged if they fail."""
        with failsafe("slow-step, drift and host findings may be missing", self._boundary):
            for monitor in self._health:
                record = monitor.on_record(step, record)
            if self.hosts is None:
                return record
            return self.hosts.on_record(step, record)
        return record


def _keep_rest(worker: SinkWorker, end: float) -> None:
    """Gives up a hung sink, and moves unwritten records to its backlog."""
    if worker.has_hung:
        worker.abandon()
    worker.keep_rest(max(0.0, min(KEEP_SECONDS, end - CLOSE_SECONDS - time.monotonic())))


def _monitors(
    config: LoggerConfig, boundary: Boundary
) -> tuple[Sequence[Monitor], HostMonitor | None]:
    """Imported here, with the logger's other parts, and only those that are on."""
    from mfu_jax.logger.health.drift import DriftWatch
    from mfu_jax.logger.health.gpus import GpuWatch
    from mfu_jax.logger.health.outliers import LossSpikeWatch, OutlierWatch

    monitors: list[Monitor] = [LossSpikeWatch(), OutlierWatch(), DriftWatch()]
    if config.gpu_period_seconds > 0:
        monitors.append(GpuWatch(config.gpu_period_seconds, boundary))
    if not config.host_log_period:
        return monitors, None
    from mfu_jax.logger.hosts.monitor import HostMonitor

    publish = _hosts_writer(config.hosts_folder)
    return monitors, HostMonitor(config.host_log_period, boundary, publish)


def _hosts_writer(folder: str) -> Callable[[Mapping[str, Any]], None]:
    """Writes the result of the processes' last exchange beside the metrics, if they have a file."""
    if not folder:
        return lambda result: None
    path = Path(f"{Path(path_of(folder)).absolute()}.json")  # the loop may change its folder

    def write(result: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(result, indent=1).encode(), b"\n"])

    return write


def _backlogs(sinks: Sequence[Sink], start_step: int) -> Sequence[Backlog | None]:
    if not any(sink.made_by for sink in sinks):
        return [None] * len(sinks)
    from mfu_jax.logger.delivery.backlog import backlogs_of

    return backlogs_of(sinks, start_step)


def _warn(sink: Sink, backlog: Backlog | None) -> None:
    """Logs what a human should know about how a sink was opened."""
    for warning in sink.warnings:
        _log.warning("%s", warning)
    missing = getattr(sink, "missing", range(0))  # the class may not derive from `Sink`
    if missing and (backlog is None or not backlog.has(missing)):
        _log.warning(
            "%s ends at step %d, but the run resumes at %d: the steps between are missing",
            getattr(sink, "path", type(sink).__name__),
            missing.start - 1,
            missing.stop,
        )
