"""A connection that outlives the service behind it."""

import contextlib
import ctypes
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mfu_jax.trainer.run import coordinator_proxy
from tests.support.work import HANG_SECONDS


@pytest.fixture
def service() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def client(service: socket.socket) -> Iterator[socket.socket]:
    """Connected to the service through a proxy."""
    with connected(service.getsockname()) as connection:
        yield connection


@contextlib.contextmanager
def connected(service: tuple[str, int]) -> Iterator[socket.socket]:
    host, _, port = coordinator_proxy.proxied(*service).rpartition(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as connection:
        yield connection
    coordinator_proxy._proxies.pop().communicate()


@pytest.mark.full
def test_bytes_pass_both_ways(service: socket.socket, client: socket.socket) -> None:
    with service.accept()[0] as behind:
        client.sendall(b"question")
        assert behind.recv(8, socket.MSG_WAITALL) == b"question"
        behind.sendall(b"answer")
        assert client.recv(6, socket.MSG_WAITALL) == b"answer"


@pytest.mark.full
def test_the_end_of_the_service_is_silence(service: socket.socket, client: socket.socket) -> None:
    with service.accept()[0] as behind:
        behind.sendall(b"last")
    assert client.recv(4, socket.MSG_WAITALL) == b"last"
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):  # a direct connection would return b"" here
        client.recv(1)


@pytest.mark.full
def test_the_end_of_the_client_reaches_the_service(
    service: socket.socket, client: socket.socket
) -> None:
    with service.accept()[0] as behind:
        client.close()
        behind.settimeout(HANG_SECONDS)
        assert behind.recv(1) == b""


@pytest.mark.full
def test_without_a_service_the_connection_closes_so_that_the_client_tries_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with connected(address) as connection:
        assert connection.recv(1) == b""


@pytest.mark.full
def test_an_answer_passes_while_pythons_lock_is_held(
    service: socket.socket, client: socket.socket
) -> None:
    """JAX's client waits so in C++; a thread of this process could not pass it on."""
    libc = ctypes.PyDLL(None, use_errno=True)  # its calls keep the lock
    answer = "import socket, time; time.sleep(0.2); socket.socket(fileno={}).sendall(b'answer')"
    client.settimeout(None)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
    buffer = ctypes.create_string_buffer(6)
    with service.accept()[0] as behind:
        code, files = answer.format(behind.fileno()), [behind.fileno()]
        with subprocess.Popen([sys.executable, "-c", code], pass_fds=files):
            assert libc.recv(client.fileno(), buffer, 6, socket.MSG_WAITALL) == 6
    assert buffer.raw == b"answer"


@pytest.mark.full
def test_signals_of_a_job_do_not_end_it_and_its_starter_does(service: socket.socket) -> None:
    host, _, port = coordinator_proxy.proxied(*service.getsockname()).rpartition(":")
    process = coordinator_proxy._proxies.pop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
    socket.create_connection((host, int(port)), HANG_SECONDS).close()
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()  # as when this process is killed
    assert process.wait(HANG_SECONDS) == 0
    process.stdout.close()
