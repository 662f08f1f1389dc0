"""What was planned and measured, one JSON object a line, so that a search can go on later."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.storage.files import AppendOnlyFile, local_path

_SCHEMA = 1
_WHAT = "the evidence"
By = Literal["plan", "run"]
Source = Literal["planned", "measured", "failed"]
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|MemoryError|bad_alloc")
_LONGEST_NOTE = 500


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan, or one run of a few steps. Unknown numbers are None.

    Attributes:
        values: what is searched → its value or choice as text.
        by: how it was tried.
        source: where the numbers come from.
        fits: whether it fits.
        memory_peak_bytes: per device.
        step_time_seconds: of one step.
        tokens_per_sec_per_chip: at that time.
        mfu: at that time.
        pareto: Pareto-optimal: no other point that fits needs less memory and is faster.
        note: why it failed.
        settings: key → value as text: what identifies the point, whatever its labels.
        wall_seconds: what it took.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    by: By
    source: Source
    fits: bool | None = None
    memory_peak_bytes: int | None = None
    step_time_seconds: float | None = None
    tokens_per_sec_per_chip: float | None = None
    mfu: float | None = None
    pareto: bool = False
    note: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    wall_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The values as ``key=value``."""
        return " ".join(f"{key}={text}" for key, text in self.values.items())

    @property
    def is_ok(self) -> bool:
        """Whether it fits and has a time."""
        return bool(self.fits and self.step_time_seconds)


def unmeasured(note: str) -> Trial:
    """A run that ended early, in its last words: out of memory is an answer, too."""
    is_memory = OUT_OF_MEMORY.search(note) is not None
    return Trial(
        by="run",
        source="measured" if is_memory else "failed",
        fits=False if is_memory else None,
        note=note[:_LONGEST_NOTE],
    )


class TrialLog:
    """An append-only file of trials of one search.

    Args:
        path: the file; None: nothing is kept.
        about: what all its trials have in common: the model, the devices, versions.

    Attributes:
        trials: those of earlier commands, and those added since.
        notes: what of the file was cut or could not be read.

    Raises:
        UserError: it is about something else, another process writes it, or it is not writable.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self._file: AppendOnlyFile | None = None
        if path is None:
            return
        path = local_path(path, _WHAT)
        header = json.dumps({"schema": _SCHEMA, "about": dict(about)}, sort_keys=True) + "\n"
        self._file = AppendOnlyFile(path, _WHAT, header=header.encode(), fsync_seconds=0.0)
        try:
            whole = self._checked(path, header.encode())
        except UserError:
            self._file.close()
            raise
        first, end, rest = whole.partition(b"\n")
        self._file.cut_torn_line()
        *lines, torn = rest.split(b"\n")
        if torn or (first and not end):
            self.notes.append(f"{path}: its last line was cut short, and is removed")
        for number, line in enumerate(lines, 2):
            try:
                self.trials.append(Trial(**json.loads(line)))
            except (ValueError, TypeError):
                self.notes.append(f"{path}: line {number} is damaged and ignored")

    def _checked(self, path: Path, header: bytes) -> bytes:
        """The file's bytes, once it is known to be this search's alone."""
        if self._file is None or not self._file.is_alone():
            raise UserError(
                f"{path} is being written by another mfu-jax tune; expected one at a time",
                hint="wait, or pass another evidence=FILE",
            )
        whole = path.read_bytes()
        first, end, _ = whole.partition(b"\n")
        if not header.startswith(first + end):
            raise UserError(
                f"{path} is not the evidence of this search, but about other settings, devices or "
                "versions, or no evidence at all",
                hint="pass another evidence=FILE, or delete it",
            )
        return whole

    def add(self, trial: Trial) -> None:
        """Appends a trial.

        Raises:
            UserError: it cannot be written.
        """
        self.trials.append(trial)
        if self._file is None:
            return
        try:
            self._file.append((json.dumps(dataclasses.asdict(trial)) + "\n").encode())
        except OSError as error:
            raise UserError(
                f"the evidence cannot be written: {error}",
                hint="usually a full disk; free some space and repeat the command, which goes on",
            ) from error

    def close(self) -> None:
        """Closes the file, for another command to go on."""
        if self._file is not None:
            self._file.close()


def speed(trial: Trial) -> float:
    """Tokens per second, or steps per second if the tokens are not known."""
    if trial.tokens_per_sec_per_chip:
        return trial.tokens_per_sec_per_chip
    return 1 / trial.step_time_seconds if trial.step_time_seconds else 0.0
