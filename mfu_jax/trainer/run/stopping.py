"""Signals that ask a run to stop: it finishes the current step and saves a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Self

import jax

from mfu_jax.util.jax_internals import reached_preemption_sync_point

# SLURM announces the end of a job with the signal of `--signal=USR1@120`.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_EXIT_CODE_OF_SIGNALS = 128
INTERRUPT_EXIT_CODE = _EXIT_CODE_OF_SIGNALS + signal.SIGINT


class StopRequest:
    """Records SIGTERM, SIGINT, SIGHUP and SIGUSR1, so that the loop can stop after the current step
    with its state saved. A second SIGINT ends the process at once.

    The processes of a job must all stop at the same step, which JAX's preemption service finds;
    asking all processes at every step would cost a collective. The service knows only SIGTERM, so
    the other signals are forwarded as SIGTERM. An ignored signal (``nohup``) stays ignored.

    Attributes:
        signal: the signal received; SIGTERM if only another process of the job received one.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._ends = contextlib.ExitStack()

    @property
    def exit_code(self) -> int:
        """128 + the signal number, as in shells; 0 without a signal."""
        return _EXIT_CODE_OF_SIGNALS + self.signal if self.signal else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            several = jax.process_count() > 1
            for signum in STOP_SIGNALS:
                if signal.getsignal(signum) == signal.SIG_IGN:
                    continue
                if signum == signal.SIGTERM and several:
                    continue  # JAX handles it
                previous = signal.signal(signum, self._note)
                self._ends.callback(signal.signal, signum, previous)
            self._ends.enter_context(_ended_by_a_second_interrupt())
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(signum)
            if jax.process_count() > 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, step: int) -> bool:
        """Whether to stop after `step`; the same answer in all processes."""
        if jax.process_count() == 1:
            return self.signal is not None
        agreed = reached_preemption_sync_point(step)
        if agreed and self.signal is None:
            self.signal = signal.SIGTERM
        return agreed


@contextlib.contextmanager
def _ended_by_a_second_interrupt() -> Iterator[None]:
    """In this context, the second SIGINT ends the process, even while XLA has the main thread.

    Python calls signal handlers between bytecodes of the main thread; a compilation or a
    collective that hangs never gets there. The wakeup socket is written at once.
    """
    received, written = socket.socketpair()
    written.setblocking(False)
    previous = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(received,), name="mfu_jax-signals", daemon=True)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        written.close()  # ends the thread
        watch.join()
        received.close()


def _watch(received: socket.socket) -> None:
    has_interrupt = False
    while signum := received.recv(1):
        if signum[0] != signal.SIGINT:
            continue
        if has_interrupt:
            _say("second SIGINT: ended without a checkpoint of the step under way")
            os._exit(INTERRUPT_EXIT_CODE)
        has_interrupt = True
        _say("SIGINT: stopping after the step under way; a second one ends at once")


def _say(text: str) -> None:
    os.write(sys.stderr.fileno(), f"mfu_jax.train: {text}\n".encode())
