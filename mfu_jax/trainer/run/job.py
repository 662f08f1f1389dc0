"""The processes of one training run: joined, watched, and ended together."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.records.non_finite import NonFiniteLossError
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.run.coordinator_proxy import proxied
from mfu_jax.trainer.run.process_watch import PROCESS_LOST_EXIT_CODE, LostProcess, ProcessWatch
from mfu_jax.util.jax_internals import coordination_store

_log = logging.getLogger("mfu_jax")

_JAX_TIMEOUT_SECONDS = 100  # its default
_FLUSH_SECONDS = 5.0
# A process that dies is noticed within milliseconds; a failed collective is often the first sign.
_VERDICT_SECONDS = 2.0


class Job:
    """This process within the job; alone, it does nothing.

    If another process dies or ends with an error, a daemon thread writes out the metrics, prints
    one line and ends this process: its main thread may never return from a collective.
    """

    def __init__(self) -> None:
        self._watched: ProcessWatch | None = None
        self._advice = "; run the same command again"
        self._flush: Callable[[], object] = _nothing
        self._loss = threading.Event()
        self._is_ending = threading.Event()

    def join(self, config: Config) -> None:
        """Joins the job's processes, if the config says that there are several.

        Raises:
            UserError: the coordinator's address is malformed, or no cluster is found.
        """
        if config.enable_checkpointing:
            self._advice += " to resume"
        if not _initialize(config):
            return
        if jax.process_count() > 1 and config.heartbeat_timeout_seconds:
            try:
                self._watched = self._watch(config)
            except Exception as error:
                _log.warning(
                    "the job's other processes are not watched (%s); if one dies, JAX ends this "
                    "one after minutes\nhint: usually a firewall; open the ports between the hosts",
                    error,
                )

    def _watch(self, config: Config) -> ProcessWatch:
        store, address = coordination_store()
        watch = ProcessWatch(
            process=jax.process_index(),
            timeout_seconds=config.heartbeat_timeout_seconds,
            on_loss=self._end,
        )
        host, _ = _split(config.coordinator_address or address)
        return watch.join(store, host)

    @contextlib.contextmanager
    def flushing(self, flush: Callable[[], object]) -> Iterator[None]:
        """In this context, the loss of a process first calls `flush`; errors `await_verdict`."""
        self._flush = flush
        try:
            yield
        except Exception as error:
            self.await_verdict(error)
            raise
        finally:
            self._flush = _nothing

    def await_verdict(self, error: Exception) -> None:
        """Returns if `error` is this process's own; ends the process if the error follows from the
        death of another, which shows up here as a failing collective."""
        is_own = isinstance(error, UserError | NonFiniteLossError)
        if self._watched is not None and not is_own and self._loss.wait(_VERDICT_SECONDS):
            threading.Event().wait()  # the watching thread ends the process

    def leave(self) -> None:
        """Tells the others that this process has finished its work."""
        if self._watched is not None:
            self._watched.leave()

    def fail(self, exit_code: int, why: str) -> int:
        """Ends this process in a job of several, which JAX's shutdown would wait for.

        Returns:
            `exit_code`, if it is alone.
        """
        if self._watched is not None:
            self._is_ending.set()
            self._watched.fail(exit_code, why)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
        return exit_code

    def _end(self, loss: LostProcess) -> None:
        """Ends this process; runs on the watching thread."""
        self._loss.set()
        if loss.exit_code != PROCESS_LOST_EXIT_CODE and self._is_ending.wait(_VERDICT_SECONDS):
            return  # this process has the same error and reports it itself
        writing = threading.Thread(target=self._write_out, daemon=True)
        writing.start()
        writing.join(_FLUSH_SECONDS)
        died = loss.exit_code == PROCESS_LOST_EXIT_CODE
        line = (
            f"mfu_jax.train: process {loss.process} of {jax.process_count()} {loss.why}; process "
            f"{jax.process_index()} ends with exit code {loss.exit_code}"
            f"{self._advice if died else ''}\n"
        )
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), line.encode())
        os._exit(loss.exit_code)

    def _write_out(self) -> None:
        with contextlib.suppress(Exception):
            self._flush()
        with contextlib.suppress(Exception):
            sys.stdout.flush()


def _nothing() -> None:
    """The default flush: metrics are written, or there are none yet."""


def _initialize(config: Config) -> bool:
    """Starts JAX's distributed service; False if there is only one process."""
    timeout = max(_JAX_TIMEOUT_SECONDS, 2 * config.heartbeat_timeout_seconds)
    if config.coordinator_address:
        host, port = _split(config.coordinator_address)
        address = config.coordinator_address
        if config.process_id and config.heartbeat_timeout_seconds:
            address = proxied(host, port)
        jax.distributed.initialize(
            address, config.num_processes, config.process_id, heartbeat_timeout_seconds=timeout
        )
        return True
    if not config.distributed:
        return False
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=timeout)
    except ValueError as error:  # no cluster that JAX recognises
        raise UserError(
            f"distributed=true finds no cluster ({error}) of TPUs, SLURM or MPI",
            hint="pass coordinator_address=host:port num_processes=… process_id=…, or leave it out",
        ) from None
    return True


def _split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"coordinator_address={address!r}: expected host:port of process 0, for example "
            f"10.0.0.1:1234"
        )
    return host.strip("[]"), int(port)
