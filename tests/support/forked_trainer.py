"""Trainers that start with their imports done: forked, each, from a process that has imported them.

They are what `python -m mfu_jax.train` becomes after seconds of imports, which most of the time of
a tiny run is: a process of its own with its own device, signals, exit handlers and exit code.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any
from unittest import mock

from tests.support.paths import ROOT

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["mfu_jax.trainer.loop", "orbax.checkpoint", "grain"])


class ForkedTrainer:
    """One process; of `subprocess.Popen`, with text pipes, what tests of trainers use.

    JAX reads some of its environment when it is imported: that of the first one, for all.

    Args:
        arguments: of `mfu-jax train`.
        environment: of the process.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
        ends = [end for _, end in pipes]
        self._process: ForkServerProcess = _CONTEXT.Process(
            target=_train, args=(list(arguments), dict(environment), *ends), daemon=True
        )
        with mock.patch.dict(os.environ, environment):
            self._process.start()
        for end in ends:
            end.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(mine.fileno()), encoding="utf-8") for mine, _ in pipes
        )

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it hangs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked trainer", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All that it writes, from now to its end."""
        texts = ["", ""]

        def read(number: int, stream: Any) -> None:
            with stream:
                texts[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=pair, daemon=True)
            for pair in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        finally:
            self.kill()
            for reader in readers:
                reader.join()
        return texts[0], texts[1]


def _train(
    arguments: list[str], environment: dict[str, str], output: Connection, errors: Connection
) -> None:
    """The process: as the interpreter runs a module, and as it ends."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, end in ((1, output), (2, errors)):
        os.dup2(end.fileno(), number)
        end.close()
    from mfu_jax import train

    code = train.main(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
