"""How the processes of a job exchange a line of text, off the device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from pathlib import Path
from typing import Protocol

import jax

from mfu_jax.logger.config import LoggerConfig
from mfu_jax.storage.files import replace_file
from mfu_jax.util.jax_internals import KeyValueStore, coordination_store

_log = logging.getLogger("mfu_jax")


class Exchange(Protocol):
    """A place where each process leaves its latest line, and any process can read all."""

    def put(self, process: int, text: str) -> None:
        """Replaces the line of a process."""

    def get_all(self) -> list[str]:
        """The latest line of each process that left one."""


class StoreExchange:
    """The key-value store of JAX's distributed service, which lives in process 0.

    Args:
        store: the store.
        name: of the logger, identical in each process.
    """

    def __init__(self, store: KeyValueStore, name: str) -> None:
        self._store = store
        self._folder = f"mfu_jax/hosts/{name}"

    def put(self, process: int, text: str) -> None:
        self._store.key_value_set(f"{self._folder}/{process}", text, allow_overwrite=True)

    def get_all(self) -> list[str]:
        return [text for _, text in self._store.key_value_dir_get(self._folder)]


class FolderExchange:
    """Files in a folder that all hosts share, such as the metrics folder.

    Args:
        folder: the shared folder, created on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, process: int, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / f"{process}.json", [f"{text}\n".encode()])

    def get_all(self) -> list[str]:
        texts = []
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError):  # being replaced
                texts.append(path.read_text(encoding="utf-8"))
        return texts


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessPlace:
    """This process's place among those of the job.

    Attributes:
        process: its number.
        count: number of processes.
        exchange: where they write their lines.
        compares_cpu: the CPU is the device.
    """

    process: int
    count: int
    exchange: Exchange
    compares_cpu: bool


_numbers = itertools.count()


def place_of(config: LoggerConfig) -> ProcessPlace | None:
    """This process's place in its job, from JAX; None if alone or without a way to exchange."""
    count, process = jax.process_count(), jax.process_index()
    number = next(_numbers)  # of this logger; every process makes its loggers in the same order
    if count < 2:
        return None
    store, _ = coordination_store()
    exchange: Exchange
    if store is not None:
        exchange = StoreExchange(store, str(number))
    elif config.hosts_folder:
        exchange = FolderExchange(Path(config.hosts_folder))
    else:
        if process == 0:
            _log.warning(
                "slow and missing hosts are not named: the %d processes have no store; expected "
                "jax.distributed.initialize(), or a metrics_file in a folder that they share",
                count,
            )
        return None
    return ProcessPlace(process, count, exchange, jax.default_backend() == "cpu")
