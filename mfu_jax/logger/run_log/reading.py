"""Reads a run log's files back: for a follower that is behind, and for ``mfu-jax replay``."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfu_jax.logger.records.step_record import StepRecord, record_of
from mfu_jax.logger.run_log import events
from mfu_jax.storage.addresses import Address

_LONGEST_LINE = 1 << 20


class LoggedRecords:
    """The records of a metrics file in its order, while it may still grow.

    Args:
        path: the file.
        log_period: see `LoggerConfig`.
        after: a record of the file, or a step; reading begins after its last line. None: reading
            begins at the first line.
    """

    def __init__(
        self, path: Path, log_period: int, *, after: StepRecord | int | None = None
    ) -> None:
        self._path = path
        self._log_period = log_period
        self._after = after
        self._offset: int | None = None

    def read(self, most: int) -> list[StepRecord]:
        """The next records, `most` of them at most; none at the end of the file."""
        if self._offset is None:
            self._offset = 0 if self._after is None else self._place()
        lines = list(itertools.islice(self._lines(self._offset), most))
        found = [record_of(values, self._log_period) for _, values in lines]
        if lines:  # only now: after an error, the same records come again
            self._offset = lines[-1][0]
        return found

    def _place(self) -> int:
        """Where the line after `after` begins."""
        after, exact, near = self._after, None, 0
        for end, values in self._lines(0):
            step, t = values["step"], values["unix_seconds"]
            if isinstance(after, StepRecord):
                exact = end if (step, t) == (after.step, after.unix_seconds) else exact
                near = end if t <= after.unix_seconds else near
            elif after is not None and step <= after:
                near = end
        return near if exact is None else exact

    def _lines(self, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Where each whole line ends, and what it says; lines that are no steps are left out."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(offset)
            for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    values = json.loads(line)
                    if isinstance(values["step"], int) and values["unix_seconds"] is not None:
                        yield offset, values


def steps_behind(metrics_file: Path | Address, index: int) -> dict[str, int]:
    """Which sinks were behind when the last process ended, and the last step that each has.

    Args:
        metrics_file: of the run; nothing is known of one in an object store.
        index: number of the process in the job.
    """
    found: dict[str, int] = {}
    if isinstance(metrics_file, Address):
        return found
    path = metrics_file.with_name(events.events_name(metrics_file.name, index))
    for values in read_events(path, events.BEHIND, events.CAUGHT_UP):
        if values["e"] == events.BEHIND:
            found[values["sink"]] = values["step"]
        else:
            found.pop(values["sink"], None)
    return found


def read_events(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The events of these kinds in an events file, in order; none if there is no such file."""
    heads = tuple(f'{{"e":"{kind}"'.encode() for kind in kinds)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(heads) and line.endswith(b"\n"):
                with contextlib.suppress(ValueError, RecursionError):
                    yield json.loads(line)
