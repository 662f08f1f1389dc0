"""Runs a compiling child process: its progress, its time limits, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from mfu_jax.planning.compilation.scheduled_text import is_scheduled

_STAGES = ("tracing", "compiling", "writing")  # progress that a child prints
_POLL_SECONDS = 0.5


def run_watched(
    command: list[str],
    environment: Mapping[str, str],
    *,
    seconds: float,
    code_seconds: float,
    dumps: Path,
    progress: Callable[[str], None],
) -> tuple[int | None, str]:
    """Runs a command to its end, or until it has taken too long.

    Args:
        command: what to run.
        environment: its environment variables.
        seconds: wall-clock limit.
        code_seconds: wall-clock limit for machine code, from when the program is scheduled.
        dumps: the folder to which XLA dumps.
        progress: called with a word for each stage.

    Returns:
        The exit code (None: out of time), and what it wrote to stderr.
    """
    expired, ended = threading.Event(), threading.Event()
    with (
        tempfile.TemporaryFile("w+b") as log,
        subprocess.Popen(
            command,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as child,
    ):

        def end() -> None:
            expired.set()
            _kill(child)

        def wait_for_code() -> None:
            while not is_scheduled(dumps):
                if ended.wait(_POLL_SECONDS):
                    return
            progress("machine code")
            if not ended.wait(code_seconds):
                end()

        timer = threading.Timer(seconds, end)
        timer.start()
        watch = threading.Thread(target=wait_for_code, daemon=True)
        watch.start()
        try:
            for line in child.stdout or ():
                if line.strip() in _STAGES:
                    progress(line.strip())
            code = child.wait()
        finally:
            timer.cancel()
            ended.set()
            _kill(child)
            watch.join()
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
    return (None if expired.is_set() else code), text


def _kill(child: subprocess.Popen[str]) -> None:
    """Kills the child and its descendants, which would keep its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
