"""What happens around each call of a step: find its program, read its metrics, log it.

Everything degrades piece by piece: without a count there is no MFU, without metrics no loss, and
whatever fails, the step runs.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from mfu_jax.errors import UserError
from mfu_jax.hardware.peak import Peak
from mfu_jax.instrumentation.assembly import logger_of
from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.instrumentation.device_trace import StepProfile
from mfu_jax.instrumentation.jitting import programs_of
from mfu_jax.instrumentation.options import StepOptions
from mfu_jax.instrumentation.outputs import (
    Metrics,
    Selection,
    marker_only,
    read_marker,
    select_metrics,
    wait_for,
)
from mfu_jax.instrumentation.packed_documents import PackedBatch
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.instrumentation.programs import BeforeCall, Signature, StepProgram, StepPrograms
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.non_finite import RERAISED, NonFiniteLossError
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.base import format_values
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.settings import parse_steps
from mfu_jax.util.failsafe import Boundary, Once, failsafe, note_handlers

if TYPE_CHECKING:
    from mfu_jax.instrumentation.instrumented_step import WrappedStep

_log = logging.getLogger("mfu_jax")

COUNT_SECONDS = 30.0
"""Longest wait for a count at the end of a run."""

_NO_DOCUMENTS = "the documents of a batch are not known, all its pairs are counted"
_NO_CHANGE = (
    "no argument changed; usually a global setting of JAX, or a context such as a mesh, did"
)
_UNKNOWN = StepCost(model_flops_per_device=None)
_UNSELECTED = StepProgram(None, marker_only())


class PendingCall(NamedTuple):
    """A call in progress.

    Attributes:
        before: what was known about the programs before the call.
        packed: the documents in its batch, if batches are packed.
        mark: its annotation in the device trace, already entered, if it is traced.
    """

    before: BeforeCall
    packed: PackedBatch | None
    mark: Any


class StepObserver:
    """Observes the calls of one instrumented step.

    It holds no strong reference to the instrumented step, so a dropped step is freed at once.

    Args:
        step: the instrumented step, which holds the name and the wrapped function.
        call: the wrapped function, jitted.
        options: what the user chose.
        logger: a logger to share.

    Attributes:
        boundary: where failures are reported.
        current: the last program run.
        shares_logger: the logger is the user's.
    """

    def __init__(
        self,
        step: WrappedStep,
        call: Any,
        options: StepOptions,
        logger: MetricLogger | None,
    ) -> None:
        self.boundary = self._boundary = Boundary()
        self.current: StepProgram | None = None
        self.shares_logger = logger is not None
        self._step, self._name = weakref.ref(step), step.__name__
        self._step_fn = step.__wrapped__
        self._call = call
        self._options = options
        self._logger: MetricLogger | DisabledLogger | None = logger
        self._compile_log = CompileLog(boundary=self._boundary)
        self._programs = StepPrograms(
            self._compile_log, has_earlier_programs=programs_of(call) != 0
        )
        self._profile = None
        if options.settings.profile_steps:
            self._profile = StepProfile(
                options.settings, peak=self._traced_peak, boundary=self._boundary
            )
        self._ledgers: list[tuple[Any, ...]] = []
        self._is_first = Once()
        self._is_lost = False

    @property
    def name(self) -> str:
        """The step's name, which the user may change."""
        step = self._step()
        return self._name if step is None else step.__name__

    @property
    def logger(self) -> MetricLogger | DisabledLogger:
        """The logger, made on first use; a no-op logger if that fails.

        Raises:
            UserError: an output folder cannot be written.
        """
        if self._logger is None:
            with self._programs.lock:
                self._logger = self._logger or self._make_logger()
        return self._logger

    @failsafe(
        "{0.name} is not logged",
        passes=(UserError,),
        instead=DisabledLogger(),
    )
    def _make_logger(self) -> MetricLogger | DisabledLogger:
        return logger_of(
            self._options.settings,
            sinks=self._options.sinks,
            compile_log=self._compile_log,
            boundary=self._boundary,
        )

    @failsafe("a step of {0.name} is not logged", passes=(UserError,))
    def before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall | None:
        """Called just before the step; returns None if the call is not to be logged.

        Raises:
            UserError: an output folder cannot be written.
        """
        logger = self.logger
        if isinstance(logger, DisabledLogger):
            return None
        logger.raise_interrupt()
        options = self._options
        packed, mark = None, None
        if options.documents is not None:
            with failsafe(_NO_DOCUMENTS, self._boundary):
                packed = options.documents.of(args, kwargs)
        if self._profile is not None and self._profile.concerns(number := self._traced_step()):
            with failsafe("there is no device trace", self._boundary):
                entered = self._profile.step(number, logger)
                entered.__enter__()
                mark = entered
        before = self._programs.begin_call()
        logger.begin_call()
        return PendingCall(before, packed, mark)

    @failsafe("a step of {0.name} is not logged", passes=RERAISED)
    def after_call(
        self, pending: PendingCall, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Called after the step has been dispatched.

        Raises:
            NonFiniteLossError: an earlier step's loss is NaN or infinite, with abort enabled.
            UserError: the logger is closed.
            jax.errors.JaxRuntimeError: the device failed in an earlier step.
        """
        if pending.mark is not None:
            pending.mark.__exit__(None, None, None)
        program: StepProgram | None = StepProgram(None, (self.current or _UNSELECTED).selection)
        passes = NonFiniteLossError, jax.errors.JaxRuntimeError
        with failsafe(f"MFU of {self.name} is not known", self._boundary, passes=passes):
            program = self._program_of(pending, args, kwargs, output)
        if program is None:
            return
        metrics = self._read(program.selection, output)
        if any(isinstance(value, jax.core.Tracer) for value in metrics.values()):
            self._say_traced()
            return
        cost = self._cost(program, pending.packed)
        steps = self._options.settings.steps_per_call
        is_step = self.logger.observe_call(self.name, metrics, cost, output, steps)
        if is_step and pending.mark is not None and self._profile is not None:
            with failsafe("the device trace does not end", self._boundary):
                self._profile.after(self.logger.next_step - 1, self.logger)

    @failsafe("the device trace has one step more")
    def call_failed(self, pending: PendingCall | None) -> None:
        """Called instead of `after_call` if the step raised."""
        if pending is not None and pending.mark is not None:
            pending.mark.__exit__(None, None, None)

    def flops(self) -> StepFlops | None:
        """All counts of the last program run; waits for them."""
        return None if (counted := self._counted()) is None else counted.flops

    def close(self) -> None:
        """Ends the trace and the counts; writes nothing more."""
        if self._profile is not None:
            with failsafe("the device trace does not end", self._boundary):
                self._profile.close()
        with failsafe(f"HFU of {self.name} may not be known", self._boundary):
            self._programs.close(COUNT_SECONDS)

    def close_logger(self, kind: object = None, *error: object) -> Summary | None:
        """Closes the logger unless it belongs to the user.

        Args:
            kind: type of the exception that ended the loop, if any, as passed to ``__exit__``.
            *error: the remaining arguments of ``__exit__``.

        Returns:
            The summary; None if nothing was logged.
        """
        logger = self._logger
        if self.shares_logger or not isinstance(logger, MetricLogger):
            return None
        if kind is not None:
            logger.__exit__(kind, *error)
            return None
        summary = logger.close()
        return summary if summary.has_steps else None

    def _traced_step(self) -> int:
        """The next step; of several in a call, the first that is to be traced, if any is."""
        settings, number = self._options.settings, self.logger.next_step
        first = parse_steps(settings.profile_steps)[0]
        return max(number, min(first, number + settings.steps_per_call - 1))

    def _traced_peak(self) -> Peak | None:
        """The peak for the last program run, once its dump is beside the trace."""
        counted = self._counted()
        return None if counted is None or counted.peaks is None else counted.peaks.main

    def _counted(self) -> ProgramAnalysis | None:
        """The analysis of the last program run, once it is counted; None if there is none."""
        analysis = None if self.current is None else self.current.analysis
        if analysis is not None:
            analysis.wait(COUNT_SECONDS)
        return analysis

    def _program_of(
        self, pending: PendingCall, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> StepProgram | None:
        """The program that the call ran; None if JAX is tracing another function."""
        programs = self._programs
        is_new = self.current is None or programs.has_compiled(pending.before)
        if self.current and (self._is_lost or not (is_new or programs.table.is_ambiguous)):
            return self.current
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, output))):
            self._say_traced()
            return None
        found = None if is_new else programs.table.find(args, kwargs)
        if found is None:
            with programs.lock:
                if programs.added != pending.before.added:  # by another thread
                    found = programs.table.get(Signature.of(self._step_fn, args, kwargs))
                found = found or self._new_program(args, kwargs, output)
        self.current = found
        return found

    def _new_program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> StepProgram:
        """Analyses the program just dispatched for the first time."""
        note_handlers()
        boundary, unknown = self._boundary, f"MFU of {self.name} is not known"
        selection = _UNSELECTED.selection
        with failsafe(f"the metrics of {self.name} are not logged", boundary):
            steps = self._options.settings.steps_per_call
            selection = select_metrics(output, self._options.metrics, steps=steps)
        with failsafe("a calibrated peak may be too low", boundary):
            wait_for(selection, output)
        analysis = None
        with failsafe(unknown, boundary):
            analysis = self._analyse(args, kwargs)
        program = StepProgram(analysis, selection)
        self._is_lost = True  # no later call's program can be found, so none has a known cost
        with failsafe(unknown, boundary):
            changes = self._programs.add(Signature.of(self._step_fn, args, kwargs), program)
            self._is_lost = False
        if self._is_lost:
            return StepProgram(None, selection)
        with failsafe(unknown, boundary):
            self._announce(program, changes)
        return program

    def _analyse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramAnalysis:
        logger, options = self.logger, self._options
        first, steps_per_call = logger.next_step, options.settings.steps_per_call
        return ProgramAnalysis(
            self._call,
            args,
            kwargs,
            options=options,
            name=self.name,
            boundary=self._boundary,
            backlog=lambda: (logger.next_step - first) // steps_per_call,
            number=self._programs.added + 1,
            calls_per_step=logger.calls_per_step,
            pause=logger.own_pause,
        )

    def _announce(self, program: StepProgram, changes: Sequence[str] | None) -> None:
        """Announces a new program to the user and the counting thread."""
        name, logger = self.name, self.logger
        logger.suppress_recompile_notes(self._programs.functions)
        if changes is None:
            self._write_setup(program)
        else:
            what = "; ".join(changes) or _NO_CHANGE
            text = f"{name} was recompiled at step {logger.next_step}: {what}"
            logger.write_text(f"recompiled/{name}", text)
        if program.analysis is not None:
            program.analysis.count_aside(self._write_ledger)

    def _write_setup(self, program: StepProgram) -> None:
        analysis, selection = program
        table = {"metrics": selection.text}
        if analysis is not None:
            table = analysis.setup(selection.text, selection.left_out)
        values = {"step function": self.name, **table}
        setup = self.logger.setup if self.shares_logger else {}
        if known := setup.get("values"):
            new = {name: value for name, value in values.items() if known.get(name) != value}
            self.logger.write_text(f"setup/{self.name}", format_values(new))
        else:
            self.logger.write_setup(values, setup.get("texts"))  # a config of the loop's stays

    def _write_ledger(self, flops: StepFlops) -> None:
        """Writes the ledger, unless its FLOPs equal those of an earlier one."""
        ledger = flops.ledger
        counts = (ledger.model, ledger.executed, ledger.lines, ledger.notes)
        if counts not in self._ledgers:
            self._ledgers.append(counts)
            name = self.name
            self.logger.write_text(f"ledger/{name}", f"{name}:\n{flops.ledger.render()}")

    def _read(self, selection: Selection, output: Any) -> Metrics:
        """The metrics of one call; if they cannot be read, only its end marker."""
        with failsafe(f"the metrics of {self.name} are not logged", self._boundary):
            return selection.read(output)
        with failsafe(f"the times of {self.name} are not known", self._boundary):
            return read_marker(output)
        return {}

    def _cost(self, program: StepProgram, packed: PackedBatch | None) -> Any:
        """The cost of one call, as `MetricLogger.record` accepts it."""
        analysis = program.analysis
        if analysis is None:
            return _UNKNOWN
        if packed is None or analysis.model is None:
            return analysis.cost
        cost = failsafe(_NO_DOCUMENTS, self._boundary, instead=analysis.known_cost)(packed.cost)
        return functools.partial(cost, analysis.model.packed, analysis.cost)

    def _say_traced(self) -> None:
        if self._is_first():
            _log.warning(
                "%s was called while JAX traces another function, which is not logged; expected "
                "calls from a Python loop\nhint: usually it is called inside jit, scan, grad or "
                "eval_shape; instrument the outermost function that the loop calls",
                self.name,
            )
