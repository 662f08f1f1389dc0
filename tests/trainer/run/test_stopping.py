"""Signals that stop a run."""

import os
import signal
import subprocess
import sys

import pytest

from mfu_jax.trainer.run.stopping import STOP_SIGNALS, StopRequest
from tests.support.paths import ROOT
from tests.support.work import HANG_SECONDS


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_asks_to_stop_with_its_exit_code(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert not stop.agreed(1)
        os.kill(os.getpid(), signum)
        assert stop.agreed(2)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.exit_code == 128 + signum
    assert signal.getsignal(signum) == before
    assert StopRequest().exit_code == 0


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed(1)
    finally:
        signal.signal(signal.SIGHUP, before)


# A billion rounds take minutes, in which Python calls no signal handler.
STUCK = """
import hashlib
from mfu_jax.trainer.run.stopping import StopRequest
with StopRequest():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.full
def test_a_second_sigint_ends_at_once_even_if_the_main_thread_is_stuck() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert "a second one ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_SECONDS) == 130
        assert len(process.stderr.readlines()) == 1
