"""`instrument`: a training step that counts, times and logs itself."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

from mfu_jax.errors import UserError
from mfu_jax.flops.lengths import Lengths
from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.instrumentation.jitting import caller_of, jitted, jitting_error, name_of
from mfu_jax.instrumentation.options import (
    StepOptions,
    check_kinds,
    checked_trip_counts,
    refuse_logger_settings,
    resolve,
    warn_of_outputs,
)
from mfu_jax.instrumentation.packed_documents import PackedDocuments
from mfu_jax.instrumentation.step_observer import COUNT_SECONDS, StepObserver
from mfu_jax.logger.disabled import DisabledLogger
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.non_finite import RERAISED
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.base import Sink
from mfu_jax.settings import Settings
from mfu_jax.util.failsafe import failsafe

if TYPE_CHECKING:
    from mfu_jax.flops.ledger import Ledger

_log = logging.getLogger("mfu_jax")
_LIKE_IT = ("__module__", "__qualname__", "__annotations__")


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
    trip_counts: Mapping[str, int] | None = None,
    group_sizes: Sequence[int] = (),
    sequence_lengths: Sequence[int] = (),
    **options: Any,
) -> Any:
    """Wraps a training step so that every call is counted, timed and logged.

    The step runs as before, with the same donation, shardings, static arguments and outputs: JAX
    compiles it at its first call, and that executable is counted in the background. A failure in
    this package never reaches the loop: it logs one warning, and a number is missing.

    Args:
        step_fn: what `jax.jit`, `jax.pmap`, ``nnx.jit`` or ``eqx.filter_jit`` returned. A plain
            function is jitted here. Without it, `instrument` is a decorator with options.
        metrics: a function from the step's output to a mapping of scalars, or to the loss; by
            default they are detected (see `mfu_jax.instrumentation.outputs.select_metrics`). A
            metric is a scalar or a vector of at most 16 numbers; nothing larger is kept.
        segment_ids: for batches of packed documents, a function from the step's arguments to their
            segment ids; attention inside ``attention_mask("documents")`` or
            ``"causal_documents"`` then counts only the FLOPs of each step's own documents.
        flops_source: ``"traced"``; or a number: model FLOPs of one device; or a config, as
            accepted by `mfu_jax.calculate_tflops_per_device`.
        logger: a `MetricLogger` to share. Inside its ``step()`` or ``phase()``, a call is part of
            that step. Inside any pause it is not a step; inside ``pause("eval")`` its metrics,
            averaged over all calls, become the eval's. Elsewhere it is a step of its own.
        sinks: where records go, instead of the console and the sinks named in the settings.
        settings: a `Settings`, such as `mfu_jax.flags.settings` makes from the flags.
        jit: keyword arguments of `jax.jit`, for a plain function.
        trip_counts: iterations of the loops that depend on data, by the names shown in the
            ledger's notes.
        group_sizes: rows of each group (expert) in grouped matmuls, on one device.
        sequence_lengths: keys of each sequence in paged attention.
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

    lengths = Lengths.of(group_sizes, sequence_lengths)
    check_kinds(
        metrics=metrics, segment_ids=segment_ids, logger=logger, sinks=sinks, settings=settings
    )

    def wrap(step_fn: Callable[..., Any]) -> InstrumentedStep | DisabledStep:
        resolved, config = resolve(settings, options, flops_source, logger)
        call = jitted(step_fn, name_of(step_fn), jit)
        if logger is not None:
            refuse_logger_settings(resolved, sinks, logger)
        if not resolved.enable_mfu:
            return DisabledStep(step_fn, resolved)
        warn_of_outputs(resolved, sinks)
        chosen = StepOptions(
            settings=resolved,
            config=config,
            metrics=metrics,
            documents=PackedDocuments(segment_ids) if segment_ids else None,
            sinks=sinks,
            trip_counts=checked_trip_counts(trip_counts),
            lengths=lengths,
        )
        return InstrumentedStep(step_fn, call, chosen, logger)

    return wrap if step_fn is None else wrap(step_fn)


class WrappedStep:
    """Looks like the wrapped step; attributes that it lacks are looked up there.

    Copying returns the same object, as for a function; pickling, the wrapped step without logging.

    Args:
        step_fn: the step.
        settings: kept for the user to read.

    Attributes:
        settings: the settings for the metrics.
    """

    def __init__(self, step_fn: Callable[..., Any], settings: Settings) -> None:
        self.settings = settings
        functools.update_wrapper(self, step_fn, _LIKE_IT, updated=())  # type: ignore[arg-type]
        self.__name__ = name_of(step_fn)
        self.__doc__ = getattr(step_fn, "__doc__", None)

    def __repr__(self) -> str:
        return f"<{self.__name__}, {type(self).__name__}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """In a class body it becomes a method if the wrapped function would."""
        bind = getattr(type(self.__wrapped__), "__get__", None)
        if instance is None or bind is None:
            return self
        is_bound = bind(self.__wrapped__, instance, owner) is not self.__wrapped__
        call: Any = self
        return types.MethodType(call, instance) if is_bound else self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _bare, (self.__wrapped__,)

    def __enter__(self) -> Self:
        return self

    def _not_called(self, asked: str) -> UserError:
        return UserError(
            f"{self.__name__}.{asked} was asked for, but the step has logged no call; expected at "
            f"least one before",
            hint="usually the loop calls the function that was wrapped, or enable_mfu is false; "
            "use what instrument() returned in the loop",
        )


def _bare(step_fn: Callable[..., Any]) -> Callable[..., Any]:
    return step_fn


class DisabledStep(WrappedStep):
    """What `instrument` returns with ``enable_mfu=False``: calls the step and does nothing else.

    It has the interface of `InstrumentedStep`; anything that needs a logged call is an error.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step."""
        return self.__wrapped__(*args, **kwargs)

    def __exit__(self, *error: object) -> None: ...

    @property
    def logger(self) -> DisabledLogger:
        """A logger whose methods do nothing."""
        return DisabledLogger()

    @property
    def flops(self) -> NoReturn:
        """Not available.

        Raises:
            UserError: always.
        """
        raise self._not_called("flops")

    @property
    def ledger(self) -> NoReturn:
        """Not available.

        Raises:
            UserError: always.
        """
        raise self._not_called("ledger")

    def summary(self) -> NoReturn:
        """Not available.

        Raises:
            UserError: always.
        """
        raise self._not_called("summary()")

    def close(self) -> None:
        """Does nothing."""


class InstrumentedStep(WrappedStep):
    """A step that logs itself; made by `instrument`.

    Attributes it lacks (``lower``, ``trace``, …) are looked up on the wrapped step.

    Args:
        step_fn: the wrapped step.
        call: the same, jitted.
        options: what the user chose.
        logger: a logger to share.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        call: Any,
        options: StepOptions,
        logger: MetricLogger | None,
    ) -> None:
        super().__init__(step_fn, options.settings)
        self._run = caller_of(call)
        self._is_jitted_here = self._run is call is not step_fn
        self._was_called = self._has_run = False
        self._closed = False
        self._observer = StepObserver(self, call, options, logger)
        self._on_drop = weakref.finalize(self, _close_dropped, self._observer)
        self._on_drop.atexit = False  # the logger has its own exit handler
        self._boundary = self._observer.boundary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step, exactly once, and logs it.

        Raises:
            UserError: after `close`; or an output folder cannot be written; or a plain function
                cannot be jitted.
            NonFiniteLossError: an earlier step's loss is NaN or infinite, with abort enabled.
        """
        if self._closed:
            raise UserError(
                f"{self.__name__} was called after close(); expected all calls before",
                hint="usually close() is inside the loop, or `with` ends early; close it after "
                f"the loop, or call {self.__name__}.__wrapped__ to go on without logging",
            )
        self._was_called, observer = True, self._observer
        pending = observer.before_call(args, kwargs)
        try:
            output = self._run(*args, **kwargs)
        except BaseException as error:
            observer.call_failed(pending)
            is_first = self._is_jitted_here and not self._has_run
            if is_first and (why := jitting_error(self.__wrapped__, self.__name__, error)):
                raise why from error
            raise
        self._has_run = True
        if pending is not None:
            try:
                observer.after_call(pending, args, kwargs, output)
            except BaseException as error:
                if not self._keeps(error):
                    raise
        return output

    @failsafe("the metrics of {0.__name__} may not all be written", passes=RERAISED)
    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None or self._observer.shares_logger:
            self.close()
        elif not self._closed:
            self._finish()
            self._observer.close_logger(kind, *error)

    @property
    @failsafe("{0.__name__} is not logged", passes=(UserError,), instead=DisabledLogger())
    def logger(self) -> MetricLogger:
        """The `MetricLogger`, for ``pause("eval")``, ``waiting("data")``, ``record_eval`` …."""
        return self._observer.logger  # type: ignore[return-value]  # or one that does nothing

    def __repr__(self) -> str:
        """The step, what it does now, and where its records go; nothing is waited for."""
        state = "closed" if self._closed else "logging" if self._was_called else "not called yet"
        place = self.settings.run_dir or self.settings.metrics_file
        return f"<{self.__name__}, instrumented: {state}{f', in {place}' if place else ''}>"

    @property
    def flops(self) -> StepFlops:
        """All counts of the last program run; waits for them.

        Raises:
            UserError: the step has not been called, or its program could not be counted.
        """
        self._check_has_run("flops")
        flops = self._observer.flops()
        if flops is None:
            raise UserError(
                f"the program of {self.__name__} has no count; expected one within "
                f"{COUNT_SECONDS:.0f} s of its compilation",
                hint="usually a part of it could not be counted, as the log says; ask again "
                "later, or report it",
            )
        return flops

    @property
    def ledger(self) -> Ledger:
        """From model FLOPs to executed FLOPs, line by line, for the last program run."""
        return self.flops.ledger

    @failsafe("there is no summary", passes=(UserError,), instead=Summary(steps=0))
    def summary(self) -> Summary:
        """Totals of the run so far.

        Raises:
            UserError: the step has not been called.
        """
        self._check_has_run("summary()")
        return self.logger.summary() or Summary(steps=0)

    @failsafe("there is no summary", passes=RERAISED)
    def close(self) -> Summary | None:
        """Stops logging: writes pending records and the summary. A shared logger stays open.

        Returns:
            The summary; None if nothing was logged.
        """
        if self._closed:
            return None
        self._finish()
        summary = self._observer.close_logger()
        if not (summary or self._was_called or self._observer.shares_logger):
            _log.warning("%s", self._not_called("close()"))
        return summary

    def _finish(self) -> None:
        self._closed = True
        self._on_drop.detach()
        self._observer.close()

    def _keeps(self, error: BaseException) -> bool:
        """Whether an interrupt was kept for the next logger call, so that no outputs are lost."""
        logger = self._observer.logger
        return isinstance(logger, MetricLogger) and logger.defer_interrupt(error)

    def _check_has_run(self, asked: str) -> None:
        if not self._has_run:
            raise self._not_called(asked)


def _close_dropped(observer: StepObserver) -> None:
    """Closes what nobody else can, for example when a sweep drops one step for the next.

    Uses its own thread: a step may be dropped or garbage-collected anywhere. If none can start, the
    end of the process closes it.
    """

    def close() -> None:
        observer.close()
        observer.close_logger()

    missing = f"the metrics of {observer.name} may not all be written"
    observer.boundary.thread("mfu_jax close", missing, close).start()
