"""The callable behind an instrumented step: a jitted function, a view of one, or a new one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
import types
from collections.abc import Mapping
from typing import Any

import jax

from mfu_jax.errors import UserError, first_line


def name_of(step_fn: Any) -> str:
    """The name of a function, even if it is a partial, or one wrapped by ``nnx.jit``."""
    while not hasattr(step_fn, "__name__"):
        inner = getattr(step_fn, "__wrapped__", None) or getattr(step_fn, "func", None)
        if inner is None or inner is step_fn:
            return type(step_fn).__name__
        step_fn = inner
    return str(step_fn.__name__)


class BoundJitted:
    """A jitted function with some arguments bound, as `call`, the user's own, calls it."""

    def __init__(self, call: Any, bound: functools.partial[Any], name: str) -> None:
        self.__name__ = name
        self.__signature__ = inspect.signature(bound)
        self.call, self.bound = call, bound
        self.jitted_fn = getattr(bound.func, "jitted_fn", bound.func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in ("lower", "trace"):
            raise AttributeError(name)
        method = getattr(self.bound.func, name)
        return functools.partial(method, *self.bound.args, **self.bound.keywords)


def jitted(step_fn: Any, name: str, options: Mapping[str, Any] | None) -> Any:
    """A callable with the ``lower`` and ``trace`` of a jitted function.

    That is `step_fn` itself if it is jitted, a view of it if it is a method or a partial of a
    jitted function, and otherwise a newly jitted function.

    Raises:
        UserError: `step_fn` cannot be called, or is jitted and `options` are given too.
    """
    if not callable(step_fn) or isinstance(step_fn, jax.stages.Compiled):
        raise UserError(
            f"instrument was given {type(step_fn).__name__} {name!r}; expected the function "
            "that the loop calls",
            hint="usually its result or its compiled form; pass the jitted function itself, as "
            "in instrument(train_step)",
        )
    bound = _bound(step_fn)
    if bound is not None and hasattr(bound.func, "lower"):
        step_fn = BoundJitted(step_fn, bound, name)
    if hasattr(step_fn, "lower"):
        if options:
            raise UserError(
                f"{name} is jitted, and jit={dict(options)!r} was given too; expected one of "
                "the two",
                hint="usually the options are passed to jax.jit already; leave jit=… out",
            )
        return step_fn
    return jax.jit(step_fn, **(options or {}))


def _bound(step_fn: Any) -> functools.partial[Any] | None:
    """Converts a partial (JAX's, Equinox's, ``nnx.cached_partial``) or a method to a partial.

    Returns:
        The partial of a function; None if it is none of these.
    """
    if all(hasattr(step_fn, name) for name in ("func", "args", "keywords")):
        inner = _bound(step_fn.func) or functools.partial(step_fn.func)
        keywords = {**inner.keywords, **step_fn.keywords}
        return functools.partial(inner.func, *inner.args, *step_fn.args, **keywords)
    jitted: Any = getattr(step_fn, "__wrapped__", None)
    if inspect.isfunction(step_fn) and hasattr(jitted, "lower"):
        cached = None
        with contextlib.suppress(ValueError):  # a variable has no value yet
            nonlocals = inspect.getclosurevars(step_fn).nonlocals
            cached = nonlocals.get("cached_args")  # nnx.cached_partial
        return None if cached is None else functools.partial(jitted, *cached)
    function, owner = (getattr(step_fn, name, None) for name in ("__func__", "__self__"))
    return None if function is None else functools.partial(function, owner)


def caller_of(jitted: Any) -> Any:
    """The callable that runs the step, without a function of ours in between."""
    return jitted.call if isinstance(jitted, BoundJitted) else jitted


def jitting_error(step_fn: Any, name: str, error: BaseException) -> UserError | None:
    """Explains an error of JAX in the first call of a function that was jitted here.

    Returns:
        The explanation; None if the error has another cause or is the function's own.
    """
    if not isinstance(error, jax.errors.JAXTypeError | TypeError):
        return None
    if not isinstance(error, jax.errors.JAXTypeError) and _is_raised_inside(step_fn, error):
        return None
    return UserError(
        f"{name} cannot be jitted ({type(error).__name__}: {first_line(error)}); expected a "
        "function of arrays that jax.jit accepts",
        hint="usually it converts arrays to Python numbers or prints, or takes arguments that "
        "are not arrays; instrument the jitted function inside it, pass "
        "jit=dict(static_argnums=…), or time the whole with `with logger.step():`",
    )


def _is_raised_inside(step_fn: Any, error: BaseException) -> bool:
    """Whether the error was raised while the function ran, looking through partials, methods."""
    function = inspect.unwrap(step_fn)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__code__") and not isinstance(function, types.MethodType):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return code is not None and code in frames


def programs_of(jitted: Any) -> int:
    """How many programs a jitted function has compiled so far; 0 if unknown."""
    size = getattr(getattr(jitted, "jitted_fn", jitted), "_cache_size", None)
    return size() if size is not None else 0
