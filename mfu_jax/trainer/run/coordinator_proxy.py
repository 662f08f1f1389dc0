"""A worker's connection to JAX's coordination service that hides the service's death.

The service lives in process 0. When that process dies, JAX's client in every other process prints
a C++ stack and aborts within milliseconds. Behind the proxy, the client sees a connection that is
silent, and `mfu_jax.trainer.run.process_watch` has time to end the run in order.

The proxy is its own process: JAX's client waits for answers while holding the GIL (while the
processes agree on the step after which a SIGTERM stops them), so no thread here could forward
them. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 10.0


class CoordinatorProxy:
    """Forwards connections to a port of this machine to another address.

    Args:
        host: of the coordination service.
        port: of the coordination service.

    Attributes:
        address: ``host:port`` to connect to.
    """

    def __init__(self, host: str, port: int) -> None:
        # Without site-packages, it starts in a few milliseconds.
        command = [sys.executable, "-I", "-S", __file__, host, str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"

    def close(self) -> None:
        """Ends the proxy before this process ends."""
        self._process.communicate()


# Until this process ends: JAX's client stays connected to the end.
_KEPT: list[CoordinatorProxy] = []


def proxied(host: str, port: int) -> str:
    """The address of a proxy of the coordination service that lasts as long as this process."""
    _KEPT.append(CoordinatorProxy(host, port))
    return _KEPT[-1].address


class _Connections:
    """The connections in the proxy's process, on daemon threads."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        _daemon(self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                _daemon(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        try:
            service = socket.create_connection(self._target, timeout=_CONNECT_SECONDS)
        except OSError:
            client.close()  # the client retries
            return
        service.settimeout(None)
        for end in (client, service):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _daemon(_copy, service, client)
        _copy(client, service)
        for end in (client, service):  # close() alone waits for the thread reading it
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies until `source` ends. `target` stays open: that is what hides a dead service."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)


def _daemon(target: object, *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name="mfu_jax-proxy", daemon=True).start()  # type: ignore[arg-type]


def _serve(host: str, port: int) -> None:
    """Serves until standard input ends, which happens when the process at its other end does."""
    # A scheduler sends a job's signals to all of its processes.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    print(_Connections(host, port).port, flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
