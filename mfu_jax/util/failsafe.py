"""The boundary around a user's run: a failure of ours costs one log line and a missing number.

Everything that runs beside the user's step is inside a `failsafe`, which reports to a `Boundary`.
`KeyboardInterrupt`, `SystemExit` and anything else that is not an `Exception` pass through, as does
whatever a signal handler of the user raises in the middle of our work.
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
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from mfu_jax.errors import UserError

_log = logging.getLogger("mfu_jax")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LONGEST_TEXT = 500
_MOST_SUBJECTS = 10_000

ITSELF = object()
"""Stands for a method's own object in `failsafe`."""

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

    def caught(self, error: Exception, missing: str) -> None:
        """Reports a failure, or re-raises it if it came from a signal; see `is_interrupt`."""
        if is_interrupt(error):
            raise error
        self.report(error, missing)

    def report(self, error: Exception, missing: str) -> None:
        """Warns about a failure, or only counts it if already reported. Never raises.

        Args:
            error: what was raised. A `UserError` says what to do; anything else is a bug.
            missing: see `failsafe`.
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
        safe = failsafe(missing, self)(_called)
        thread = _Thread(target=safe, name=name, args=(function, *args), daemon=daemon)
        thread.report = functools.partial(self.report, missing=missing)
        return thread


class _Thread(threading.Thread):
    """A thread that may never live: Python 3.12 starts none at exit, a system only so many."""

    report: Callable[[Exception], None]

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            if "shutdown" not in str(error):
                hint = "usually a limit on threads; raise ulimit -u, or the container's pids limit"
                self.report(UserError(f"its thread does not start ({error})", hint=hint))

    def join(self, timeout: float | None = None) -> None:
        if self.ident is not None:
            super().join(timeout)


class Once:
    """Whether a subject comes for the first time, so that each is said once, on any thread.

    A loop that invents new subjects in every step must not fill the memory: after 10,000, none is
    new.

    >>> is_first = Once()
    >>> is_first("loss"), is_first("loss"), is_first("norm"), is_first(), is_first()
    (True, False, True, True, False)
    """

    def __init__(self) -> None:
        self._seen: dict[Any, object] = {}

    def __call__(self, subject: Any = None) -> bool:
        mine = object()
        return len(self._seen) < _MOST_SUBJECTS and self._seen.setdefault(subject, mine) is mine


def _called(function: Callable[..., object], *args: Any) -> None:
    function(*args)


class failsafe:  # noqa: N801  # reads as a decorator, and after `with`
    """Keeps the failures of a method, a function or a block of code from the user's loop.

    ::

        @failsafe("there is no summary")  # reported to the `_boundary` of `self`
        def summary(self): …

        with failsafe("MFU is not known", boundary):
            peaks = find_peaks(…)

    Args:
        missing: what the user then does not get, as a clause: ``MFU of f is not known``. ``{0}``
            stands for the first argument of a decorated function.
        boundary: where failures are reported; that of `self` if a method is decorated.
        passes: exceptions meant for the caller.
        instead: what a decorated function returns after a failure; `ITSELF`: its first argument.
    """

    __slots__ = ("_boundary", "_instead", "_missing", "_passes")

    def __init__(
        self,
        missing: str,
        boundary: Boundary | None = None,
        *,
        passes: tuple[type[Exception], ...] = (),
        instead: Any = None,
    ) -> None:
        self._missing = missing
        self._boundary = boundary
        self._passes = passes
        self._instead = instead

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._passes):
            return False
        if is_interrupt(error):
            return False
        (self._boundary or Boundary()).report(error, self._missing)
        return True

    def __call__(self, function: _Function) -> _Function:
        missing, boundary = self._missing, self._boundary
        passes, instead = self._passes, self._instead

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except passes:
                raise
            except Exception as error:
                where = args[0]._boundary if boundary is None else boundary
                where.caught(error, _clause(missing, args))
                return args[0] if instead is ITSELF else instead

        return wrapper  # type: ignore[return-value]  # the signature is that of `function`


def _clause(missing: str, args: tuple[Any, ...]) -> str:
    with contextlib.suppress(Exception):  # formatting its name may be what fails
        return missing.format(*args)
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


def _line(error: Exception, missing: str) -> str:
    if isinstance(error, UserError):
        return f"{missing}: {error}"
    text = f"{missing}: {type(error).__name__}: {_first_line(error)}"
    trace = error.__traceback__ if isinstance(error, TypeError) else None
    if trace and trace.tb_next is None and trace.tb_frame.f_code.co_filename == __file__:
        return f"{text}\nhint: usually wrong arguments, as the function itself did not begin"
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
