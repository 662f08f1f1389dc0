"""Runs a compiling child process: its progress, its time limits, its end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
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
    code, begin, scheduled = None, time.monotonic(), math.inf
    with (
        tempfile.TemporaryFile("w+b") as log,
        tempfile.NamedTemporaryFile("w") as out,
        open(out.name, encoding="utf-8") as said,
        subprocess.Popen(
            command, env=dict(environment), stdout=out, stderr=log, start_new_session=True
        ) as child,
    ):
        try:
            while time.monotonic() < min(begin + seconds, scheduled + code_seconds):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(_POLL_SECONDS)
                for line in said:
                    if line.strip() in _STAGES:
                        progress(line.strip())
                if code is not None:
                    break
                if scheduled == math.inf and is_scheduled(dumps):
                    progress("machine code")
                    scheduled = time.monotonic()
        finally:
            with contextlib.suppress(ProcessLookupError):  # its descendants, too
                os.killpg(child.pid, signal.SIGKILL)
        log.seek(0)
        return code, log.read().decode("utf-8", "replace")
