"""Failures of ours become one line each, and hold nothing alive."""

from __future__ import annotations

import functools
import gc
import logging
import re
import signal
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfu_jax
from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import StepRecord
from mfu_jax.util.failsafe import ITSELF, Boundary, failsafe
from tests.support.sinks import ListSink


def divide(value: float) -> float:
    return value / 0


class Observer:
    name = "train_step"

    def __init__(self) -> None:
        self._boundary = Boundary()

    @failsafe("MFU of {0.name} is not known", passes=(UserError,), instead=-1)
    def look(self, error: BaseException | None = None) -> int:
        """Doc."""
        if error is not None:
            raise error
        return 1


def test_a_failure_is_one_line_with_a_file_of_details(caplog: pytest.LogCaptureFixture) -> None:
    boundary = Boundary()
    results = [failsafe("MFU is not known", boundary, instead="?")(divide)(n) for n in (1.0, 2.0)]
    assert results == ["?", "?"]
    (line,) = caplog.messages
    match = re.fullmatch(
        r"MFU is not known: ZeroDivisionError: float division by zero; the run goes on without "
        r"it; please report this, details in (.+\.txt)",
        line,
    )
    assert match
    details = Path(match[1])
    assert "in divide" in details.read_text()
    details.unlink()
    assert boundary.failures == 2


def test_what_the_user_can_fix_needs_no_report(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    observer._boundary.report(UserError("no peak; pass one"), "MFU is not known")
    assert caplog.messages == ["MFU is not known: no peak; pass one"]


def test_a_call_with_wrong_arguments_needs_no_report(caplog: pytest.LogCaptureFixture) -> None:
    assert Observer().look(1, 2, 3) == -1  # type: ignore[call-arg]
    (line,) = caplog.messages
    assert line.endswith("\nhint: usually wrong arguments, as the function itself did not begin")
    assert "report this" in _of_a_type_error_within(caplog)


def _of_a_type_error_within(caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    Observer().look(TypeError("x"))
    return caplog.messages[0]


def test_other_places_and_types_are_other_failures(caplog: pytest.LogCaptureFixture) -> None:
    boundary = Boundary()
    for function in (divide, float, float):
        with failsafe("x", boundary):
            function("text")
    assert len(caplog.messages) == 2


def test_without_a_folder_for_details_the_line_says_where(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with failsafe("MFU is not known"):
        divide(1.0)
    assert re.search(r"details in .*test_failsafe\.py:\d+ in divide$", caplog.text.strip())


def test_a_failsafe_method_returns_something_else_or_passes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observer = Observer()
    assert observer.look() == 1
    assert observer.look(KeyError("x")) == -1
    assert caplog.messages[0].startswith("MFU of train_step is not known: KeyError")
    for error in (UserError("wrong"), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            observer.look(error)
    assert observer.look.__doc__ == "Doc."


def test_a_block_goes_on_behind_it_and_a_scope_that_fails_is_entered_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scope(Observer):
        @failsafe("{0.name} is not logged", instead=ITSELF)
        def __enter__(self) -> Scope:
            raise KeyError

        def __exit__(self, *error: object) -> None: ...

    scope = Scope()
    with scope as entered, failsafe("x is not known", scope._boundary, passes=(UserError,)):
        assert entered is scope
        divide(1.0)
    with pytest.raises(UserError), failsafe("x", passes=(UserError,)):
        raise UserError("wrong")
    assert [line.split(":")[0] for line in caplog.messages] == [
        "train_step is not logged",
        "x is not known",
    ]


@pytest.mark.parametrize(
    ("why", "said"),
    [("can't start new thread", 1), ("can't create new thread at interpreter shutdown", 0)],
)
def test_a_thread_that_cannot_start_is_said_but_at_exit_and_joined_at_once(
    why: str, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = Boundary().thread("mfu_jax test", "nothing is watched", print)
    thread.start()
    thread.join()
    assert not thread.is_alive()
    assert [line.partition(" (")[0] for line in caplog.messages] == [
        "nothing is watched: its thread does not start"
    ] * said
    assert caplog.text.count("ulimit -u") == said


class PreemptedError(RuntimeError):
    """What a handler of the user's raises to end her loop."""


class _Handlers:
    def method(self, number: int, frame: Any) -> None:
        raise PreemptedError

    def __call__(self, *_: Any) -> None:
        raise PreemptedError


def _preempt() -> None:
    raise PreemptedError


def _once(number: int, frame: Any) -> None:
    """The second signal ends the process."""
    signal.signal(number, signal.SIG_DFL)
    raise PreemptedError


@pytest.mark.parametrize(
    "handler",
    [
        _Handlers().method,
        _Handlers(),
        functools.partial(_Handlers.method, _Handlers()),
        lambda *_: _preempt(),
        _once,
    ],
    ids=["method", "instance", "partial", "lambda", "handler that resets itself"],
)
def test_what_a_signal_handler_raises_is_meant_for_the_loop(
    handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.signal(signal.SIGUSR2, handler)

    class Waiting:
        _boundary = Boundary()

        @failsafe("a step is not logged")
        def wait(self) -> None:
            signal.raise_signal(signal.SIGUSR2)

    try:
        with pytest.raises(PreemptedError):
            Waiting().wait()
        signal.signal(signal.SIGUSR2, handler)
        with pytest.raises(PreemptedError), failsafe("x"):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not caplog.messages


def test_nothing_of_a_failure_stays_alive() -> None:
    class Big: ...

    def fail(value: Any) -> None:
        raise ValueError(value)

    boundary, big = Boundary(), Big()
    reference = weakref.ref(big)
    gc.disable()
    try:
        with failsafe("x", boundary):
            fail(big)
        del big
        assert reference() is None
    finally:
        gc.enable()


def test_reporting_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise TypeError

    def fail() -> None:
        raise UnprintableError

    assert failsafe("x", Boundary(), instead=3)(fail)() == 3
    monkeypatch.setattr(logging.Logger, "warning", lambda *_: 1 / 0)
    assert failsafe("x", Boundary(), instead=3)(divide)(1.0) == 3


class _Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the user's handler")


class _Broken(ListSink):
    def write(self, record: StepRecord) -> None:
        raise OSError("no disk")


def test_a_log_handler_that_raises_costs_its_line_only(capfd: pytest.CaptureFixture[str]) -> None:
    handler, memory = _Raising(), ListSink()
    logger = mfu_jax.MetricLogger(sinks=[_Broken(), memory], warmup_steps=0)
    log = logging.getLogger("mfu_jax")
    log.addHandler(handler)
    try:
        for step in range(4):
            logger.record(step, {"loss": float("nan"), "image": np.ones(99)})
        begin = time.monotonic()
        summary = logger.close()
    finally:
        log.removeHandler(handler)
    assert time.monotonic() - begin < 5
    assert [record.step for record in memory.records] == [0, 1, 2, 3]
    assert summary.steps == 4
    assert "the user's handler" in capfd.readouterr().err
