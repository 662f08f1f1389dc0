"""The callable behind an instrumented step: a jitted function, a view of one, or a new one."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import jax

from mfu_jax.errors import UserError


def name_of(step_fn: Any) -> str:
    """The name of a function, even of a partial."""
    while isinstance(step_fn, functools.partial):
        step_fn = step_fn.func
    return getattr(step_fn, "__name__", type(step_fn).__name__)


class BoundJitted:
    """A jitted function with some arguments bound."""

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
    """A callable with the ``lower`` and ``trace`` of a jitted function.

    That is `step_fn` itself if it is jitted, a view of it if it is a method or a partial of a
    jitted function, and otherwise a newly jitted function.

    Raises:
        UserError: `step_fn` cannot be called, or is jitted and `options` are given too.
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
                f"two; usually the options are passed to jax.jit already; leave jit=… out"
            )
        return step_fn
    return jax.jit(step_fn, **(options or {}))


def first_call(step_fn: Any, call: Any, name: str) -> Any:
    """`call`, for its first use: a function jitted here may not be jittable.

    Args:
        step_fn: what the user passed.
        call: what `jitted` made of it.
        name: of the step, for the message.

    Returns:
        `call` itself if the user jitted the step, else a function that explains JAX's errors.
    """
    if call is step_fn or isinstance(call, BoundJitted):
        return call

    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (jax.errors.JAXTypeError, TypeError) as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"{name} cannot be jitted ({type(error).__name__}: {first_line}); expected a "
                f"function of arrays that jax.jit accepts; usually it converts arrays to Python "
                f"numbers or prints, or takes arguments that are not arrays; instrument the jitted "
                f"function inside it, pass jit=dict(static_argnums=…), or time the whole with "
                f"`with logger.step():`"
            ) from error

    return explained


def programs_of(jitted: Any) -> int:
    """How many programs a jitted function has compiled so far; 0 if unknown."""
    size = getattr(getattr(jitted, "jitted_fn", jitted), "_cache_size", None)
    return size() if size is not None else 0
