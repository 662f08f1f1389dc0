"""One JSON object per step in a text file that survives a kill and a resume."""

from __future__ import annotations

import itertools
import json
import math
import os
from array import array
from collections.abc import Iterator, MutableSequence, Sequence
from pathlib import Path

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RECORD_FIELDS, RecordError, StepRecord, as_json
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.base import Sink, register_sink
from mfu_jax.logger.sinks.last_pass import in_last_pass
from mfu_jax.logger.sinks.names import UniqueNames
from mfu_jax.storage.files import AppendOnlyFile, replace_file, set_aside, unwritable
from mfu_jax.storage.targets import file_target

_ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps would make one per line
_PLAIN_NUMBERS = frozenset((int, float))  # their `repr` is JSON, if they are finite


@register_sink("jsonl")
class JsonlSink(Sink):
    """Appends ``{"step": 7, "kind": "step", …}`` for every step, each in one write.

    A killed run loses at most the line it was writing. A resumed run drops that torn line and every
    step that it will run again or that the loop went back over, so the file has each step once.
    NaN and Inf, which JSON lacks, are written as the strings ``"NaN"``, ``"Infinity"``,
    ``"-Infinity"``. The totals of the whole run go to ``<path>.summary.json``, so that every line
    is a step; the set-up is in the run log beside it (`mfu_jax.logger.run_log.events`).

    Args:
        path: the file, or its address in an object store (``gs://…``); folders are created.
        resume_from_step: first step that this run will write. Steps from there on are dropped from
            the file; if 0, an existing file is renamed to ``<path>.previous1``.
        fsync_seconds: seconds of data that a power cut may lose; see `AppendOnlyFile`.

    Raises:
        UserError: the path cannot be written, holds something that is not a metrics file, or
            another process writes to it.
    """

    keeps_every_step = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_from_step: int = 0,
        fsync_seconds: float = -1.0,
    ) -> None:
        self._target = file_target(path, "metrics_file", keep=resume_from_step > 0)
        self.path = self._target.path
        self.made_by = ("jsonl", {"path": self._target.place})
        self.fsync_seconds = fsync_seconds
        self._names = UniqueNames("metrics_file", reserved=RECORD_FIELDS)
        self._form: tuple[tuple[str, ...], list[str]] = (), []
        with self._target.opening():
            try:
                warnings, self.missing = _prepare(self.path, resume_from_step)
            except OSError as error:
                raise unwritable(path, "metrics_file", error) from error
            self._file = AppendOnlyFile(
                self.path, "metrics_file", lock=self._target.lock, fsync_seconds=fsync_seconds
            )
        self.warnings = [*self._target.warnings, *warnings]

    def write_many(self, records: Sequence[StepRecord]) -> None:
        self._file.append(b"".join(map(self._line, records)))
        self._target.wrote()

    def write_summary(self, summary: Summary) -> None:
        path = self.path.with_name(f"{self.path.name}.summary.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [f"{json.dumps(summary.to_json(), indent=2)}\n".encode()])

    def flush(self) -> None:
        self._file.sync()
        self._target.flush()

    def close(self) -> None:
        self._file.close()
        self._target.close()

    def _line(self, record: StepRecord) -> bytes:
        row = (record.step, record.unix_seconds, *record.scalars.values())
        try:
            if (
                _PLAIN_NUMBERS.issuperset(map(type, row))
                and all(map(math.isfinite, row))
                and not (record.flags or record.notes)
            ):
                return self._filled(record, row).encode()
            return _ENCODER.encode(as_json(record, self._names.of)).encode() + b"\n"
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordError(f"step {record.step} cannot be JSON: {error}") from error

    def _filled(self, record: StepRecord, row: Sequence[float]) -> str:
        """The line of a plain record, which usually differs from the last one only in numbers."""
        key = (record.kind, *record.scalars)
        if key != self._form[0]:
            kind = f', "kind": {_ENCODER.encode(record.kind)}, "unix_seconds": '
            names = self._names.of(record.scalars)
            heads = ['{"step": ', kind, *(f", {_ENCODER.encode(name)}: " for name in names)]
            self._form = key, [part for head in heads for part in (head, "")]
        parts = self._form[1].copy()
        parts[1::2] = map(repr, row)
        return "".join(parts) + "}\n"


def _prepare(path: Path, resume_from_step: int) -> tuple[list[str], range]:
    """Makes the file end just before `resume_from_step`.

    Returns:
        Warnings for a human, and the steps missing between the file's last and that one.
    """
    if not path.exists() or path.stat().st_size == 0:
        return [], range(0)
    if resume_from_step == 0:
        return [set_aside(path)], range(0)
    steps, broken = array("q"), array("q")
    replace_file(path, _lines_before(path, resume_from_step, steps, broken))
    marks = in_last_pass(steps)
    if not all(marks):
        with open(path, "rb") as file:
            replace_file(path, itertools.compress(file, marks))
    warnings = []
    if len(broken) > 1:
        warnings.append(f"metrics_file {path}: {len(broken)} broken lines were dropped")
    return warnings, range(steps[-1] + 1, resume_from_step) if steps else range(0)


def _lines_before(
    path: Path, stop: int, steps: MutableSequence[int], broken: MutableSequence[int]
) -> Iterator[bytes]:
    """The lines of steps before `stop`; appends their numbers, and indices of broken lines."""
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                step = int(json.loads(line)["step"]) if line.endswith(b"\n") else None
            except (ValueError, TypeError, KeyError):
                step = None
                if number == 0:
                    raise UserError(
                        f"metrics_file {str(path)!r} does not start with a step's JSON object; "
                        f"expected the file of the run that is resumed; usually another file's "
                        f"path; give another metrics_file or move this one away"
                    ) from None
            if step is None:
                broken.append(number)
            elif 0 <= step < stop:
                steps.append(step)
                yield line
