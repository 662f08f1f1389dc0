"""The boundary around a user's run: a failure of ours costs one log line and a missing number.

Everything that runs beside the user's step is called through a `Boundary`. `KeyboardInterrupt`,
`SystemExit` and anything else that is not an `Exception` pass through, as does whatever a signal
handler of the user raises in the middle of our work.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import signal
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from mfu_jax.errors import UserError

_log = logging.getLogger("mfu_jax")

_Method = TypeVar("_Method", bound=Callable[..., Any])
_LONGEST_TEXT = 500

_handlers: set[types.CodeType] = set()  # code of signal handlers, installed now or seen earlier


def _guard_handlers(log: logging.Logger) -> None:
    """Log handlers are the user's: one that raises loses its line, but never kills the thread."""
    call_handlers = log.callHandlers

    def guarded_call(record: logging.LogRecord) -> None:
        try:
            call_handlers(record)
        except Exception:
            with contextlib.suppress(Exception):
                if logging.raiseExceptions:
                    traceback.print_exc()

    log.callHandlers = guarded_call  # type: ignore[method-assign]


_guard_handlers(_log)


class Boundary:
    """Logs each failure once, as a warning; its type and where it was raised identify it.

    It keeps text only: an exception would keep the arrays of all frames in its traceback alive.
    """

    def __init__(self) -> None:
        self._times: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        note_handlers()

    @property
    def failures(self) -> int:
        """Number of failures reported, including repetitions."""
        return self._times.total()

    def attempt(
        self,
        missing: str,
        function: Callable[..., Any],
        *args: Any,
        instead: Any = None,
        passes: tuple[type[Exception], ...] = (),
    ) -> Any:
        """``function(*args)``, or `instead` if it fails.

        Args:
            missing: what the user then does not get, as a clause: ``MFU of f is not known``.
            function: what may fail.
            *args: its arguments.
            instead: the result after a failure.
            passes: exceptions meant for the caller.
        """
        try:
            return function(*args)
        except passes:
            raise
        except Exception as error:
            self.caught(error, missing)
            return instead

    def caught(self, error: Exception, missing: str) -> None:
        """Reports a failure, or re-raises it if it came from a signal; see `is_interrupt`."""
        if is_interrupt(error):
            raise error
        self.report(error, missing)

    def report(self, error: Exception, missing: str) -> None:
        """Warns about a failure, or only counts it if already reported. Never raises.

        Args:
            error: what was raised. A `UserError` says what to do; anything else is a bug.
            missing: see `attempt`.
        """
        with contextlib.suppress(Exception):
            origin = type(error).__name__, _innermost(error)
            with self._lock:
                self._times[origin] += 1
                is_new = self._times[origin] == 1
            if is_new:
                _log.warning("%s", _line(error, missing))
            else:
                _log.debug("again (%d): %s: %s", self._times[origin], missing, _first_line(error))

    def thread(
        self,
        name: str,
        missing: str,
        function: Callable[..., Any],
        *args: Any,
        daemon: bool = True,
    ) -> threading.Thread:
        """An unstarted thread that runs ``function(*args)`` inside this boundary."""
        return threading.Thread(
            target=self.attempt, name=name, args=(missing, function, *args), daemon=daemon
        )


def guarded(
    missing: str,
    *,
    passes: tuple[type[Exception], ...] = (),
    instead: Callable[[Any], Any] = lambda self: None,
) -> Callable[[_Method], _Method]:
    """Decorates a method whose failures must not reach the caller; `self` needs a ``_boundary``.

    Args:
        missing: see `Boundary.attempt`; ``{0}`` stands for `self`.
        passes: exceptions meant for the caller.
        instead: computes the result after a failure, from `self`.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except passes:
                raise
            except Exception as error:
                self._boundary.caught(error, _clause(missing, self))
                return instead(self)

        return wrapper  # type: ignore[return-value]  # the signature is that of `method`

    return decorate


def _clause(missing: str, owner: Any) -> str:
    with contextlib.suppress(Exception):  # formatting its name may be what fails
        return missing.format(owner)
    return missing


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal raised it, so that it is meant for the training loop, wherever it struck.

    That is Ctrl-C, an exit, or anything raised in a user's signal handler.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return True
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    note_handlers()
    return not codes.isdisjoint(_handlers)


def note_handlers() -> None:
    """Remembers the current signal handlers: some first replace themselves by another one."""
    for number in signal.valid_signals():
        with contextlib.suppress(Exception):  # the handler is the user's object
            if (code := _code(signal.getsignal(number))) is not None:
                _handlers.add(code)


def _code(handler: Any) -> types.CodeType | None:
    """The code of a function, method, partial or callable instance; None for anything else."""
    if not callable(handler):
        return None
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", getattr(type(handler).__call__, "__code__", None))


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A bound method as a listener that does not keep its object alive; a no-op without it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **kwargs)

    return call


def _line(error: Exception, missing: str) -> str:
    if isinstance(error, UserError):
        return f"{missing}: {error}"
    text = f"{missing}: {type(error).__name__}: {_first_line(error)}"
    return f"{text}; the run goes on without it; please report this, details in {_details(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no text"])[0][:_LONGEST_TEXT]


def _details(error: Exception) -> str:
    """The file with the traceback, or the failing line if no file can be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="mfu_jax_", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.write(f"{_versions()}\n\n{''.join(traceback.format_exception(error))}")
        return file.name
    except OSError:
        return _innermost(error)


def _versions() -> str:
    modules = ("mfu_jax", "jax", "jaxlib", "flax", "numpy")
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in modules}
    found = ", ".join(f"{name} {version}" for name, version in loaded.items() if version)
    return f"Python {platform.python_version()}, {found}, {platform.platform()}"


def _innermost(error: Exception) -> str:
    trace = error.__traceback__
    if trace is None:
        return "no frame"
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
