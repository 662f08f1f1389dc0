"""Makes the loop's threads take turns with what they share."""

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


def make_loop_lock(owner: Any) -> None:
    """Sets ``owner.lock``. A forked process gets a new one: the holder does not exist there."""
    owner.lock = threading.RLock()
    _owners.add(owner)


def _after_fork() -> None:
    for owner in _owners:
        owner.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def acquire_loop_lock(lock: threading.RLock, *, is_step: bool = False) -> bool:
    """Waits for the lock held by another thread; False if this thread proceeds without it.

    The holder may be waiting for the step in flight. A callback of that step (``jax.io_callback``)
    that waited for the lock would deadlock; it runs on a thread not started by Python.

    Args:
        lock: the lock shared by the loop's threads.
        is_step: it is for recording a step, which cannot be done while another is recorded.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return lock.acquire()
    has_lock = lock.acquire(timeout=_OF_CALLBACKS_SECONDS)
    if is_step and not has_lock:
        _say_that_it_is_lost()
    return has_lock


@functools.cache
def _say_that_it_is_lost() -> None:
    _log.warning(
        "a step was recorded in a callback of the step that the loop waits for, and may not be "
        "logged; usually an instrumented function is called in jax.debug.callback or io_callback; "
        "call it from the loop"
    )


@contextlib.contextmanager
def holding(lock: threading.RLock) -> Iterator[None]:
    """``with lock``, but see `acquire_loop_lock`. Inlined by hand where every step passes."""
    has_lock = lock.acquire(False) or acquire_loop_lock(lock)
    try:
        yield
    finally:
        if has_lock:
            lock.release()
