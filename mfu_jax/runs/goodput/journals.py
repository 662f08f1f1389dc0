"""Reads the journals of a run's processes; imports neither jax nor numpy.

`mfu_jax.logger.journal.lines` describes their lines.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.logger.journal.lines import VERSION, journal_name
from mfu_jax.storage.addresses import Address, filesystem_of, open_object
from mfu_jax.util.user_files import opened

_EXPECTED = "the journal of a run"
_BACK = "went back"
_MOST_READS = 10


@dataclass(kw_only=True)
class StepBlock:
    """Consecutive steps, in whole µs; see ``steps`` of the format.

    Attributes:
        end_m: when the last step ended, in seconds since boot.
        first: number of the first step.
        by: increment of the step numbers.
        us: time of each step.
        gap_us: time between each step and the previous one; empty: none.
        data_us: the device's wait for data within that gap; empty: none.
        kind: ``step``, ``compile`` or ``warmup``.
        optimal_seconds: of one step at peak, if known.
        executed_seconds: the same for the executed FLOPs.
    """

    end_m: float
    first: int
    by: int = 1
    us: list[int]
    gap_us: list[int] = field(default_factory=list)
    data_us: list[int] = field(default_factory=list)
    kind: str = "step"
    optimal_seconds: float | None = None
    executed_seconds: float | None = None

    @property
    def spent_us(self) -> int:
        """From the end of the step before the block to the end of its last step."""
        return sum(self.us) + sum(self.gap_us)

    @property
    def wait_fraction(self) -> float:
        """The fraction of that time in which the device waited for data."""
        return sum(self.data_us) / self.spent_us if self.spent_us else 0.0

    def ends(self, end: int) -> list[int]:
        """When each step ended, in µs of any clock, if the last one ended at `end`."""
        between = map(operator.add, self.us, self.gap_us) if self.gap_us else self.us
        ends = itertools.accumulate(between, initial=end - self.spent_us)
        return list(itertools.islice(ends, 1, None))

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.first + self.by * (len(self.us) - 1)


@dataclass(kw_only=True)
class JournaledAttempt:
    """One process, as recorded in its journal; times in seconds since its machine booted.

    Attributes:
        process: process number in the job.
        host: name of the machine.
        pid: process id on that machine.
        boot: the same for all attempts on one monotonic clock; empty if unknown.
        offset: wall clock − monotonic clock at its start.
        began: start of the process.
        silence_seconds: average age of its last sign of life at a random moment.
        alive: time of its last sign of life.
        wait_seconds: how long it had waited for data by then, since its last known step.
        how: why it stopped; empty: not recorded.
        blocks: its steps.
        spans: name, begin and end (None: still open) of its pauses.
        compiled: begin and seconds of its compilations.
        restored: the step from which it continued.
        goes_on: not a new process: the one before it went back to an earlier step.
    """

    process: int
    host: str
    pid: int
    boot: str
    offset: float
    began: float
    silence_seconds: float
    alive: float
    wait_seconds: float = 0.0
    how: str = ""
    blocks: list[StepBlock] = field(default_factory=list)
    spans: list[tuple[str, float, float | None]] = field(default_factory=list)
    compiled: list[tuple[float, float]] = field(default_factory=list)
    restored: int | None = None
    goes_on: bool = False

    @property
    def first_step(self) -> int | None:
        """The number of its first completed step."""
        return self.blocks[0].first if self.blocks else None

    @property
    def last_step(self) -> int | None:
        """The number of its last completed step."""
        return self.blocks[-1].last if self.blocks else None


def read_journals(metrics_file: Path | Address) -> tuple[list[JournaledAttempt], list[str]]:
    """All attempts in the journals beside a metrics file, ordered by start; and notes for the user.

    Raises:
        UserError: a journal cannot be read.
    """
    attempts: list[JournaledAttempt] = []
    notes: list[str] = []
    for name, lines in _journals(metrics_file):
        reader = _JournalReader(name)
        reader.read(lines)
        attempts += reader.attempts
        notes += reader.notes
    return sorted(attempts, key=lambda attempt: attempt.offset + attempt.began), notes


def _journals(metrics_file: Path | Address) -> Iterator[tuple[str, Iterable[bytes]]]:
    pattern = journal_name(metrics_file.name, 0).replace(".0.", ".*.")
    if isinstance(metrics_file, Address):
        files, remote = filesystem_of(metrics_file.parent / pattern, "journal")
        for found in sorted(files.glob(remote)):
            address = metrics_file.parent / str(found).rpartition("/")[2]
            with open_object(address) as file:
                yield address.name, file
        return
    for path in sorted(metrics_file.parent.glob(pattern)):
        with opened(path, _EXPECTED) as file:
            yield path.name, lines_at_rest(file)


def lines_at_rest(file: BinaryIO) -> list[bytes]:
    """All lines of a file, read while nothing was being written.

    A live process overwrites its last lines; a read that begins before such a write and ends after
    it joins halves of two lines. If the file never rests, the last read is used.
    """
    for _ in range(_MOST_READS):
        before = os.fstat(file.fileno())
        file.seek(0)
        lines = file.readlines()
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            break
    return lines


class _JournalReader:
    """Parses the lines of one journal."""

    def __init__(self, name: str) -> None:
        self.attempts: list[JournaledAttempt] = []
        self.notes: list[str] = []
        self._name = name
        self._attempt: JournaledAttempt | None = None
        self._early: list[tuple[int, int, float]] = []
        self._broken = 0

    def read(self, lines: Iterable[bytes]) -> None:
        """Adds the lines; a broken line costs only itself."""
        for line in lines:
            if line.isspace():  # left by a killed process
                continue
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
                self._broken += 1
        self._finish()
        if self._broken:
            self.notes.append(f"{self._name}: {self._broken} broken lines were left out")

    def _take(self, values: dict[str, Any]) -> None:
        event = values["e"]
        if event == "start":
            self._finish()
            self._attempt = self._start(values)
        elif self._attempt is not None:
            self._attempt.alive = max(self._attempt.alive, float(values["m"]))
            if (take := getattr(self, f"_on_{event}", None)) is not None:
                take(self._attempt, values)

    def _start(self, values: dict[str, Any]) -> JournaledAttempt | None:
        if values["version"] != VERSION:
            self.notes.append(
                f"{self._name}: a process wrote version {values['version']!r}; this mfu_jax reads "
                f"version {VERSION}; its time counts as down time; read it with the mfu_jax that "
                f"wrote it"
            )
            return None
        return JournaledAttempt(
            process=int(values["process"]),
            host=str(values["host"]),
            pid=int(values["pid"]),
            boot=f"{values['host']} {values['boot']}" if values["boot"] else "",
            offset=float(values["t"]) - float(values["m"]),
            began=float(values["began_m"]),
            silence_seconds=float(values["mark_us"]) / 2e6,
            alive=float(values["m"]),
        )

    def _finish(self) -> None:
        """Called once all lines of the attempt are read."""
        attempt, self._attempt = self._attempt, None
        early, self._early = self._early, []
        if attempt is None:
            return
        attempt.blocks.sort(key=lambda block: block.end_m)
        for number, us, end_m in early:  # a kill during a pause may lose the step's own line
            if attempt.last_step is None or number > attempt.last_step:
                _add_unwritten(attempt, number, end_m - us / 1e6)
                attempt.blocks.append(StepBlock(end_m=end_m, first=number, us=[us]))
        self.attempts.append(attempt)

    def _on_steps(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        us = _whole(values["us"])
        block = StepBlock(
            end_m=float(values["m"]),
            first=int(values["first"]),
            by=max(1, int(values.get("by", 1))),
            us=us,
            gap_us=_whole(values.get("gap_us", [])),
            data_us=_whole(values.get("data_us", [])),
            kind=str(values.get("kind", "step")),
            optimal_seconds=values.get("optimal_s"),
            executed_seconds=values.get("executed_s"),
        )
        if not us or any(part and len(part) != len(us) for part in (block.gap_us, block.data_us)):
            raise ValueError(values)
        attempt.blocks.append(block)

    def _on_span(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        begin = float(values["m"])
        end = begin + values["us"] / 1e6 if "us" in values else None
        attempt.alive = max(attempt.alive, end or begin)
        attempt.spans.append((str(values["name"]), begin, end))
        if "step" in values:
            self._early.append((int(values["step"]), int(values["step_us"]), begin))

    def _on_compile(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        attempt.compiled += [(float(begin), float(us) / 1e6) for begin, us in values["spans"]]

    def _on_alive(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        attempt.wait_seconds = float(values["wait_us"]) / 1e6
        if "silence_us" in values:
            attempt.silence_seconds = float(values["silence_us"]) / 1e6

    def _on_stop(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        attempt.how = str(values["how"])

    def _on_back(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        """Splits the attempt into the steps so far and those to come; the later ones count."""
        if not attempt.blocks:
            return
        now = attempt.alive
        cut = max(block.end_m for block in attempt.blocks)
        rest = dataclasses.replace(
            attempt,
            began=cut,
            alive=now,
            blocks=[],
            spans=[span for span in attempt.spans if span[1] >= cut],
            compiled=[span for span in attempt.compiled if span[0] >= cut],
            restored=int(values["step"]),
            goes_on=True,
        )
        attempt.spans = [span for span in attempt.spans if span[1] < cut]
        attempt.compiled = [span for span in attempt.compiled if span[0] < cut]
        attempt.alive, attempt.how = cut, _BACK
        # A pause records its step at once; "back" is written with the steps, a little later.
        later = [early for early in self._early if early[2] - early[1] / 2e6 > cut]
        self._early = [early for early in self._early if early not in later]
        self._finish()
        self._attempt, self._early = rest, later

    def _on_restored(self, attempt: JournaledAttempt, values: dict[str, Any]) -> None:
        attempt.restored = int(values["step"])


def _add_unwritten(attempt: JournaledAttempt, stop: int, until: float) -> None:
    """Adds equal steps between the last known one and `stop`, for lines that a kill lost.

    Args:
        attempt: of the process.
        stop: number of the next known step.
        until: when that step began, in seconds since boot.
    """
    if not attempt.blocks or attempt.blocks[-1].by > 1:
        return
    before = attempt.blocks[-1]
    count = stop - before.last - 1
    paused = sum(e - b for _, b, e in attempt.spans if e is not None and before.end_m <= b < until)
    left = until - before.end_m - paused
    if count <= 0 or left <= 0:
        return
    waited = min(left * before.wait_fraction, attempt.wait_seconds)
    attempt.wait_seconds -= waited
    us, gap_us = round(1e6 * (left - waited) / count), round(1e6 * waited / count)
    gaps = [gap_us] * count if gap_us else []
    attempt.blocks.append(
        StepBlock(end_m=until, first=before.last + 1, us=[us] * count, gap_us=gaps, data_us=gaps)
    )


def _whole(values: Any) -> list[int]:
    """The list itself, if it holds whole numbers ≥ 0."""
    if type(values) is not list:
        raise TypeError(values)
    found: list[int] = values
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError(found)
    return found
