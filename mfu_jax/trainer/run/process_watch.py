"""A job's processes watch each other: if one dies, the others end in order, with one line.

Process 0 has a connection to every other process. The kernel closes the connections of a process
that dies; a machine that dies, or a process that is stopped, falls silent. JAX's own check, even
with a heartbeat timeout of 10 s, ends in an abort with a C++ stack (exit code 134), within
milliseconds if process 0 dies, also with ``jax_enable_recoverability``; its callback for that case
aborts, too (std::bad_cast, 0.10.2).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, Self

PROCESS_LOST_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes the run
_KEY = "mfu_jax/processes"
_TICKS_PER_TIMEOUT = 5
_LOOK_UP_SECONDS = 60.0
_RETRY_SECONDS = 0.1
_LONGEST_REASON = 300


class Store(Protocol):
    """The part of JAX's key-value store that is used here."""

    def key_value_set(self, key: str, value: str) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class LostProcess(NamedTuple):
    """A process that is gone.

    Attributes:
        process: its number.
        why: what was observed.
        exit_code: its own, if it reported an error before it ended; 75 if it died.
    """

    process: int
    why: str
    exit_code: int = PROCESS_LOST_EXIT_CODE


class ProcessWatch:
    """The other processes of a job, watched on daemon threads: one for each connection.

    Args:
        process: number of this process.
        timeout_seconds: a process silent for longer counts as dead.
        on_loss: called once, on one of the threads, with the first process lost.
    """

    def __init__(
        self,
        *,
        process: int,
        timeout_seconds: float,
        on_loss: Callable[[LostProcess], None],
    ) -> None:
        self._process = process
        self._timeout_seconds = timeout_seconds
        self._tick_seconds = timeout_seconds / _TICKS_PER_TIMEOUT
        self._on_loss = on_loss
        self._connections: dict[int, socket.socket] = {}
        self._token = secrets.token_hex(8)
        self._first_loss = threading.Lock()

    def join(self, store: Store, host: str) -> Self:
        """Connects the processes through process 0 and starts watching.

        Args:
            store: where process 0 publishes its port.
            host: of process 0.

        Raises:
            OSError: process 0 cannot be reached.
        """
        if self._process == 0:
            listener = _listener(local_only=host in ("localhost", "127.0.0.1"))
            store.key_value_set(_KEY, f"{listener.getsockname()[1]} {self._token}")
            _daemon(self._accept, listener)
        else:
            milliseconds = int(_LOOK_UP_SECONDS * 1000)
            port, token = store.blocking_key_value_get(_KEY, milliseconds).split()
            end = socket.create_connection((host, int(port)), self._timeout_seconds)
            end.sendall(f"{token} {self._process}\n".encode())
            self._connections[0] = end
            _daemon(self._follow, end, 0)
        _daemon(self._beat)
        return self

    def leave(self) -> None:
        """Tells the others that this process ends as planned; it keeps watching them."""
        self._tell("bye")

    def fail(self, exit_code: int, why: str) -> None:
        """Tells the others that this process ends with an error."""
        self._tell_loss(LostProcess(self._process, f"failed: {why}", exit_code))

    def _accept(self, listener: socket.socket) -> None:
        """Process 0 lets the others connect for as long as it would wait for a silent one."""
        ends = time.monotonic() + self._timeout_seconds
        with listener:
            while (left := ends - time.monotonic()) > 0:
                listener.settimeout(left)
                try:
                    _daemon(self._follow, listener.accept()[0])
                except OSError:  # nobody came; or file descriptors are used up
                    time.sleep(_RETRY_SECONDS)

    def _follow(self, end: socket.socket, process: int | None = None) -> None:
        """Watches the process at the other end; None: its first line says which one it is."""
        end.settimeout(self._tick_seconds)
        has_left, why = False, "died: its connection has closed"
        with end:
            try:
                for line in self._lines(end):
                    word, _, rest = line.partition(" ")
                    if process is None:
                        if word != self._token:
                            return  # a stranger
                        process = int(rest)
                        self._connections[process] = end
                    elif word == "bye":
                        has_left = True
                    elif word == "lost":
                        number, code, said = rest.split(" ", 2)
                        self._lose(LostProcess(int(number), said, int(code)))
            except TimeoutError:
                has_left, why = False, f"is silent for {self._timeout_seconds:.0f} s"
            if process is not None and not has_left:
                self._lose(LostProcess(process, why))

    def _lines(self, end: socket.socket) -> Iterator[str]:
        """What the other end says, until the connection is closed.

        Raises:
            TimeoutError: it is silent. Ticks are counted, as this process may be stopped itself for
                longer, and be back before the others.
        """
        silent_ticks, unread = 0, b""
        while silent_ticks < _TICKS_PER_TIMEOUT:
            try:
                data = end.recv(1 << 16)
            except TimeoutError:
                silent_ticks += 1
                continue
            except OSError:
                return
            if not data:
                return
            silent_ticks = 0
            *whole, unread = (unread + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        raise TimeoutError

    def _beat(self) -> None:
        while not self._first_loss.locked():
            self._tell("beat")
            time.sleep(self._tick_seconds)

    def _lose(self, loss: LostProcess) -> None:
        if self._first_loss.acquire(blocking=False):
            self._tell_loss(loss)
            self._on_loss(loss)

    def _tell_loss(self, loss: LostProcess) -> None:
        why = " ".join(loss.why.split())[:_LONGEST_REASON]
        self._tell(f"lost {loss.process} {loss.exit_code} {why}")

    def _tell(self, line: str) -> None:
        for end in list(self._connections.values()):
            with contextlib.suppress(OSError):  # reading notices a closed connection
                end.sendall(line.encode() + b"\n")


def _listener(*, local_only: bool) -> socket.socket:
    both = not local_only and socket.has_dualstack_ipv6()
    return socket.create_server(
        ("127.0.0.1" if local_only else "", 0),
        family=socket.AF_INET6 if both else socket.AF_INET,
        dualstack_ipv6=both,
    )


def _daemon(watch: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=watch, args=arguments, name="mfu_jax-processes", daemon=True).start()
