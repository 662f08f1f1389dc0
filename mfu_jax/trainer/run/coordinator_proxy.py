"""A worker's connection to JAX's coordination service that hides the service's death.

The service lives in process 0. When that process dies, JAX's client in every other process prints
a C++ stack and aborts within milliseconds. Behind the proxy, the client sees a connection that is
silent, and `mfu_jax.trainer.run.process_watch` has time to end the run in order.

The proxy is its own process: JAX's client waits for answers while holding the GIL (while the
processes agree on the step after which a SIGTERM stops them), so no thread here could forward
them. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 10.0

# Until this process ends: JAX's client stays connected to the end.
_proxies: list[subprocess.Popen[bytes]] = []


def proxied(host: str, port: int) -> str:
    """Starts a proxy of the coordination service, for as long as this process.

    Returns:
        The ``host:port`` to connect to.
    """
    command = [sys.executable, "-I", "-S", __file__, host, str(port)]  # no site-packages: sooner
    proxy = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    _proxies.append(proxy)
    assert proxy.stdout is not None
    return f"127.0.0.1:{int(proxy.stdout.readline())}"


async def _serve(host: str, port: int) -> None:
    """Serves until standard input ends, which happens when the process at its other end does."""

    async def forward(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                service, to_service = await asyncio.open_connection(host, port)
        except OSError:
            to_client.close()  # the client retries
            return
        answers = asyncio.create_task(_copy(service, to_client))
        await _copy(client, to_service)
        answers.cancel()
        to_service.close()
        to_client.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    os._exit(0)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copies until `source` ends. `target` stays open: that is what hides a dead service."""
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            target.write(data)
            await target.drain()


if __name__ == "__main__":
    # A scheduler sends a job's signals to all of its processes.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
