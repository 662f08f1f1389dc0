"""One writer at a time, between processes and within one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mfu_jax.errors import UserError
from mfu_jax.storage import locks
from mfu_jax.storage.locks import FileLock
from tests.support.work import HANG_SECONDS

HOLDER = """
import os, sys
from pathlib import Path
from mfu_jax.storage.locks import FileLock
lock = FileLock(Path(sys.argv[1]), "run folder 'x'")
if "fork" in sys.argv:
    ready, written = os.pipe()
    if os.fork() == 0:  # a data loader's worker, which outlives its parent
        os.write(written, b"x")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path, *how: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.full
def test_a_second_process_is_refused_with_the_first_ones_number(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_elsewhere(path) as process:
        expected = rf"run folder 'x' is in use by process {process.pid} on {os.uname().nodename};"
        with pytest.raises(UserError, match=expected):
            FileLock(path, "run folder 'x'")
    with FileLock(path, "x"):  # it ended
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert not path.exists()


@pytest.mark.full
@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_killed_holder_frees_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "lock"
    with held_elsewhere(path, how) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_SECONDS)
        lock = FileLock(path, "x")
        assert lock.is_sole
        lock.release()
    assert not path.exists()


def test_the_same_process_takes_over_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lock"
    first = FileLock(path, "metrics_file 'm'")
    second = FileLock(path, "metrics_file 'm'")
    (warning,) = caplog.messages
    assert "metrics_file 'm' is still open in this process" in warning
    assert (first.is_superseded, second.is_superseded) == (True, False)
    first.release()
    assert path.exists()
    second.release()
    assert not path.exists()


@pytest.mark.full
def test_a_deleted_lock_is_taken_again_unless_another_process_has_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path, "x")
    path.unlink()
    lock.renew()
    assert path.exists()
    path.unlink()
    with held_elsewhere(path) as process, pytest.raises(BlockingIOError, match=str(process.pid)):
        lock.renew()
    lock.release()


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), None])
def test_where_there_are_no_locks_it_warns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: OSError | None,
) -> None:
    class Without:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(*_: object) -> None:
            assert error is not None
            raise error

    monkeypatch.setattr(locks, "fcntl", error and Without)
    with FileLock(tmp_path / "lock", "metrics_file 'm'") as lock:
        assert not lock.is_sole
    (warning,) = caplog.messages
    reason = "No locks available" if error else "this system has no file locks"
    assert re.search(rf"metrics_file 'm' cannot be locked \({reason}\)", warning)


def test_a_descriptor_that_somebody_closed_stops_no_release(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", "the file")
    os.close(lock._descriptor)  # type: ignore[arg-type]
    lock.release()
    with FileLock(tmp_path / "lock", "the file") as again:
        assert again.is_sole
