"""Traces a function to a jaxpr without dead code, with or without `jax.checkpoint`."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from mfu_jax.errors import UserError
from mfu_jax.util.attributes import temporarily
from mfu_jax.util.jax_internals import (
    ClosedJaxpr,
    open_jaxpr,
    remat_p,
    set_xla_metadata,
    without_dead_code,
    without_references,
)


class _TracingThread(threading.local):
    inlines_checkpoints = False


_this_thread = _TracingThread()


class _CheckpointPatch:
    """Replaces `remat_p.bind` while any thread traces without checkpoints.

    JAX has no hook to ignore `jax.checkpoint`. Threads that do not ask for this keep JAX's own
    behaviour while the patch is in place.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.original: Callable[..., list[Any]] = remat_p.bind
        self.is_own_attribute = True  # an attribute of the primitive, not of its class

    def bind(self, *args: Any, jaxpr: Any, **params: Any) -> list[Any]:
        if _this_thread.inlines_checkpoints:
            return list(jax.core.eval_jaxpr(jaxpr, (), *args))
        return self.original(*args, jaxpr=jaxpr, **params)

    def __enter__(self) -> None:
        with self.lock:
            if not self.users:
                self.original = remat_p.bind
                self.is_own_attribute = "bind" in vars(remat_p)
                setattr(remat_p, "bind", self.bind)  # noqa: B010
            self.users += 1

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users and self.is_own_attribute:
                setattr(remat_p, "bind", self.original)  # noqa: B010
            elif not self.users:
                delattr(remat_p, "bind")


_patch = _CheckpointPatch()


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """While this thread traces in here, `jax.checkpoint` does nothing; other threads keep it.

    JAX caches traces. The metadata is part of the cache key, so traces made in here neither come
    from that cache nor are reused elsewhere.
    """
    inlined = temporarily(_this_thread, inlines_checkpoints=True)
    with _patch, set_xla_metadata(mfu_jax_trace="without_checkpoints"), inlined:
        yield


def takes(fn: Callable[..., Any], args: tuple[Any, ...], name: str) -> bool:
    """Whether a function called with `args` also accepts a keyword of this name."""
    try:
        inspect.signature(fn).bind_partial(*args, **{name: None})
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def trace(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[Any, Any]]:
    """The jaxpr of ``fn(*args, **kwargs)`` without dead code, and its constants. Nothing is run.

    The constants, keyed by variable, include those of inner jaxprs.

    Args:
        fn: a plain function, or a jitted one with any static arguments.
        args: arrays, `jax.ShapeDtypeStruct`s, or trees of them; leaves that are neither
            (Python numbers, strings, functions) are static.
        kwargs: its keyword arguments.

    Raises:
        UserError: `fn` is not a function, or cannot be traced with these arguments.
    """
    if not callable(fn):
        raise UserError(
            f"count_model_flops got {type(fn).__name__!r} where a function was expected",
            hint="pass the function and its arguments separately: count_model_flops(step, "
            "state, batch)",
        )
    try:
        closed = _trace_jitted(fn, args, kwargs)
        if closed is None:
            closed = _trace_plain(fn, args, kwargs)
        closed = without_references(closed)
    except UserError:
        raise
    except Exception as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UserError(
            f"{name} could not be traced with the given arguments ({type(error).__name__}: "
            f"{first_line}); expected a function that jax.jit accepts and arguments with the "
            "shapes and dtypes of a real call",
            hint="usually a wrong example argument, or Python control flow on array values; "
            f"try jax.eval_shape({name}, …) with the same arguments and fix what it reports",
        ) from error
    jaxpr = without_dead_code(closed.jaxpr)
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    _add_inner_constants(jaxpr, constants, set(), _platform((args, kwargs)))
    return jaxpr, constants


def _platform(arguments: Any) -> str | None:
    """The platform of the devices that hold the arguments; None if that is not one."""
    shardings = {getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)}
    clients = {device.client for sharding in shardings for device in _devices(sharding)}
    platforms = {getattr(c, "_raw_platform", c.platform) for c in clients}
    return platforms.pop() if len(platforms) == 1 else None


def _devices(sharding: Any) -> Iterable[Any]:
    """Devices of a sharding; none of one over an abstract mesh."""
    is_abstract = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return () if is_abstract else getattr(sharding, "device_set", ())


def _add_inner_constants(
    jaxpr: Any, constants: dict[Any, Any], seen: set[int], platform: str | None
) -> None:
    for eqn in jaxpr.eqns:
        if platform and eqn.primitive.name == "platform_index":
            for index, names in reversed(list(enumerate(eqn.params["platforms"]))):
                if names is None or platform in names:  # the first one is taken
                    constants[eqn.outvars[0]] = np.int32(index)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                opened = open_jaxpr(inner)
                if opened is None or id(inner) in seen:
                    continue
                seen.add(id(inner))
                if isinstance(inner, ClosedJaxpr):
                    constants.update(zip(opened.constvars, inner.consts, strict=True))
                _add_inner_constants(opened, constants, seen, platform)


def _trace_jitted(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any | None:
    if isinstance(fn, types.MethodType):  # a jitted method's trace is its function's, without self
        args = (fn.__self__, *args)
        fn = fn.__func__
    jax_trace = getattr(fn, "trace", None)
    if jax_trace is None or not hasattr(fn, "lower"):
        return None
    traced = jax_trace(*args, **kwargs)
    # Flax's nnx.jit wraps it. Its trace also returns what the function updates in place; traced as
    # a plain function, an update of the model would look like dead code.
    traced = getattr(traced, "traced", traced)
    return getattr(traced, "jaxpr", None)


def _trace_plain(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    dynamic, merge = split_arrays((args, dict(kwargs)))

    def call(arrays: list[Any]) -> Any:
        call_args, call_kwargs = merge(arrays)
        out = fn(*call_args, **call_kwargs)
        # Including the arguments: a training step updates a Flax NNX model in place.
        return split_arrays((out, call_args, call_kwargs))[0]

    return jax.make_jaxpr(call)(dynamic)


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and a function that puts other arrays in their place."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, v in enumerate(leaves) if hasattr(v, "shape") and hasattr(v, "dtype")]

    def merge(arrays: list[Any]) -> Any:
        given = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], merge
