"""The environment of child processes that run a module of this package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_ABOVE_PACKAGE = Path(__file__).parents[2]
_POLL_SECONDS = 0.5


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, with this package first on the child's path.

    Args:
        **variables: what the child gets beside or instead of its parent's variables.
    """
    paths = [str(_ABOVE_PACKAGE), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_logged(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
    *,
    output: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> int | None:
    """Runs a command, whose output goes to files, and ends it with all that it started.

    Args:
        command: what to run.
        environment: its variables.
        log: for what it says.
        seconds: wall-clock limit.
        output: for its stdout, if that is not in the log.
        is_over: asked twice a second; True ends the command.

    Returns:
        Its exit code; None: it was ended.
    """
    ends = time.monotonic() + seconds
    with (
        log.open("ab") as errors,
        (output or log).open("ab") as said,
        subprocess.Popen(
            command, env=dict(environment), stdout=said, stderr=errors, start_new_session=True
        ) as child,
    ):
        try:
            while (left := ends - time.monotonic()) > 0 and not is_over():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(min(left, _POLL_SECONDS))
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """What a process said last; empty if it said nothing."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
