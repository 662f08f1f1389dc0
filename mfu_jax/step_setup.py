"""From what a user passes to `instrument` or sets by flags to the parts that run."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mfu_jax.errors import UserError
from mfu_jax.settings import Settings
from mfu_jax.sinks import Sink, make_sink

# What a logger is made with, and so cannot be set beside a given one.
_OF_LOGGER = ("start_step", "warmup_steps", "log_period", "abort_on_nan_loss", "abort_on_inf_loss")
_OF_SINKS = ("metrics_file", "tensorboard_dir")
_OF_LOOP = ("profile_steps",)


def make_sinks(settings: Settings) -> list[Sink]:
    """Console, and JSONL and TensorBoard where the settings name a place; process 0 alone.

    Raises:
        UserError: an output folder cannot be written.
    """
    if jax.process_index() != 0:
        return []
    resume = {"resume_from_step": settings.start_step}
    sinks = [make_sink("console")]
    if settings.metrics_file:
        sinks.append(make_sink("jsonl", settings.metrics_file, **resume))
    if settings.tensorboard_dir:
        sinks.append(make_sink("tensorboard", settings.tensorboard_dir, **resume))
    return sinks


def logger_options(settings: Settings) -> dict[str, Any]:
    """The arguments of `MetricLogger` that are settings."""
    return {key: getattr(settings, key) for key in _OF_LOGGER}


def resolve(
    settings: Settings | None, options: Mapping[str, Any], flops_source: Any
) -> tuple[Settings, Any]:
    """The settings with `options` over them, and the config if `flops_source` is one."""
    values = {} if settings is None else vars(settings)
    config = None
    if isinstance(flops_source, str):
        options = {**options, "flops_source": flops_source}
    elif isinstance(flops_source, int | float):
        options = {
            **options,
            "flops_source": "value",
            "model_flops_per_device": flops_source,
        }
    elif flops_source is not None:
        config, options = flops_source, {**options, "flops_source": "analytic"}
    return Settings.of({**values, **options}), config


def refuse_logger_settings(settings: Settings, sinks: Sequence[Sink] | None) -> None:
    """Raises a `UserError` where options of a logger are given beside a logger."""
    defaults = Settings()
    keys = (*_OF_SINKS, *_OF_LOGGER, *_OF_LOOP)
    changed = [k for k in keys if getattr(settings, k) != getattr(defaults, k)]
    if sinks is not None:
        changed.append("sinks")
    if changed:
        raise UserError(
            f"{', '.join(changed)} and logger=… were both given; expected one of the two; usually "
            f"the option belongs to the logger that is shared; pass it to MetricLogger(…)"
        )


def name_of(step_fn: Any) -> str:
    """The name of a function, also if some of its arguments are given already."""
    while isinstance(step_fn, functools.partial):
        step_fn = step_fn.func
    return getattr(step_fn, "__name__", type(step_fn).__name__)


class BoundJitted:
    """A jitted function of which some arguments are given already."""

    def __init__(self, bound: functools.partial[Any], name: str) -> None:
        self.__name__ = name
        self.__signature__ = inspect.signature(bound)
        self._call = bound
        self.jitted_fn = getattr(bound.func, "jitted_fn", bound.func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in ("lower", "trace"):
            raise AttributeError(name)
        method = getattr(self._call.func, name)
        return functools.partial(method, *self._call.args, **self._call.keywords)


def jitted(step_fn: Any, name: str, options: Mapping[str, Any] | None) -> Any:
    """What is called, with the ``lower`` and ``trace`` of a jitted function.

    That is `step_fn` itself if it is jitted, a view of it if it is a method or a partial of a
    jitted function, and else a newly jitted one.
    """
    if not callable(step_fn) or isinstance(step_fn, jax.stages.Compiled):
        raise UserError(
            f"instrument was given {type(step_fn).__name__} {name!r}; expected the function that "
            f"the loop calls; usually its result or its compiled form; pass the jitted function "
            f"itself, as in instrument(train_step)"
        )
    is_method = isinstance(step_fn, types.MethodType)
    if is_method and hasattr(step_fn.__func__, "lower"):
        step_fn = BoundJitted(functools.partial(step_fn.__func__, step_fn.__self__), name)
    elif isinstance(step_fn, functools.partial) and hasattr(step_fn.func, "lower"):
        step_fn = BoundJitted(step_fn, name)
    if hasattr(step_fn, "lower"):
        if options:
            raise UserError(
                f"{name} is jitted, and jit={dict(options)!r} was given too; expected one of the "
                f"two; usually the options stand at jax.jit already; leave jit=… out"
            )
        return step_fn
    return jax.jit(step_fn, **(options or {}))


def programs_of(jitted: Any) -> int:
    """How many programs a jitted function has already; JAX's and Flax's tell."""
    size = getattr(getattr(jitted, "jitted_fn", jitted), "_cache_size", None)
    return size() if size is not None else 0
