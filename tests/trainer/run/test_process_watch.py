"""Processes that watch each other, here as threads with sockets."""

import contextlib
import itertools
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
    _all.clear()


class Process:
    """One of the job, and the losses that it has seen."""

    def __init__(self, number: int, store: Store, timeout_seconds: float = HANG_SECONDS) -> None:
        self.losses: queue.Queue[LostProcess] = queue.Queue()
        self.watch = ProcessWatch(
            process=number, timeout_seconds=timeout_seconds, on_loss=self.losses.put
        )
        self.watch.join(store, "localhost")
        _all.append(self)

    def die(self) -> None:
        """A dead process says nothing, and the kernel closes its connections."""
        self.watch._first_loss.acquire(blocking=False)
        for connection in list(self.watch._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def loss(self) -> LostProcess:
        return self.losses.get(timeout=HANG_SECONDS)


def job(count: int) -> list[Process]:
    store = Store()
    processes = [Process(number, store) for number in range(count)]
    wait_until(lambda: processes[0].watch._connections.keys() == set(range(1, count)))
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
    processes[1].die()
    wait_until(lambda: processes[0].watch._connections[1].fileno() < 0)
    processes[2].die()
    assert processes[0].loss().process == 2


@contextlib.contextmanager
def hub(timeout_seconds: float = HANG_SECONDS) -> Iterator[tuple[Process, socket.socket]]:
    """Process 0, and a process 1 that says nothing after its number."""
    store = Store()
    process = Process(0, store, timeout_seconds)
    (value,) = store.values.values()
    port, token = value.split()
    with socket.create_connection(("127.0.0.1", int(port)), HANG_SECONDS) as silent:
        silent.sendall(f"{token} 1\n".encode())
        yield process, silent


def test_a_silent_process_counts_as_dead() -> None:
    with hub(timeout_seconds=0.2) as (process, _):
        loss = process.loss()
    assert loss.process == 1
    assert "silent" in loss.why


class Stopped:
    """A connection of a process that is stopped, each time for longer than the timeout."""

    def __init__(self, stops: int, between: int) -> None:
        self._calls = itertools.cycle([*[TimeoutError] * stops, *[b"beat\n"] * between])
        self._left = 100

    def recv(self, size: int) -> bytes:
        self._left -= 1
        found = next(self._calls) if self._left else b""
        if isinstance(found, bytes):
            return found
        raise found


def test_a_process_that_was_stopped_itself_accuses_nobody() -> None:
    """However long it was stopped, its wait for the others has timed out once."""
    watch = ProcessWatch(process=0, timeout_seconds=3600, on_loss=lambda loss: None)
    lines: Any = watch._lines(Stopped(stops=1, between=1))  # type: ignore[arg-type]
    assert {*lines} == {"beat"}
    with pytest.raises(TimeoutError):
        list(watch._lines(Stopped(stops=5, between=1)))  # type: ignore[arg-type]


def test_strangers_end_nothing() -> None:
    with hub() as (process, other):
        with socket.create_connection(other.getpeername(), HANG_SECONDS) as stranger:
            stranger.sendall(b"wrong 1\nlost 0 9 by a stranger\n")
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):  # until the other side closes it
                    pass
        other.sendall(b"\xff\xfe\n")
        other.shutdown(socket.SHUT_WR)
        assert "connection has closed" in process.loss().why


def test_a_process_that_does_not_connect_is_not_dead() -> None:
    store = Store()
    process = Process(0, store, timeout_seconds=0.1)
    port = int(store.values["mfu_jax/processes"].split()[0])
    wait_until(lambda: is_closed(port))
    assert process.losses.empty()


def is_closed(port: int) -> bool:
    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) != 0
