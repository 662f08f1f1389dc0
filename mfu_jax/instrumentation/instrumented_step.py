"""`instrument`: a training step that counts, times and logs itself."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload

import jax

from mfu_jax.errors import UserError
from mfu_jax.flops.ledger import Ledger
from mfu_jax.instrumentation.jitting import BoundJitted, jitted, name_of, programs_of
from mfu_jax.instrumentation.options import (
    logger_options,
    make_sinks,
    refuse_logger_settings,
    resolve,
)
from mfu_jax.instrumentation.packed_documents import PackedDocuments
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.instrumentation.signatures import Signature, SignatureTable
from mfu_jax.instrumentation.step_flops import StepFlops
from mfu_jax.instrumentation.step_outputs import Selection, select_metrics
from mfu_jax.instrumentation.step_profile import StepProfile
from mfu_jax.logger.compile_events import CompileEvent, CompileLog
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.sinks import Sink
from mfu_jax.logger.summary import Summary
from mfu_jax.settings import Settings

_log = logging.getLogger("mfu_jax")

_COUNT_SECONDS = 30.0  # longest wait for a count at the end of a run


@overload
def instrument(step_fn: Callable[..., Any], **options: Any) -> InstrumentedStep: ...
@overload
def instrument(
    step_fn: None = None, **options: Any
) -> Callable[[Callable[..., Any]], InstrumentedStep]: ...
def instrument(step_fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Wraps a training step so that every call of it is counted, timed and logged.

    The step runs as before, with its donation, shardings, static arguments and outputs: JAX
    compiles it at its first call, and that executable is counted in the background.

    Args:
        step_fn: what `jax.jit`, `jax.pmap`, ``nnx.jit`` or ``eqx.filter_jit`` returned. A plain
            function is jitted here. Left out, `instrument` is a decorator with options.
        metrics: a function from the step's output to a mapping of scalars, or to the loss; by
            default they are found (see `mfu_jax.instrumentation.step_outputs.select_metrics`).
        segment_ids: for batches of packed documents, a function from the step's arguments to their
            segment ids; each step then has the FLOPs of its own documents where the model's
            attention stands in ``attention_mask("documents")`` or ``"causal_documents"``.
        flops_source: ``"traced"``; or a number: model FLOPs of one device; or a config, as
            `mfu_jax.calculate_tflops_per_device` takes it.
        logger: a `MetricLogger` to share. Inside of its ``step()`` or ``phase()`` a call is a part
            of that step; outside it is a step of its own.
        sinks: where records go, instead of the console and what the settings name.
        settings: a `Settings`, as `mfu_jax.flags.settings` makes it of the flags.
        jit: keyword arguments of `jax.jit`, for a plain function.
        **options: any key of `mfu_jax.settings.Settings`, such as ``tokens_per_step=…``,
            ``metrics_file=…``, ``peak_tflops_per_device=…``, ``enable_mfu=…``.

    Returns:
        An `InstrumentedStep`, called like `step_fn`; with ``enable_mfu=False`` one that does
        nothing more than call it.

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
    if step_fn is None:
        return functools.partial(instrument, **options)
    return InstrumentedStep(step_fn, **options)


class InstrumentedStep:
    """A step that logs itself; made by `instrument`, which documents the arguments.

    Whatever else is asked of it (``lower``, ``trace``, …) is asked of the wrapped step.

    Attributes:
        settings: what was asked for.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        *,
        metrics: Callable[[Any], Any] | None = None,
        segment_ids: Callable[..., Any] | None = None,
        flops_source: Any = None,
        logger: MetricLogger | None = None,
        sinks: Sequence[Sink] | None = None,
        settings: Settings | None = None,
        jit: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.settings, self._config = resolve(settings, options, flops_source)
        self.__wrapped__ = step_fn
        self.__name__ = name_of(step_fn)
        self.__doc__ = getattr(step_fn, "__doc__", None)
        self._call = jitted(step_fn, self.__name__, jit)
        self._is_plain = self._call is not step_fn and not isinstance(self._call, BoundJitted)
        self._select = metrics
        self._documents = PackedDocuments(segment_ids) if segment_ids else None
        self._sinks = sinks
        self._logger = logger
        self._shares_logger = logger is not None
        if logger is not None:
            refuse_logger_settings(self.settings, sinks)
        self._profile: StepProfile | None = None
        if self.settings.profile_steps:
            folder = self.settings.profile_dir or self.settings.tensorboard_dir
            self._profile = StepProfile(self.settings.profile_steps, folder)
        self._closed = False
        self._is_on = self.settings.enable_mfu
        if not self._is_on:
            return
        self._programs: SignatureTable[tuple[ProgramAnalysis, Selection]] = SignatureTable(
            whole=programs_of(self._call) != 0
        )
        self._current: tuple[ProgramAnalysis, Selection] | None = None
        self._signature: Signature | None = None
        self._compiled_programs = 0
        self._thread_id = threading.get_ident()
        self._counting: list[threading.Thread] = []
        self._compile_log = CompileLog()
        self._compile_log.subscribe(self._on_compile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step and logs it.

        Raises:
            UserError: after `close`, inside of another function's trace, or what the analysis of a
                new program finds wrong.
            NonFiniteLossError: an earlier step's loss is NaN or infinite.
        """
        if not self._is_on:
            return self.__wrapped__(*args, **kwargs)
        if self._closed:
            raise UserError(
                f"{self.__name__} was called after close(); expected all calls before; usually "
                f"close() stands inside of the loop, or `with` ends early; close it after the "
                f"loop, or call {self.__name__}.__wrapped__ to go on without logging"
            )
        logger = self._logger or self.logger
        packed = self._documents.of(args, kwargs) if self._documents else None
        compiled_programs = self._compiled_programs
        self._thread_id = threading.get_ident()
        if self._profile is None:
            output = self._call(*args, **kwargs) if self._current else self._first(args, kwargs)
        else:
            with self._profile.step(logger.next_step, logger):
                output = self._call(*args, **kwargs) if self._current else self._first(args, kwargs)
        if self._compiled_programs != compiled_programs or self._current is None:
            self._analyse(args, kwargs, output)
        elif self._programs.is_ambiguous:
            self._look_up(args, kwargs, output)
        program, selection = self._current  # type: ignore[misc]  # one of the two has set it
        metrics = selection.read(output)
        cost = program.cost if packed is None else packed.cost(program.model.packed, program.cost)
        if logger.phases.takes_calls:
            logger.phases.add_call(self.__name__, cost, metrics, output)
        else:
            logger.record(logger.next_step, metrics, cost=cost)
            if self._profile is not None:
                self._profile.after(logger.next_step - 1, logger)
        return output

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or self._shares_logger:
            self.close()
        elif self._logger is not None:
            self._finish()
            self._logger.__exit__(kind, error, traceback)

    @property
    def logger(self) -> Any:
        """The `MetricLogger`, for ``pause("eval")``, ``waiting("data")``, ``record_eval`` …."""
        if not self.settings.enable_mfu:
            return DisabledLogger()
        if self._logger is None:
            sinks = make_sinks(self.settings) if self._sinks is None else self._sinks
            self._logger = MetricLogger(
                sinks=sinks, compile_log=self._compile_log, **logger_options(self.settings)
            )
        return self._logger

    @property
    def flops(self) -> StepFlops:
        """Every count of the program that ran last; waits for it.

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
        """Ends the logging: writes what is left and the summary. A shared logger stays open.

        Returns:
            The summary; None where nothing was logged.
        """
        if self._closed or not self.settings.enable_mfu:
            return None
        if self._current is None and not self._shares_logger:
            _log.warning("%s", self._not_called("close()"))
        self._finish()
        if self._shares_logger or self._logger is None:
            return None
        return self._logger.close()

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_plain:
            return self._call(*args, **kwargs)
        try:
            return self._call(*args, **kwargs)
        except (jax.errors.JAXTypeError, TypeError) as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"{self.__name__} cannot be jitted ({type(error).__name__}: {first_line}); "
                f"expected a function of arrays that jax.jit accepts; usually it converts arrays "
                f"to Python numbers or prints, or takes arguments that are no arrays; instrument "
                f"the jitted function inside of it, pass jit=dict(static_argnums=…), or time the "
                f"whole with `with logger.step():`"
            ) from error

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        known = self._programs.find(args, kwargs)
        if known is None:  # compiled before it was instrumented
            self._analyse(args, kwargs, output)
        else:
            self._current = known

    def _analyse(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Finds out about the program that has just been dispatched for the first time."""
        selection = select_metrics(output, self._select)
        before, self._signature = self._signature, Signature.of(self.__wrapped__, args, kwargs)
        jax.block_until_ready(selection.read(output))  # a busy CPU cannot be calibrated
        with self.logger.pause("count", flush=False):
            program = ProgramAnalysis(
                self._call, args, kwargs, settings=self.settings, config=self._config
            )
        first = self.logger.next_step
        program.backlog = lambda: self.logger.next_step - first
        self._current = program, selection
        self._programs.add(self._signature, self._current)
        if before is None:
            self._write_setup(program, selection)
        else:
            self._write_recompile(before)
        thread = threading.Thread(
            target=self._count, args=(program,), name=f"mfu_jax count {self.__name__}"
        )
        self._counting = [t for t in self._counting if t.is_alive()] + [thread]
        thread.start()

    def _count(self, program: ProgramAnalysis) -> None:
        flops = program.count()
        if flops is not None:
            text = f"{self.__name__}:\n{flops.ledger.render()}"
            self.logger.write_text(f"ledger/{self.__name__}", text)

    def _write_setup(self, program: ProgramAnalysis, selection: Selection) -> None:
        values = {"step function": self.__name__} | program.setup(selection.text)
        if self._shares_logger:
            text = "\n".join(f"{key}: {value}" for key, value in values.items())
            self.logger.write_text(f"setup/{self.__name__}", text)
        else:
            self.logger.write_setup(values)

    def _write_recompile(self, before: Signature) -> None:
        assert self._signature is not None
        changes = before.differences(self._signature) or [
            "no argument changed; usually a global setting of JAX, or a context such as a mesh, did"
        ]
        self.logger.write_text(
            f"recompiled/{self.__name__}",
            f"{self.__name__} was recompiled at step {self.logger.next_step}: {'; '.join(changes)}",
        )

    def _finish(self) -> None:
        self._closed = True
        if self._profile is not None:
            self._profile.close()
        for thread in self._counting:
            thread.join(_COUNT_SECONDS)
        self._compile_log.unsubscribe(self._on_compile)
        if self._shares_logger:
            self._compile_log.close()

    def _known_program(self, asked: str) -> ProgramAnalysis:
        if not self.settings.enable_mfu or self._current is None:
            raise UserError(self._not_called(asked))
        return self._current[0]

    def _not_called(self, asked: str) -> str:
        return (
            f"{self.__name__}.{asked} was asked for, but the step has logged no call; expected at "
            f"least one before; usually the loop calls the function that was wrapped, or "
            f"enable_mfu is false; use what instrument() returned in the loop"
        )

    def _on_compile(self, event: CompileEvent) -> None:
        if event.stage == "compile" and event.thread_id == self._thread_id:
            self._compiled_programs += 1
