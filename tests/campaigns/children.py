"""Child processes of the fault matrix: forked after the imports, so that a run starts at once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

FAILED_EXIT_CODE = 70  # an exception left the child's function
_POLL_SECONDS = 0.002


@dataclasses.dataclass
class Child:
    """One forked process.

    Attributes:
        pid: its number.
        output: file for what it prints, standard output and standard error together.
    """

    pid: int
    output: Path
    _status: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, seconds: float) -> int | None:
        """Waits for the end; None on time-out."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._status

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until `condition` holds; False if the child ends or the time runs out first."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def kill(self) -> None:
        """Sends SIGKILL, and waits for the end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(30.0)

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def fork(
    function: Callable[[], int | None], output: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Runs `function` in a forked process; its return value is the exit code.

    The caller must not have used a JAX device before: a forked backend does not work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, output)
    code = FAILED_EXIT_CODE
    with contextlib.suppress(BaseException):
        os.environ.update(environment or {})
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), line_buffering=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), line_buffering=True)
        try:
            code = function() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
