"""A job's processes watch each other: if one dies, the others end in order, with one line.

Process 0 has a connection to every other process. The kernel closes the connections of a process
that dies; a machine that dies, or a process that is stopped, falls silent. JAX's own check, even
with a heartbeat timeout of 10 s, ends in an abort with a C++ stack (exit code 134), within
milliseconds if process 0 dies; its callback for that case aborts, too (std::bad_cast, 0.10.2).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

_log = logging.getLogger("mfu_jax")

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


@dataclass(frozen=True, kw_only=True)
class LostProcess:
    """A process that is gone.

    Attributes:
        process: its number.
        why: what was observed.
        exit_code: its own, if it reported an error before it ended; 75 if it died.
    """

    process: int
    why: str
    exit_code: int = PROCESS_LOST_EXIT_CODE


@dataclass(eq=False)
class _Connection:
    """One end of a connection, and what is known about the process at the other end."""

    socket: socket.socket
    process: int | None = None  # unknown until its "hello"
    last_heard: float = 0.0
    has_left: bool = False
    unread: bytes = b""
    lines: list[str] = field(default_factory=list)

    def read(self) -> bool:
        """Reads what has arrived; False at the end of the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *whole, self.unread = (self.unread + data).split(b"\n")
        self.lines += [line.decode(errors="replace") for line in whole]
        return bool(data)

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # reading notices a closed connection
            self.socket.send(line.encode() + b"\n")


class ProcessWatch:
    """The other processes of a job, watched on a daemon thread.

    Args:
        process: number of this process.
        count: processes of the job.
        timeout_seconds: a process silent for longer counts as dead.
        on_loss: called once, on the thread, with the first process lost.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        *,
        process: int,
        count: int,
        timeout_seconds: float,
        on_loss: Callable[[LostProcess], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process, self._count = process, count
        self._timeout_seconds = timeout_seconds
        self._on_loss = on_loss
        self._monotonic = monotonic
        self._connections: list[_Connection] = []
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._token = secrets.token_hex(8)
        self._is_over = False
        self._seen: set[int] = set()
        self._started = monotonic()

    def join(self, store: Store, host: str) -> Self:
        """Connects the processes through process 0 and starts watching.

        Args:
            store: where process 0 publishes its port.
            host: of process 0.

        Raises:
            OSError: process 0 cannot be reached.
        """
        if self._process == 0:
            port = self.listen(local_only=host in ("localhost", "127.0.0.1"))
            store.key_value_set(_KEY, f"{port} {self._token}")
        else:
            milliseconds = int(_LOOK_UP_SECONDS * 1000)
            port_text, self._token = store.blocking_key_value_get(_KEY, milliseconds).split()
            self.connect(host, int(port_text))
        threading.Thread(target=self.watch, name="mfu_jax-processes", daemon=True).start()
        return self

    def listen(self, *, local_only: bool) -> int:
        """Process 0 listens for the others; returns the port."""
        both = not local_only and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("127.0.0.1" if local_only else "", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=self._count,
            dualstack_ipv6=both,
        )
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._started = self._monotonic()
        return int(self._listener.getsockname()[1])

    def connect(self, host: str, port: int) -> None:
        """Another process connects to process 0."""
        connection = self._add(socket.create_connection((host, port), self._timeout_seconds))
        connection.process = 0
        connection.write(f"hello {self._token} {self._process}")

    def leave(self) -> None:
        """Tells the others that this process ends as planned; it keeps watching them."""
        self._tell("bye")

    def fail(self, exit_code: int, why: str) -> None:
        """Tells the others that this process ends with an error."""
        self._tell(f"failed {exit_code} {_one_line(why)}")

    def watch(self) -> None:
        """Watches until a process is lost, then closes the connections."""
        try:
            self._watch()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            if self._listener is not None:
                self._listener.close()
            self._selector.close()

    def _watch(self) -> None:
        tick = self._timeout_seconds / _TICKS_PER_TIMEOUT
        next_beat = self._monotonic()
        while not self._is_over:
            now = self._monotonic()
            if now >= next_beat:
                if now - next_beat > tick:  # this process was suspended and heard nobody
                    for connection in self._connections:
                        connection.last_heard = now
                self._tell("beat")
                self._check_silence(now)
                next_beat = now + tick
            for key, _ in self._selector.select(max(0.0, next_beat - self._monotonic())):
                self._accept() if key.data is None else self._read(key.data)

    def _add(self, end: socket.socket) -> _Connection:
        end.setblocking(False)
        connection = _Connection(end, last_heard=self._monotonic())
        self._connections.append(connection)
        self._selector.register(end, selectors.EVENT_READ, connection)
        return connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            self._add(self._listener.accept()[0])
        except OSError:  # out of file descriptors: select would return the connection at once
            time.sleep(_RETRY_SECONDS)

    def _read(self, connection: _Connection) -> None:
        is_open = connection.read()
        connection.last_heard = self._monotonic()
        for line in connection.lines:
            with contextlib.suppress(ValueError):  # not our protocol
                self._hear(connection, line)
        connection.lines.clear()
        if not is_open:
            self._drop(connection)
            if connection.process is not None and not connection.has_left:
                why = "died: its connection has closed"
                self._lose(LostProcess(process=connection.process, why=why))

    def _hear(self, connection: _Connection, line: str) -> None:
        word, _, rest = line.partition(" ")
        if connection.process is None:
            token, _, process = rest.partition(" ")
            if word == "hello" and token == self._token:
                connection.process = int(process)
                self._seen.add(connection.process)
            else:
                self._drop(connection)  # a stranger
        elif word == "bye":
            connection.has_left = True
        elif word == "failed":
            code, _, why = rest.partition(" ")
            why = f"failed: {why}"
            self._lose(LostProcess(process=connection.process, why=why, exit_code=int(code)))
        elif word == "lost":
            process, code, why = rest.split(" ", 2)
            self._lose(LostProcess(process=int(process), why=why, exit_code=int(code)))

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _check_silence(self, now: float) -> None:
        for connection in self._connections:
            silent_seconds = now - connection.last_heard
            if connection.process is not None and silent_seconds > self._timeout_seconds:
                why = f"is silent for {silent_seconds:.0f} s"
                self._lose(LostProcess(process=connection.process, why=why))
                return
        if self._listener is not None and now - self._started > self._timeout_seconds:
            self._stop_listening()

    def _stop_listening(self) -> None:
        """Called when all have had time to connect."""
        assert self._listener is not None
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        if missing := set(range(1, self._count)) - self._seen:
            _log.warning(
                "process %s cannot connect to process 0 and is not watched: if it dies, JAX ends "
                "the job after minutes\nhint: usually a firewall; open the port between the hosts",
                ", ".join(map(str, sorted(missing))),
            )

    def _lose(self, loss: LostProcess) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._tell(f"lost {loss.process} {loss.exit_code} {_one_line(loss.why)}")
        self._on_loss(loss)

    def _tell(self, line: str) -> None:
        for connection in list(self._connections):
            connection.write(line)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_REASON]
