"""Processes that watch each other, here as threads with sockets."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mfu_jax.trainer.run.process_watch import PROCESS_LOST_EXIT_CODE, LostProcess, ProcessWatch
from tests.support.work import HANG_SECONDS


class Store:
    """JAX's key-value store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._is_set = threading.Event()

    def key_value_set(self, key: str, value: str) -> None:
        self.values[key] = value
        self._is_set.set()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        assert self._is_set.wait(timeout_in_ms / 1000)
        return self.values[key]


_all: list["Process"] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for process in _all:
        process.die()
        wait_until(lambda: process.watch._selector.get_map() is None)  # noqa: B023
    _all.clear()


class Process:
    """One of the job, and the losses that it has seen."""

    def __init__(self, number: int, count: int, store: Store, **options: Any) -> None:
        self.losses: queue.Queue[LostProcess] = queue.Queue()
        options = {"timeout_seconds": HANG_SECONDS, **options}
        self.watch = ProcessWatch(process=number, count=count, on_loss=self.losses.put, **options)
        self.watch.join(store, "localhost")
        _all.append(self)

    def die(self) -> None:
        """A dead process says nothing, and the kernel closes its connections."""
        self.watch._is_over = True
        for connection in list(self.watch._connections):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def loss(self) -> LostProcess:
        return self.losses.get(timeout=HANG_SECONDS)


def job(count: int) -> list[Process]:
    store = Store()
    processes = [Process(number, count, store) for number in range(count)]
    wait_until(lambda: processes[0].watch._seen == set(range(1, count)))
    return processes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_is_told_to_all_others(victim: int) -> None:
    processes = job(3)
    processes[victim].die()
    for number, process in enumerate(processes):
        if number != victim:
            loss = process.loss()
            assert (loss.process, loss.exit_code) == (victim, PROCESS_LOST_EXIT_CODE)
            assert "connection has closed" in loss.why


def test_an_error_is_told_with_its_words_and_exit_code() -> None:
    processes = job(3)
    processes[2].watch.fail(3, "the loss of\nstep 7 is NaN")
    for process in processes[:2]:
        expected = LostProcess(process=2, why="failed: the loss of step 7 is NaN", exit_code=3)
        assert process.loss() == expected


def test_a_process_that_has_finished_may_close_its_connection() -> None:
    processes = job(3)
    processes[1].watch.leave()
    wait_until(lambda: any(c.has_left for c in processes[0].watch._connections))
    processes[1].die()
    wait_until(lambda: len(processes[0].watch._connections) == 1)
    processes[2].die()
    assert processes[0].loss().process == 2


@contextlib.contextmanager
def hub(**options: Any) -> Iterator[tuple[Process, socket.socket]]:
    """Process 0, and a process 1 that says nothing after its hello."""
    store = Store()
    process = Process(0, 2, store, **options)
    (value,) = store.values.values()
    port, token = value.split()
    with socket.create_connection(("127.0.0.1", int(port)), HANG_SECONDS) as silent:
        silent.sendall(f"hello {token} 1\n".encode())
        yield process, silent


def test_a_silent_process_counts_as_dead() -> None:
    with hub(timeout_seconds=0.2) as (process, _):
        loss = process.loss()
    assert loss.process == 1
    assert "silent" in loss.why


def test_a_process_that_was_stopped_itself_accuses_nobody() -> None:
    jump_seconds = 0.0

    def monotonic() -> float:
        return time.monotonic() + jump_seconds

    # A process counts as dead after an hour; this one is stopped for a day.
    with hub(timeout_seconds=3600, monotonic=monotonic) as (process, other):
        wait_until(lambda: process.watch._seen == {1})
        lines = other.makefile()
        for seconds in (86400.0, 720.0):  # the second is a tick
            jump_seconds += seconds
            other.sendall(b"beat\n")  # wakes the thread
            assert lines.readline() == "beat\n"
        lines.close()
        assert process.losses.empty()


def test_strangers_and_noise_end_nothing() -> None:
    with hub() as (process, other):
        with socket.create_connection(other.getpeername(), HANG_SECONDS) as stranger:
            stranger.sendall(b"hello wrong 1\nlost 0 9 by a stranger\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):  # until the other side closes it
                    pass
        other.sendall(b"\xff\xfe\nlost what\nfailed x y\n")
        other.shutdown(socket.SHUT_WR)
        assert "connection has closed" in process.loss().why


def test_a_process_that_cannot_connect_is_said_once_and_not_dead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    process = Process(0, 2, store, timeout_seconds=0.1)
    wait_until(lambda: "process 1 cannot connect" in caplog.text)
    wait_until(lambda: process.watch._listener is None)
    assert process.losses.empty()
