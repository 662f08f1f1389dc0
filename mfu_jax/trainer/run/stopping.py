"""Signals that ask a run to stop: it finishes the current step and saves a checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, Self

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
        self._previous: dict[signal.Signals, Any] = {}
        self._interrupts: _SecondInterrupt | None = None

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
                self._previous[signum] = signal.signal(signum, self._note)
            self._interrupts = _SecondInterrupt()
        return self

    def __exit__(self, *_: object) -> None:
        if self._interrupts is not None:
            self._interrupts.close()
            self._interrupts = None
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

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


class _SecondInterrupt:
    """Ends the process at the second SIGINT, even while the main thread is inside XLA.

    Python calls signal handlers between bytecodes of the main thread; a compilation or a
    collective that hangs never gets there. The wakeup socket is written at once.
    """

    def __init__(self) -> None:
        self._received, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="mfu_jax-signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        interrupts = 0
        while received := self._received.recv(1):
            if received[0] != signal.SIGINT:
                continue
            interrupts += 1
            if interrupts == 1:
                _say("SIGINT: stopping after the step under way; a second one ends at once")
            else:
                _say("second SIGINT: ended without a checkpoint of the step under way")
                os._exit(INTERRUPT_EXIT_CODE)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous)
        self._written.close()  # ends the thread
        self._thread.join()
        self._received.close()


def _say(text: str) -> None:
    os.write(sys.stderr.fileno(), f"mfu_jax.train: {text}\n".encode())
