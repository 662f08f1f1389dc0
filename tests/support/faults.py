"""Makes any function of the package raise, wherever it is called from: by its code, not its name.

A function's code is replaced, so that a name imported elsewhere, a method, a property, a lambda and
a function made anew in every call all fail alike, on every thread.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mfu_jax

_ROOT = str(Path(mfu_jax.__file__).parent)


class InjectedError(Exception):
    """What an injected function raises.

    Attributes:
        times: how often it was raised since this was last set, but in threads that were left then:
            of an earlier run whose log could not be closed.
    """

    times = 0
    left: frozenset[threading.Thread] = frozenset()

    def __init__(self) -> None:
        super().__init__("injected")
        InjectedError.times += threading.current_thread() not in InjectedError.left


def _raise() -> None:
    error: Any = "InjectedError"  # this constant is replaced below
    raise error


def reached(call: Callable[[], Any]) -> list[types.CodeType]:
    """The code of every function of the package that `call` reaches, on any thread."""
    found: dict[types.CodeType, None] = {}

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            found.setdefault(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return [code for code in found if _is_function(code)]


def _is_function(code: types.CodeType) -> bool:
    """Not a class body or a module, which run at import, nor a comprehension inside a function."""
    is_body = not code.co_flags & inspect.CO_OPTIMIZED
    return not is_body and (code.co_name.isidentifier() or code.co_name == "<lambda>")


def name_of(code: types.CodeType) -> str:
    """``logger.metric_logger:MetricLogger.record``."""
    module = Path(code.co_filename).relative_to(_ROOT).with_suffix("")
    return f"{'.'.join(module.parts)}:{code.co_qualname}"


class Injector:
    """Finds the functions that have a code; made once, because that takes long."""

    def __init__(self) -> None:
        self._holders: dict[types.CodeType, list[types.FunctionType]] = {}
        self._caches: list[Any] = []
        self._tables: list[Any] = []
        gc.unfreeze()  # objects that are frozen would not be found
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType):
                if thing.__code__.co_filename.startswith(_ROOT):
                    for code in _inside(thing.__code__):
                        self._holders.setdefault(code, []).append(thing)
            elif isinstance(thing, functools._lru_cache_wrapper) and _is_ours(thing):
                is_table = not inspect.signature(thing.__wrapped__).parameters
                (self._tables if is_table else self._caches).append(thing)

    def forget(self, *, tables: bool) -> None:
        """Clears the package's caches.

        Args:
            tables: also those of functions without parameters, which read our own files: slowly.
        """
        for cache in [*self._caches, *(self._tables if tables else ())]:
            cache.cache_clear()

    @contextlib.contextmanager
    def failing(self, code: types.CodeType) -> Iterator[None]:
        """Every call of `code` raises `InjectedError`; also where its function is made later."""
        before = [(function, function.__code__) for function in self._holders[code]]
        InjectedError.times = 0
        InjectedError.left = frozenset(threading.enumerate()) - {threading.current_thread()}
        _set_codes((function, _replaced(whole, code)) for function, whole in before)
        try:
            yield
        finally:
            _set_codes(before)


def _set_codes(codes: Iterable[tuple[types.FunctionType, types.CodeType]]) -> None:
    with warnings.catch_warnings():  # Python 3.13: a generator becomes a plain function, and back
        warnings.filterwarnings("ignore", "Assigning a code object", DeprecationWarning)
        for function, code in codes:
            function.__code__ = code


def _is_ours(function: Any) -> bool:
    return str(function.__module__).startswith("mfu_jax.")


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inside(constant)


def _replaced(code: types.CodeType, wanted: types.CodeType) -> types.CodeType:
    """`code`, where `wanted`, which is it or a function inside it, only raises."""
    if code == wanted:
        return _raising(code)
    constants = tuple(
        _replaced(c, wanted) if isinstance(c, types.CodeType) else c for c in code.co_consts
    )
    if all(a is b for a, b in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=constants)


def _raising(code: types.CodeType) -> types.CodeType:
    def fail(*args: Any, **kwargs: Any) -> None: ...

    template = fail.__code__
    body = _raise.__code__
    constants = tuple(InjectedError if c == "InjectedError" else c for c in body.co_consts)
    return template.replace(
        co_code=body.co_code,
        co_consts=constants,
        co_names=body.co_names,
        co_stacksize=body.co_stacksize,
        co_exceptiontable=body.co_exceptiontable,
        co_linetable=body.co_linetable,
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
