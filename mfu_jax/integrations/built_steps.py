"""Steps that a library builds inside one of its functions, where no caller can wrap them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

import mfu_jax
from mfu_jax.instrumentation.jitting import name_of
from mfu_jax.instrumentation.options import OF_LOGGER
from mfu_jax.settings import Settings

_log = logging.getLogger("mfu_jax")
_JITS = ("jit", "pmap")


@contextlib.contextmanager
def instrumented_jit(name: str, **options: Any) -> Iterator[list[Any]]:
    """Instruments the function of that name whenever ``jax.jit`` or ``jax.pmap`` is called on it.

    For libraries whose training loop is one call. Only calls through the ``jax`` module are seen,
    ``from jax import jit`` done earlier is not. Everything else is jitted as always.

    Args:
        name: ``__name__`` of the step that the library jits.
        **options: of `mfu_jax.instrument`.

    Yields:
        The steps found so far, which share one logger; they are closed at the end.

    >>> import jax.numpy as jnp
    >>> def fit():  # a library's
    ...     def update(w, x):
    ...         return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    ...     update = jax.jit(update)
    ...     return update(jnp.ones((8, 4)), jnp.ones((2, 8)))
    >>> with instrumented_jit("update", peak_tflops_per_device=1, sinks=[]) as steps:
    ...     _ = fit()
    >>> steps[0].flops.model.per_device == 2 * (2 * 2 * 8 * 4)
    True
    """
    steps: list[Any] = []
    others: dict[str, None] = {}

    def watched(jit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(jit)
        def call(*args: Any, **kwargs: Any) -> Any:
            jitted = jit(*args, **kwargs)
            if not args:  # jax.jit(static_argnums=…) returns a decorator
                return lambda function: chosen(function, jitted(function))
            return chosen(args[0], jitted)

        return call

    def chosen(function: Any, jitted: Any) -> Any:
        if name_of(function) != name:
            others[name_of(function)] = None
            return jitted
        add_step(steps, jitted, options)
        return steps[-1]

    with contextlib.ExitStack() as stack:
        for jit in _JITS:
            original = getattr(jax, jit)
            stack.callback(setattr, jax, jit, original)
            setattr(jax, jit, watched(original))
        with closing(steps):
            yield steps
    if not steps:
        _log.warning(
            "no step was logged: nothing called %r was jitted, only %s\n"
            "hint: pass one of these names",
            name,
            ", ".join(others) or "nothing",
        )


def add_step(steps: list[Any], function: Any, options: Mapping[str, Any], **own: Any) -> None:
    """Instruments `function`; the logger of the first of `steps`, if any, records it, too.

    Args:
        steps: instrumented so far, to which it is added.
        function: a jitted step.
        options: of `mfu_jax.instrument`, for the whole loop.
        **own: further ones, for this step.
    """
    shared = sharing(steps[0], options) if steps else options
    steps.append(mfu_jax.instrument(function, **own, **shared))


def resuming(step: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a loop that goes on after `step` was closed, whose numbers go on."""
    is_own = "logger" not in options
    return {**options, **({"start_step": step.logger.next_step} if is_own else {})}


@contextlib.contextmanager
def closing(steps: Sequence[Any]) -> Iterator[None]:
    """Leaves the steps as their own ``with`` would: closed, or told what went wrong."""

    def leave(*error: Any) -> None:
        for step in reversed(steps):  # the first has the logger
            step.__exit__(*error)

    with contextlib.ExitStack() as stack:
        stack.push(leave)
        yield


def sharing(step: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of another program of the same loop, whose steps `step`'s logger records."""
    of_logger = (*OF_LOGGER, "sinks")
    own = {k: v for k, v in options.items() if k not in of_logger} | {"logger": step.logger}
    if (settings := own.get("settings")) is not None:
        defaults = {k: getattr(Settings(), k) for k in OF_LOGGER}
        own["settings"] = dataclasses.replace(settings, **defaults)
    return own


def paused(function: Callable[..., Any], name: str, step: Any) -> Callable[..., Any]:
    """`function`, whose calls are no part of a step: a pause of that name.

    Args:
        function: what the library calls between steps.
        name: ``eval``, ``checkpoint``, ….
        step: an instrumented step, whose logger is told.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with step.logger.pause(name):
            return function(*args, **kwargs)

    return call
