"""`instrument`: a training step that counts, times and logs itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax

from mfu_jax.errors import UserError
from mfu_jax.flops.ledger import Ledger
from mfu_jax.instrumentation.assembly import logger_of
from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.instrumentation.device_trace import StepProfile
from mfu_jax.instrumentation.jitting import first_call, jitted, name_of, programs_of
from mfu_jax.instrumentation.options import refuse_logger_settings, resolve
from mfu_jax.instrumentation.outputs import select_metrics
from mfu_jax.instrumentation.packed_documents import PackedDocuments
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.instrumentation.programs import StepProgram, StepPrograms
from mfu_jax.instrumentation.signatures import Signature
from mfu_jax.instrumentation.wrapped_step import DisabledStep, WrappedStep
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.sinks import Sink
from mfu_jax.logger.sinks.base import format_values
from mfu_jax.logger.summary import Summary
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.settings import Settings

_log = logging.getLogger("mfu_jax")

_COUNT_SECONDS = 30.0  # longest wait for a count at the end of a run


@overload
def instrument(step_fn: Callable[..., Any], **options: Any) -> InstrumentedStep | DisabledStep: ...
@overload
def instrument(
    step_fn: None = None, **options: Any
) -> Callable[[Callable[..., Any]], InstrumentedStep | DisabledStep]: ...
def instrument(
    step_fn: Callable[..., Any] | None = None,
    *,
    metrics: Callable[[Any], Any] | None = None,
    segment_ids: Callable[..., Any] | None = None,
    flops_source: Any = None,
    logger: MetricLogger | None = None,
    sinks: Sequence[Sink] | None = None,
    settings: Settings | None = None,
    jit: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Wraps a training step so that every call of it is counted, timed and logged.

    The step runs as before, with its donation, shardings, static arguments and outputs: JAX
    compiles it at its first call, and that executable is counted in the background.

    Args:
        step_fn: what `jax.jit`, `jax.pmap`, ``nnx.jit`` or ``eqx.filter_jit`` returned. A plain
            function is jitted here. Without it, `instrument` is a decorator with options.
        metrics: a function from the step's output to a mapping of scalars, or to the loss; by
            default they are found (see `mfu_jax.instrumentation.outputs.select_metrics`).
        segment_ids: for batches of packed documents, a function from the step's arguments to their
            segment ids; each step then has the FLOPs of its own documents where the model's
            attention is inside ``attention_mask("documents")`` or ``"causal_documents"``.
        flops_source: ``"traced"``; or a number: model FLOPs of one device; or a config, as
            `mfu_jax.calculate_tflops_per_device` takes it.
        logger: a `MetricLogger` to share. Inside its ``step()`` or ``phase()`` a call is a part
            of that step; outside it is a step of its own.
        sinks: where records go, instead of the console and what the settings name.
        settings: a `Settings`, such as `mfu_jax.flags.settings` makes from the flags.
        jit: keyword arguments of `jax.jit`, for a plain function.
        **options: any key of `mfu_jax.settings.Settings`, such as ``tokens_per_step=…``,
            ``metrics_file=…``, ``peak_tflops_per_device=…``, ``enable_mfu=…``.

    Returns:
        An `InstrumentedStep`, called like `step_fn`; with ``enable_mfu=False`` a `DisabledStep`,
        which only calls it.

    Raises:
        UserError: `step_fn` is not a function, or an option is unknown or wrong.

    >>> import jax, jax.numpy as jnp
    >>> @instrument(peak_tflops_per_device=1.0, sinks=[])
    ... @jax.jit
    ... def train_step(w, x):
    ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * gradient, loss
    >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    >>> for _ in range(3):
    ...     w, loss = train_step(w, x)
    >>> train_step.close().compile_steps
    1
    >>> train_step.flops.model.per_device == train_step.flops.executed.total == 2 * (2 * 2 * 8 * 4)
    True
    """

    def wrap(step_fn: Callable[..., Any]) -> InstrumentedStep | DisabledStep:
        resolved, config = resolve(settings, options, flops_source)
        call = jitted(step_fn, name_of(step_fn), jit)
        if logger is not None:
            refuse_logger_settings(resolved, sinks)
        profile = StepProfile.of(resolved)
        if not resolved.enable_mfu:
            return DisabledStep(step_fn, resolved)
        return InstrumentedStep(
            step_fn,
            call,
            resolved,
            config=config,
            metrics=metrics,
            documents=PackedDocuments(segment_ids) if segment_ids else None,
            logger=logger,
            sinks=sinks,
            profile=profile,
        )

    return wrap if step_fn is None else wrap(step_fn)


class InstrumentedStep(WrappedStep):
    """A step that logs itself; made by `instrument`.

    Attributes that it lacks (``lower``, ``trace``, …) are those of the wrapped step.

    Args:
        step_fn: the wrapped step.
        call: the same, jitted.
        settings: see `instrument`, like the arguments below.
        config: where the model FLOPs come from, if from a config.
        metrics: the user's choice of metrics.
        documents: the documents of each batch, if batches are packed.
        logger: a logger to share.
        sinks: where records go, instead of where the settings say.
        profile: the steps to trace.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        call: Any,
        settings: Settings,
        *,
        config: Any,
        metrics: Callable[[Any], Any] | None,
        documents: PackedDocuments | None,
        logger: MetricLogger | None,
        sinks: Sequence[Sink] | None,
        profile: StepProfile | None,
    ) -> None:
        super().__init__(step_fn, settings)
        self._call = call
        self._run = first_call(step_fn, call, self.__name__)
        self._config = config
        self._select = metrics
        self._documents = documents
        self._logger = logger
        self._shares_logger = logger is not None
        self._sinks = sinks
        self._profile = profile
        self._closed = False
        self._compile_log = CompileLog()
        self._programs = StepPrograms(
            self._compile_log, has_earlier_programs=programs_of(call) != 0
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step and logs it.

        Raises:
            UserError: after `close`, inside another function's trace, or if a new program cannot be
                analysed.
            NonFiniteLossError: an earlier step's loss is NaN or infinite.
        """
        if self._closed:
            raise UserError(
                f"{self.__name__} was called after close(); expected all calls before; usually "
                f"close() is inside the loop, or `with` ends early; close it after the loop, or "
                f"call {self.__name__}.__wrapped__ to go on without logging"
            )
        logger = self._logger or self.logger
        packed = self._documents.of(args, kwargs) if self._documents else None
        programs = self._programs
        compile_count = programs.begin_call()
        if self._profile is None:
            output = self._run(*args, **kwargs)
        else:
            with self._profile.step(logger.next_step, logger):
                output = self._run(*args, **kwargs)
        if programs.compile_count != compile_count or programs.is_ambiguous:
            self._find_program(args, kwargs, output, is_new=programs.compile_count != compile_count)
        program, selection = programs.current  # type: ignore[misc]  # it is not ambiguous now
        metrics = selection.read(output)
        cost = program.cost if packed is None else packed.cost(program.model.packed, program.cost)
        if logger.phases.takes_calls:
            logger.phases.add_call(self.__name__, cost, metrics, output)
        else:
            logger.record(logger.next_step, metrics, cost=cost)
            if self._profile is not None:
                self._profile.after(logger.next_step - 1, logger)
        return output

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None or self._shares_logger:
            self.close()
        elif not self._closed:
            self._finish()
            if self._logger is not None:
                self._logger.__exit__(kind, *error)

    @property
    def logger(self) -> MetricLogger:
        """The `MetricLogger`, for ``pause("eval")``, ``waiting("data")``, ``record_eval`` …."""
        if self._logger is None:
            self._logger = logger_of(
                self.settings, sinks=self._sinks, compile_log=self._compile_log
            )
        return self._logger

    @property
    def flops(self) -> StepFlops:
        """All counts of the program that ran last; waits for them.

        Raises:
            UserError: the step has not been called, or its program could not be counted.
        """
        program = self._known_program("flops")
        program.wait(_COUNT_SECONDS)
        if program.flops is None:
            raise UserError(
                f"the program of {self.__name__} has no count; expected one within "
                f"{_COUNT_SECONDS:.0f} s of its compilation; usually its HLO could not be read, as "
                f"the log says; ask again later, or report it"
            )
        return program.flops

    @property
    def ledger(self) -> Ledger:
        """From model FLOPs to executed FLOPs, line by line, of the program that ran last."""
        return self.flops.ledger

    def summary(self) -> Summary:
        """The run so far.

        Raises:
            UserError: the step has not been called.
        """
        self._known_program("summary()")
        return self.logger.summary()

    def close(self) -> Summary | None:
        """Stops logging: writes pending records and the summary. A shared logger stays open.

        Returns:
            The summary; None if nothing was logged.
        """
        if self._closed:
            return None
        if self._programs.current is None and not self._shares_logger:
            _log.warning("%s", self._not_called("close()"))
        self._finish()
        if self._shares_logger or self._logger is None:
            return None
        return self._logger.close()

    def _find_program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, is_new: bool
    ) -> None:
        """Makes the program that has just been dispatched the current one; analyses a new one."""
        if not is_new and self._programs.look_up(args, kwargs):
            return
        selection = select_metrics(output, self._select)
        signature = Signature.of(self.__wrapped__, args, kwargs)
        jax.block_until_ready(selection.read(output))  # a busy CPU cannot be calibrated
        logger = self.logger
        first = logger.next_step
        with logger.pause("count", flush=False):
            program = ProgramAnalysis(
                self._call,
                args,
                kwargs,
                settings=self.settings,
                config=self._config,
                backlog=lambda: logger.next_step - first,
            )
        self._run = self._call
        changes = self._programs.add(signature, StepProgram(program, selection))
        if changes is None:
            self._write_setup(program.setup(selection.text))
        else:
            self._write_recompile(changes)
        self._programs.count(program, self.__name__, then=self._write_ledger)

    def _write_setup(self, table: Mapping[str, Any]) -> None:
        values = {"step function": self.__name__, **table}
        if self._shares_logger:
            self.logger.write_text(f"setup/{self.__name__}", format_values(values))
        else:
            self.logger.write_setup(values)

    def _write_recompile(self, changes: Sequence[str]) -> None:
        changes = changes or [
            "no argument changed; usually a global setting of JAX, or a context such as a mesh, did"
        ]
        self.logger.write_text(
            f"recompiled/{self.__name__}",
            f"{self.__name__} was recompiled at step {self.logger.next_step}: {'; '.join(changes)}",
        )

    def _write_ledger(self, flops: StepFlops) -> None:
        text = f"{self.__name__}:\n{flops.ledger.render()}"
        self.logger.write_text(f"ledger/{self.__name__}", text)

    def _finish(self) -> None:
        self._closed = True
        if self._profile is not None:
            self._profile.close()
        self._programs.close(_COUNT_SECONDS)

    def _known_program(self, asked: str) -> ProgramAnalysis:
        if self._programs.current is None:
            raise UserError(self._not_called(asked))
        return self._programs.current.analysis
