"""A connection that outlives the service behind it."""

import socket
from collections.abc import Iterator

import pytest

from mfu_jax.trainer.relay import Relay
from tests.support.work import HANG_SECONDS


@pytest.fixture
def service() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def client(service: socket.socket) -> Iterator[socket.socket]:
    """Connected to the service through a relay."""
    host, _, port = Relay(*service.getsockname()).address.rpartition(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as connection:
        yield connection


def test_bytes_pass_both_ways(service: socket.socket, client: socket.socket) -> None:
    with service.accept()[0] as behind:
        client.sendall(b"question")
        assert behind.recv(8, socket.MSG_WAITALL) == b"question"
        behind.sendall(b"answer")
        assert client.recv(6, socket.MSG_WAITALL) == b"answer"


def test_the_end_of_the_service_is_silence(service: socket.socket, client: socket.socket) -> None:
    with service.accept()[0] as behind:
        behind.sendall(b"last")
    assert client.recv(4, socket.MSG_WAITALL) == b"last"
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):  # a direct connection would return b"" here
        client.recv(1)


def test_the_end_of_the_client_reaches_the_service(
    service: socket.socket, client: socket.socket
) -> None:
    with service.accept()[0] as behind:
        client.close()
        behind.settimeout(HANG_SECONDS)
        assert behind.recv(1) == b""


def test_without_a_service_the_connection_closes_so_that_the_client_tries_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    host, _, port = Relay(*address).address.rpartition(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as connection:
        assert connection.recv(1) == b""
