"""One JSON object per step in a text file that survives a kill and a resume."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Sequence

from mfu_jax.errors import UserError
from mfu_jax.logger.records.step_record import RECORD_FIELDS, RecordError, StepRecord, as_json
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.append_only import BROKEN, AppendOnlySink, cut_back
from mfu_jax.logger.sinks.base import UniqueNames, register_sink
from mfu_jax.storage.files import replace_file

_log = logging.getLogger("mfu_jax")
_ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps would make one per line
_PLAIN_NUMBERS = frozenset((int, float))  # their `repr` is JSON, if they are finite


@register_sink("jsonl")
class JsonlSink(AppendOnlySink):
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
    setting = "metrics_file"

    def _prepare(self, resume_from_step: int) -> None:
        self.metrics_file = self._target.place
        self._names = UniqueNames(self.setting, reserved=RECORD_FIELDS)
        self._form: tuple[tuple[str, ...], str] = (), ""
        if self.path.exists():
            self._refuse_other_files()
        super()._prepare(resume_from_step)

    def _refuse_other_files(self) -> None:
        with open(self.path, "rb") as lines:
            head = lines.readline()
        if head.endswith(b"\n") and _step_of(head) == BROKEN:
            raise UserError(
                f"metrics_file {str(self.path)!r} does not start with a step's JSON object; "
                "expected the file of a run, or none yet",
                hint="usually another file's path; give another metrics_file or move this one away",
            )

    def _resume(self, step: int) -> None:
        self.missing, broken = cut_back(self.path, _step_of, step)
        if broken > 1:
            _log.warning("metrics_file %s: %d broken lines were dropped", self.path, broken)

    def write_many(self, records: Sequence[StepRecord]) -> None:
        self._append(b"".join(map(self._line, records)))

    def write_summary(self, summary: Summary) -> None:
        if self._is_superseded:  # the name is that of the later logger's totals
            return
        path = self.path.with_name(f"{self.path.name}.summary.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [f"{json.dumps(summary.to_json(), indent=2)}\n".encode()])

    def _line(self, record: StepRecord) -> bytes:
        row = (record.step, record.unix_seconds, *record.scalars.values())
        try:
            is_plain = _PLAIN_NUMBERS.issuperset(map(type, row)) and math.isfinite(sum(row))
            if is_plain and not (record.flags or record.notes):
                return self._filled(record, row).encode()
            return _ENCODER.encode(as_json(record, self._names.of)).encode() + b"\n"
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordError(f"step {record.step} cannot be JSON: {error}") from error

    def _filled(self, record: StepRecord, row: tuple[float, ...]) -> str:
        """The line of a plain record, which usually differs from the last one only in numbers."""
        key = (record.kind, *record.scalars)
        if key != self._form[0]:
            words = record.kind, "unix_seconds", *self._names.of(record.scalars)
            kind, *names = (_ENCODER.encode(word).replace("%", "%%") for word in words)
            cells = "".join(f", {name}: %r" for name in names)
            self._form = key, f'{{"step": %r, "kind": {kind}{cells}}}\n'
        return self._form[1] % row


def _step_of(line: bytes) -> int:
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
        step = int(json.loads(line)["step"])
        if line.endswith(b"\n") and 0 <= step < BROKEN:
            return step
    return BROKEN
