"""The environment of child processes that run a module of this package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_ABOVE_PACKAGE = Path(__file__).parents[2]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment, with this package first on the child's path.

    Args:
        **variables: what the child gets beside or instead of its parent's variables.
    """
    paths = [str(_ABOVE_PACKAGE), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_logged(
    command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> int | None:
    """Runs a command, whose output goes to a file, and ends it with all that it started.

    Args:
        command: what to run.
        environment: its variables.
        log: for what it says.
        seconds: wall-clock limit.

    Returns:
        Its exit code; None: it took too long.
    """
    with (
        log.open("ab") as stream,
        subprocess.Popen(
            command, env=dict(environment), stdout=stream, stderr=stream, start_new_session=True
        ) as child,
    ):
        try:
            return child.wait(seconds if seconds < 1e9 else None)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """What a process said last; empty if it said nothing."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
