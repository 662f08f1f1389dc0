"""`MetricLogger`: times the steps of a training loop and reports how well they used the hardware.

::

    with MetricLogger(model_flops_per_device=…, peak_flops_per_sec=…, …) as logger:
        for step in range(steps):
            with logger.waiting("data"):
                batch = next(batches)
            state, metrics = train_step(state, batch)
            logger.record(step, metrics)
            if step % 100 == 99:
                with logger.pause("eval"):
                    logger.record_eval(step, evaluate(state))
    print(logger.summary().render())
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import RLock, get_ident
from typing import Any, Self

from mfu_jax.logger import assembly
from mfu_jax.logger.config import LoggerConfig
from mfu_jax.logger.disabled import DISABLED_SCOPE, DisabledLogger, DisabledScope
from mfu_jax.logger.loop.phases import LateCost, Phase, PhaseBook, StepCalls, StepScope
from mfu_jax.logger.loop.spans import LoopSpans, Pause, Wait
from mfu_jax.logger.loop.step_numbers import (
    StepNumbers,
    after_close,
    number_of_steps,
    whole_number,
)
from mfu_jax.logger.loop.thread import LoopThread
from mfu_jax.logger.records.non_finite import RERAISED, NonFiniteLossError
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.records.values import MetricFilter
from mfu_jax.logger.run_log.events import BACK, FAILURE, SETUP, TEXT
from mfu_jax.logger.run_log.record_builder import RecordBuilder
from mfu_jax.logger.run_log.recorder import Recorder
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.logger.timing.readiness import Watcher
from mfu_jax.logger.timing.timed_step import TimedStep
from mfu_jax.logger.timing.timer import StepTimer
from mfu_jax.storage.locks import FileLock
from mfu_jax.util.failsafe import Boundary, failsafe
from mfu_jax.verdict import Verdict

_log = logging.getLogger("mfu_jax")

Judge = Callable[[Summary, Mapping[str, Any], Mapping[str, float]], Verdict]
_NO_SUMMARY = Summary(steps=0)


class MetricLogger:
    """Times each step one step behind, derives TFLOP/s, MFU and HFU, and passes them to sinks.

    The training thread only reads the clocks. Copies to the host, arithmetic, formatting and
    writing happen on background threads, one for each sink.

    One thread uses a logger: the one that records first, until it ends. Steps, phases, pauses and
    waits of another one are not logged, which is said once: give it a logger of its own. Only
    `record_eval`, the writing of texts, `flush`, `summary` and `close` may be called on any thread,
    and instrumented functions inside a pause, phase or `step` of the loop's thread, whose part they
    are. In a forked child the logger does nothing.

    Args:
        cost: cost of a step on one device; by default of unknown FLOPs, for loops that pass a cost
            with each step, as instrumented functions do.
        config: step numbers, warm-up, log period, and when to abort.
        sinks: where records go; the console by default. Closing the logger closes them.
        run_dir: folder of the run, with the metrics file and TensorBoard's folder, as
            `mfu_jax.instrument` takes it; unless `sinks` are given, they are written.
        compile_log: a log opened before the step was compiled; loggers may share one.
        clock: wall clock in seconds, used to measure step time.
        monotonic: monotonic clock in seconds, trusted when the two disagree.
        watcher: replaces the thread that detects a step's end while the loop waits for data.
        boundary: where failures are reported; by default that of `compile_log`.
        run_log: of this process; by default one beside the metrics file, if there is one.
        **fields: fields of `StepCost` (``peak_flops_per_sec=…``) or `LoggerConfig`
            (``warmup_steps=…``) that replace those of `cost` and `config`.

    Attributes:
        config: the one given, with `fields`.
        cost: cost of a step, unless `record` is given another.
        judge: makes the summary's verdict, of the summary without it, the set-up (``values`` and
            ``texts``) and the ``profile/…`` numbers; None: it has none.

    Raises:
        UserError: an unknown field, an impossible number, or a folder that cannot be written.

    >>> logger = MetricLogger(peak_flops_per_sec=1e12, warmup_steps=0, sinks=[])
    >>> logger.close().steps
    0
    """

    def __init__(
        self,
        *,
        cost: StepCost | None = None,
        config: LoggerConfig | None = None,
        sinks: Sequence[Sink] | None = None,
        run_dir: str | os.PathLike[str] = "",
        compile_log: CompileLog | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        watcher: Watcher | None = None,
        boundary: Boundary | None = None,
        run_log: RunLog | None = None,
        **fields: Any,
    ) -> None:
        places = assembly.run_places(run_dir)
        self.cost, config = assembly.with_fields(cost, config, fields)
        self.config = config
        self.judge: Judge | None = None
        self._setup: Mapping[str, Mapping[str, Any]] = {}
        self._profile: dict[str, float] = {}
        self._monotonic = monotonic
        log = self._compile_log = compile_log or CompileLog(boundary=boundary)
        self._boundary = boundary = boundary or log.boundary
        self._compiled_before_seconds = log.seconds
        self._builder = RecordBuilder(self.cost, config)
        if self._compiled_before_seconds:
            self._builder.add_spans({"compile": self._compiled_before_seconds})
        self._numbers = StepNumbers(config.start_step)
        self._summary: Summary | None = None
        self._failure_was_raised = self._is_at_exit = False
        self._process_id, self._closing = os.getpid(), RLock()
        used = assembly.sinks_of_process(sinks, config, places)
        file = places.get("metrics_file") or assembly.metrics_file_of(used)
        self._log = run_log or assembly.open_run_log(file, clock=clock, monotonic=monotonic)
        monitors, watchdog = assembly.monitors_of(config, boundary, monotonic, self._log)
        self._watchdog = watchdog
        self._pipeline = Recorder(self._builder, self._log, used, config, monitors)
        self._filter = MetricFilter(self._pipeline.flush_soon)
        watchdog.flush = self._pipeline.flush
        self._timer = StepTimer(clock=clock, monotonic=monotonic, watcher=watcher)
        self._interrupt = self._timer.interrupt
        self._spans = LoopSpans(self._timer, self._pipeline, watchdog, boundary, self._log)
        self._phases = PhaseBook(
            monotonic, self._timer.watcher, warmup_steps=config.warmup_steps, boundary=boundary
        )
        self._calls = StepCalls(config.calls_per_step)
        self._thread = LoopThread(self._spans, self._phases)
        self._compile_log.subscribe(self._thread.on_compile)
        atexit.register(self._close_quietly)
        for sink in used:  # a later logger of this process may take the file over
            if isinstance(lock := getattr(sink, "lock", None), FileLock):
                lock.settle = self.flush

    @staticmethod
    def from_flags(
        step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> MetricLogger | DisabledLogger:
        """A logger set up by the command line's flags; see `mfu_jax.flags.make_logger`."""
        from mfu_jax.flags import logger_from_flags

        return logger_from_flags(step, *args, **kwargs)

    @property
    def next_step(self) -> int:
        """The last recorded step's number plus one."""
        return self._numbers.last + 1

    @property
    def calls_per_step(self) -> int:
        """How many calls of instrumented functions make a step."""
        return self._calls.count

    def record(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        step_time_seconds: float | None = None,
        cost: LateCost | None = None,
        steps: int = 1,
    ) -> None:
        """Records the step just dispatched; waits for the previous one.

        Args:
            step: its number; a warning if it is not the next: the loop went back or left some out.
            metrics: name -> scalar: a JAX array, a number, or a function that returns one or
                None, called later on a background thread. ``loss`` is shown as ``learning/loss``,
                ``_loss`` only waited for. At most 16 numbers per metric; NumPy arrays are copied.
            step_time_seconds: the step's time, if the caller measured it: the logger doesn't wait.
            cost: this step's cost, if it differs; or a function that returns it, called later on
                a background thread.
            steps: how many steps the call ran, `step` being the last; each gets a record with its
                share of the time and of `cost`, and its entry of metrics that have one for each;
                of more than 16, the mean of their losses.

        Raises:
            NonFiniteLossError: an earlier step's loss is NaN or infinite.
            UserError: the logger is closed; `step` or `steps` is not a whole number; `step` is
                before `start_step`, or `steps` below 1.
        """
        try:
            begin = self._monotonic()
            thread = get_ident()
            if thread != self._thread.ident and not self._thread.claim():
                self._thread.refuses(f"step {step}")
                return
            if type(step) is not int:
                step = whole_number(step)
            first = step
            if steps != 1:
                steps = number_of_steps(steps)
                first = step - steps + 1
            if self._pipeline.failure or self._summary or first != self._numbers.last + 1:
                if self._is_at_exit:  # called from a daemon thread
                    return
                self._refuse(first, steps, is_timed=step_time_seconds is None)
            if type(metrics) is not dict and not isinstance(metrics, Mapping):
                raise assembly.refused_metrics(metrics)
            self._numbers.last = step
            metrics = self._filter.of(metrics, steps)
            if self._phases.has_phases:
                of_phases, cost_of_phases = self._phases.take()
                metrics, cost = {**metrics, **of_phases}, cost or cost_of_phases
            taken = TimedStep()
            taken.step, taken.metrics, taken.cost = step, metrics, cost
            if steps != 1:
                taken.steps = steps
            if self._spans.late:
                taken.extra = self._spans.take_late()
            if (given := step_time_seconds) is not None:
                given = self._filter.seconds(given)
            if given is None:
                finished = self._timer.dispatched(taken)
            else:
                finished = self._timer.timed_elsewhere(taken, given)
            if self._spans.held is not None:
                self._spans.release()
            if finished is not None:
                self._pipeline.put(finished)
            if self._numbers.has_gone_back:
                self._numbers.has_gone_back = False
                self._pipeline.tell(BACK, step=first)
            if given is not None:
                self._spans.hold(taken)  # a later eval may still add to it
            self._watchdog.on_step((step, now := self._monotonic(), thread))
            taken.overhead_seconds = now - begin - self._timer.waited_seconds
            if self._interrupt.pending is not None:
                self._interrupt.raise_pending()
        except RERAISED:
            raise
        except Exception as error:  # `failsafe` would be one more call
            self._boundary.caught(error, "a step is not logged")

    @failsafe("an eval is not logged", passes=RERAISED)
    def record_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the results of an eval after `step`, shown under ``eval/``.

        Inside ``pause("eval")``, they join the step's own record, unless a checkpoint's pause
        has just written it. Then, and after the pause, they join the next record, and
        ``eval/step`` says which step they belong to.
        """
        self._spans.add(self._filter.of(metrics), step)

    @failsafe("a pause is not timed", passes=RERAISED, instead=DISABLED_SCOPE)
    def pause(
        self, name: str, *, flush: bool | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context manager for work outside training steps: ``with logger.pause("eval"): …``.

        First waits for the step in flight. The time inside is ``goodput/<name>_seconds``, and the
        next step starts when the pause ends. A nested pause or wait is part of the outer one.

        Args:
            name: ``eval``, ``checkpoint``, ``restore``, or any other.
            flush: write all records to disk first; by default only for ``checkpoint``, so that a
                checkpoint is never ahead of the metrics.

        Raises:
            NonFiniteLossError: on entry, so that a broken state is never checkpointed.
        """
        self._interrupt.raise_pending()
        if self._thread.refuses(f"the pause {name}"):
            return DISABLED_SCOPE
        flush = name == "checkpoint" if flush is None else flush
        return Pause(self._spans, name, functools.partial(self._check_pause, flush))

    @failsafe("a wait is not timed", passes=RERAISED, instead=DISABLED_SCOPE)
    def waiting(self, name: str = "data") -> contextlib.AbstractContextManager[Any]:
        """Context manager for waits during which the device may be busy: ``next(batches)``.

        Time with the device idle is ``goodput/<name>_wait_seconds``, excluded from step times.
        """
        if self._interrupt.pending is not None:
            self._interrupt.raise_pending()
        if get_ident() != self._thread.ident and self._thread.refuses(f"the wait for {name}"):
            return DISABLED_SCOPE
        return Wait(self._spans, name)

    @failsafe("a step is not logged", passes=RERAISED, instead=DISABLED_SCOPE)
    def step(self, number: int | None = None) -> StepScope | DisabledScope:
        """Context manager for one step, recorded when it ends: ``with logger.step() as step: …``.

        Functions instrumented with this logger add their cost and metrics; `step.log` adds more.
        """
        number = self.next_step if number is None else number
        if self._thread.refuses(f"step {number}"):
            return DISABLED_SCOPE
        return StepScope(self._phases, self.record, number)

    @failsafe("a phase is not logged", passes=RERAISED, instead=DISABLED_SCOPE)
    def phase(self, name: str, *, cost: StepCost | None = None) -> Phase | DisabledScope:
        """Context manager for part of a step: ``with logger.phase("rollout"): …``.

        Its time, FLOPs, MFU and HFU are shown as ``phase/<name>/…`` with the next recorded step. It
        ends when outputs of its instrumented functions, or those given to `wait_for`, are ready.

        Args:
            name: a word.
            cost: its cost on one device, if no instrumented function runs in it.
        """
        if self._thread.refuses(f"phase {name}"):
            return DISABLED_SCOPE
        return self._phases.phase(name, cost)

    @failsafe("the time of a step is not exact")
    def begin_call(self) -> None:
        """Call this just before a step that may compile, as instrumented steps do. Never waits."""
        if self._thread.claim():
            self._timer.begin_call()

    def observe_call(
        self, name: str, metrics: dict[str, Any], cost: LateCost, output: Any, steps: int = 1
    ) -> bool:
        """Logs a call of an instrumented function as part of the open phase, `step` or pause.

        Args:
            steps: how many the call ran.

        Returns:
            Whether it completed a step, because none of these is open.
        """
        if self._phases.add_call(name, cost, metrics, output):
            self._timer.part = metrics
            return False
        if self._spans.add_call(self._numbers.last, metrics):
            return False
        number = self.next_step + steps - 1
        if get_ident() != self._thread.ident and self._thread.refuses(f"step {number}"):
            return False
        whole = self._calls.add(metrics, cost)
        if whole is None:
            self._timer.part = metrics
            return False
        self.record(number, whole[0], cost=whole[1], steps=steps)
        return True

    def own_pause(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A pause for work of this package; not timed on another thread than the loop's."""
        return Pause(self._spans, name) if self._thread.is_here() else DISABLED_SCOPE

    def add_numbers(self, numbers: Mapping[str, float]) -> None:
        """Adds numbers that belong to no particular step to the next record."""
        self._profile |= {name: n for name, n in numbers.items() if name.startswith("profile/")}
        self._spans.add(numbers)

    def raise_interrupt(self) -> None:
        """Raises what was kept for this thread, if anything was; see `defer_interrupt`."""
        self._interrupt.raise_pending()

    def defer_interrupt(self, error: BaseException) -> bool:
        """Keeps an interrupt for the loop's next call of the logger; False if it is none."""
        return self._interrupt.defer(error)

    @property
    def setup(self) -> Mapping[str, Mapping[str, Any]]:
        """The ``values`` and ``texts`` that `write_setup` wrote last; empty before."""
        return self._setup

    @failsafe("the set-up is not written")
    def write_setup(
        self, values: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None
    ) -> None:
        """Writes the set-up, known before the first step, to every sink: values, longer texts."""
        self._setup = {"values": dict(values or {}), "texts": dict(texts or {})}
        self._pipeline.tell(SETUP, **self._setup)

    @failsafe("a text is not written")
    def write_text(self, tag: str, text: str) -> None:
        """Writes a text to every sink that accepts texts, in order with the steps."""
        self._pipeline.tell(TEXT, step=self._numbers.last, tag=tag, text=text)

    @failsafe("a compilation may be reported twice")
    def suppress_recompile_notes(self, functions: Iterable[str]) -> None:
        """The caller reports compilations of these itself: JAX's names, as ``jit(train_step)``."""
        self._builder.without_recompile_notes.update(functions)

    @failsafe("metrics may not be written yet")
    def flush(self) -> None:
        """Waits until every completed step is written and on disk."""
        if os.getpid() != self._process_id:
            return  # a forked child has none of the threads
        self._spans.release()
        self._pipeline.flush()

    @failsafe("there is no summary", instead=_NO_SUMMARY)
    def summary(self) -> Summary:
        """Totals of the run so far; after `close`, of the whole run."""
        self._interrupt.raise_pending()
        if self._summary is None:
            self.flush()
        return self._summary or self._summarize()

    @failsafe("there is no summary", passes=RERAISED, instead=_NO_SUMMARY)
    def close(self) -> Summary:
        """Waits for the step in flight, writes everything, closes the sinks.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite, and `record` has not raised for it yet.
        """
        summary = self._close()
        self._interrupt.raise_pending()
        if self._pipeline.failure is not None and not self._failure_was_raised:
            self._raise_failure()
        return summary

    def __enter__(self) -> Self:
        return self

    @failsafe("metrics may not all be written", passes=RERAISED)
    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None and self._summary is None:
            self._log.stop(f"exception: {getattr(kind, '__name__', kind)}")
            reason = repr(error[0])[:300]
            self._pipeline.tell(FAILURE, step=self._numbers.last, reason=reason)
        self.close() if kind is None else self._close()

    def _close(self) -> Summary:
        if os.getpid() != self._process_id:
            return _NO_SUMMARY  # in a forked child, which has none of the threads
        with self._closing:  # a second caller waits for the summary
            if self._summary is None:
                self._close_all()
            return self._summary or _NO_SUMMARY

    def _close_all(self) -> None:
        self._summary = _NO_SUMMARY  # counts as closed, whatever fails below
        self._calls.end()
        with contextlib.ExitStack() as rest:  # runs even after Ctrl-C
            rest.callback(self._close_parts)
            rest.callback(self._close_pipeline)
            if self._pipeline.failure is None:
                with failsafe("the last step is not logged", self._boundary):
                    self._spans.hold_last()

    def _close_parts(self) -> None:
        atexit.unregister(self._close_quietly)
        for part in (self._timer, self._log):
            with failsafe("the logger is not closed", self._boundary):
                part.close()
        with failsafe("the logger is not closed", self._boundary):
            self._compile_log.unsubscribe(self._thread.on_compile)

    @failsafe("metrics may not all be written")
    def _close_pipeline(self) -> None:
        last, spans = self._spans.take_last(), self._timer.take_spans()
        try:
            self._pipeline.close(last, spans, self._summarize)
        finally:  # even after Ctrl-C
            self._summary = self._summarize()

    @failsafe("metrics may not all be written")
    def _close_quietly(self) -> None:
        self._is_at_exit = True
        if os.getpid() == self._process_id:  # a fork has the files, but none of the threads
            self._close()
            if self._pipeline.failure is not None and not self._failure_was_raised:
                _log.warning("%s", self._pipeline.failure)

    def _summarize(self) -> Summary:
        dropped = self._pipeline.dropped_by_sink
        summary = self._builder.summary(
            self._timer.elapsed_seconds() + self._compiled_before_seconds,
            compile_seconds=self._compile_log.seconds,
            compile_count=self._compile_log.compile_count,
            dropped_records=sum(dropped.values()),
            dropped_by_sink=dropped,
            phases=self._phases.totals.values(),
        )
        if self.judge is not None and summary.steps:
            with failsafe("the summary has no verdict", self._boundary):
                verdict = self.judge(summary, self._setup, self._profile)
                verdict.to_json()  # one that cannot be printed would cost the summary
                return dataclasses.replace(summary, verdict=verdict)
        return summary

    def _refuse(self, first: int, steps: int, *, is_timed: bool) -> None:
        self._raise_failure()
        if self._summary is not None:
            raise after_close(first + steps - 1)
        if first <= self._numbers.last:
            self._numbers.go_back(first, steps=steps)
        elif is_timed:
            self._numbers.leave_out(first, steps=steps)

    def _check_pause(self, flush: bool) -> None:
        if flush:
            if self._spans.held is not None:  # once written, it cannot be shown as the last one
                self._spans.held.is_last = True
            self.flush()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if (failure := self._pipeline.failure) is not None:
            if self._summary is None:
                self.flush()
            self._failure_was_raised = True
            # A new error: the traceback of a stored one would keep the loop's arrays alive.
            raise NonFiniteLossError(failure.step, failure.value)
