"""The loop's threads take turns at what they share."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("mfu_jax")

_OF_CALLBACKS_SECONDS = 0.1
_owners = weakref.WeakSet[Any]()


def give_lock(owner: Any) -> None:
    """Sets ``owner.lock``. A forked process gets another: who has this one is not in it."""
    owner.lock = threading.RLock()
    _owners.add(owner)


def _after_fork() -> None:
    for owner in _owners:
        owner.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def wait_for_turn(lock: threading.RLock, *, is_step: bool = False) -> bool:
    """Takes the lock that another thread has; False if this thread goes on without it.

    Who has it may wait for the step in flight. A callback of that step (``jax.io_callback``) that
    waited for the lock would wait for ever; it runs on a thread that Python has not started.

    Args:
        lock: of the loop's threads.
        is_step: to record a step, which has no place while another one is recorded.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return lock.acquire()
    has_turn = lock.acquire(timeout=_OF_CALLBACKS_SECONDS)
    if is_step and not has_turn:
        _say_that_it_is_lost()
    return has_turn


@functools.cache
def _say_that_it_is_lost() -> None:
    _log.warning(
        "a step was recorded in a callback of the step that the loop waits for, and may not be "
        "logged; usually an instrumented function is called in jax.debug.callback or io_callback; "
        "call it from the loop"
    )


@contextlib.contextmanager
def turn(lock: threading.RLock) -> Iterator[None]:
    """``with lock``, but see `wait_for_turn`. Where each step passes, the same is written out."""
    has_turn = lock.acquire(False) or wait_for_turn(lock)
    try:
        yield
    finally:
        if has_turn:
            lock.release()
