"""Follows a run's files: new records and events since the last look, restarts and rotation."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import StepRecord, record_of
from mfu_jax.logger.run_log.events import HOSTS, START, STOP, events_name
from mfu_jax.runs.metrics.lines import object_of
from mfu_jax.runs.metrics.run_files import metrics_file_of, read_beside
from mfu_jax.runs.report.setup import Setup, read_setup
from mfu_jax.storage.addresses import Address, path_of

# Steps kept for the frame, and how much of a long file is read for them.
KEPT_STEPS = 512
_KEPT_NOTES = 50
_TAIL_BYTES = 4_000_000
_HOSTS, _START, _STOP = (f'{{"e":"{kind}",'.encode() for kind in (HOSTS, START, STOP))


def local_metrics_file(run: str | Path, *, may_come: bool = False) -> Path:
    """The metrics file of a run, given by its folder or by the file itself.

    Args:
        run: the folder or the file.
        may_come: whether the file of an existing folder, without runs in it, may come later.

    Raises:
        UserError: there is none, or it is in an object store.
    """
    place = path_of(run)
    if isinstance(place, Address):
        raise UserError(
            f"{str(run)!r} is in an object store; expected a file or folder of this machine, "
            "or mounted on it",
            hint="mount it, or run mfu-jax watch where the run writes",
        )
    is_empty = place.is_dir() and not [*place.glob("*.jsonl"), *place.glob("*/metrics.jsonl")]
    if may_come and is_empty:
        return place / "metrics.jsonl"
    found = metrics_file_of(place)
    if isinstance(found, Path) and found.is_file():
        return found
    raise UserError(
        f"{str(run)!r} has no metrics file; expected metrics.jsonl in it, or the file that "
        "metrics_file names",
        hint="usually another folder; pass the folder of the run",
    )


class GrowingFile:
    """A file of lines that is appended to, and may be replaced or truncated.

    Args:
        path: the file; only its last part is read at first.

    Attributes:
        replaced: how often another file was found in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = 0
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._torn = b""

    @property
    def is_known(self) -> bool:
        """Whether there was such a file."""
        return self._identity is not None

    def new_lines(self) -> list[bytes]:
        """The lines since the last call; none if there is no file for now.

        Raises:
            OSError: it cannot be read.
        """
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = status.st_dev, status.st_ino
                if identity != self._identity or status.st_size < self._offset:
                    self.replaced += self._identity is not None
                    self._identity, self._torn = identity, b""
                    self._offset = max(0, status.st_size - _TAIL_BYTES)
                file.seek(self._offset)
                data = file.read(status.st_size - self._offset)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._torn = (self._torn + data).split(b"\n")
        return lines


class MetricsTail:
    """The last steps of a growing metrics file.

    A file that is replaced or truncated, as by a resuming run, is read anew.

    Args:
        path: the file.

    Attributes:
        path: the file.
        steps: the last `KEPT_STEPS` of them.
        notes: the last notes, with their steps.
        restarts: how often the run was seen to go back, or its file to be replaced.
        hosts: the last exchange of the job's processes; empty for a single process.
        profile: the ``profile/…`` numbers of the last profiled steps.
        has_ended: the run's log says so, and no process came after it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_ended = False
        self.steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self.notes: deque[tuple[int, str]] = deque(maxlen=_KEPT_NOTES)
        self.restarts = 0
        self.hosts: Mapping[str, Any] = {}
        self.profile: Mapping[str, float] = {}
        self._setup: Setup | None = None
        self._records = GrowingFile(path)
        self._events = GrowingFile(path.with_name(events_name(path.name, 0)))

    def update(self) -> bool:
        """Reads new records and events; returns whether there were records.

        Raises:
            OSError: a file cannot be read.
        """
        for line in self._events.new_lines():
            if line.startswith(_HOSTS):
                self.hosts = object_of(line) or self.hosts
            elif line.startswith((_START, _STOP)):
                self.has_ended = line.startswith(_STOP)
        if not self._events.is_known:  # of version 0.1.0
            self.hosts = read_beside(str(self.path), HOSTS)
        replaced = self._records.replaced
        lines = self._records.new_lines()
        if self._records.replaced > replaced:
            self.restarts += 1
            self.steps.clear()
        for step in filter(None, map(_step_of, lines)):
            self._add(step)
        return bool(lines)

    @property
    def setup(self) -> Setup:
        """The run's set-up, read once it has a step."""
        if self._setup is None:
            self._setup = read_setup(str(self.path))
        return self._setup

    def heartbeat(self) -> Mapping[str, Any]:
        """The heartbeat in the run's folder; empty if there is none."""
        return self._beside("heartbeat.json")

    def seconds_by_use(self) -> Mapping[str, float]:
        """Of the whole process, by its summary; empty before it ends."""
        return self._beside(f"{self.path.name}.summary.json").get("seconds_by_use") or {}

    def _beside(self, name: str) -> Mapping[str, Any]:
        try:
            return object_of(self.path.with_name(name).read_bytes())
        except OSError:
            return {}

    def _add(self, step: StepRecord) -> None:
        if self.steps and step.step <= self.steps[-1].step:
            self.restarts += 1
            while self.steps and self.steps[-1].step >= step.step:
                self.steps.pop()  # they are being redone
        self.steps.append(step)
        profile = {name: n for name, n in step.scalars.items() if name.startswith("profile/")}
        self.profile = profile or self.profile
        for note in step.notes:
            if (step.step, note) not in self.notes:
                self.notes.append((step.step, note))


def _step_of(line: bytes) -> StepRecord | None:
    """The record of a line, its time NaN if it does not say; None if it is torn, or not a step."""
    try:
        values = json.loads(line)
        known = {name: n for name, n in values.items() if not isinstance(n, bool | None)}
        stamp = float(known.get("unix_seconds", math.nan))
        return record_of({**known, "step": int(known["step"]), "unix_seconds": stamp})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
