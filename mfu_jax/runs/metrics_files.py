"""Reads back the metrics of a run: our JSONL, MaxText's ``metrics_file``, a log, or others' JSONL.

Imports neither jax nor numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.errors import UserError
from mfu_jax.logger.summary import StepStatistics, Summary
from mfu_jax.runs.foreign_metrics import ForeignLines
from mfu_jax.runs.metrics_lines import (
    NAMES,
    TIME,
    are_sane,
    foreign_step,
    form_of,
    is_special,
    object_of,
    profile_of,
    read_line,
    words_of,
)
from mfu_jax.runs.record_templates import Templates
from mfu_jax.runs.step_table import Change, LoggedStep, Segment, StepTable
from mfu_jax.storage.addresses import Address, open_object, path_of
from mfu_jax.user_files import line_blocks, opened, text_lines, unreadable

# MaxText's seconds are the time between two dispatches, which equals a step's time only once its
# queue is full: in a real run of ten-millisecond steps the third one took "0.001".
WARMUP_STEPS = 3
_MOST_NOTES = 10_000
_EXPECTED = (
    "a metrics file or a log; usually a wrong path or a folder; pass the file that metrics_file "
    "named, or - and pipe it in"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsRun:
    """All training steps of a file.

    Attributes:
        path: the file.
        form: ``jsonl`` (ours), ``maxtext`` (its metrics_file), ``log``, ``levanter`` or
            ``torchtitan``.
        steps: in the file's order.
        other_records: records without a step time: MaxText writes evaluations among the steps.
        repeated: lines skipped because they repeat the step before, as the logs of all hosts do.
        unreadable: lines that look like a record but are broken; a killed run leaves one.
        notes: step → what its record says in words, of the last steps that have any.
        last_record: the last record that is JSON, whole.
        profile: the numbers ``profile/…`` of the last profiled steps.
    """

    path: str
    form: str
    steps: StepTable
    other_records: int = 0
    repeated: int = 0
    unreadable: int = 0
    notes: Mapping[int, str] = dataclasses.field(default_factory=dict)
    last_record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    profile: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def restarts(self) -> int:
        """How often the step number went back, as it does when a run resumes."""
        numbers = self.steps.numbers
        return sum(map(operator.lt, numbers[1:], numbers))

    def summary(self, *, warmup_steps: int) -> Summary:
        """Statistics of the measured steps.

        Args:
            warmup_steps: steps to exclude after each start, if the file does not mark them.
        """
        statistics, left_out, loss = StepStatistics(), Counter[str](), None
        for kind, segment in self.segments(warmup_steps=warmup_steps):
            if losses := segment.columns.get("learning/loss"):
                loss = losses[-1]
            if kind == "step":
                statistics.add_many(segment.columns)
            else:
                left_out[kind] += len(segment.numbers)
        return Summary(
            **statistics.fields(),
            warmup_steps=left_out["warmup"],
            compile_steps=left_out["compile"],
            last_loss=loss,
        )

    def segments(self, *, warmup_steps: int) -> Iterator[tuple[str, Segment]]:
        """As `with_kinds`, many steps at once.

        Args:
            warmup_steps: as `summary` takes it.
        """
        since_start, last, tells_kinds = 0, -1, self.steps.tells_kinds
        for segment in self.steps.segments():
            if tells_kinds:
                yield segment.kind or "step", segment
                continue
            is_early = []
            for number in segment.numbers:
                since_start = 0 if number < last else since_start
                is_early.append(since_start < warmup_steps)
                since_start, last = since_start + 1, number
            begin = 0
            for early, group in itertools.groupby(is_early):
                end = begin + sum(1 for _ in group)
                kind = segment.kind or ("warmup" if early else "step")
                yield kind, segment.part(begin, end)
                begin = end

    def with_kinds(self, *, warmup_steps: int) -> Iterator[tuple[str, LoggedStep]]:
        """Each step, and whether it is a measured ``step``, a ``warmup`` or a ``compile`` one.

        Args:
            warmup_steps: as `summary` takes it.
        """
        since_start, last = 0, -1
        for step in self.steps:
            since_start = 0 if step.number < last else since_start
            yield step.kind or ("warmup" if since_start < warmup_steps else "step"), step
            since_start, last = since_start + 1, step.number

    def with_scalars(self, change: Change) -> MetricsRun:
        """The same run with `change` applied to the scalars of every step."""
        return dataclasses.replace(self, steps=self.steps.changed(change))


def read_metrics(path: str | Path) -> MetricsRun:
    """Reads a metrics file or a log; its lines tell which.

    Args:
        path: JSON lines of this package, MaxText, levanter or torchtitan, or text with lines
            ``completed step: 7, seconds: 0.123, TFLOP/s/device: …``; ``-``: standard input.

    Raises:
        UserError: it cannot be read, or holds no training step.
    """
    reader = _Reader()
    if str(path) == "-":
        if sys.stdin is None:  # closed by the caller
            raise unreadable("-", "no standard input", _EXPECTED)
        reader.read(line_blocks(sys.stdin.buffer, "-", _EXPECTED))
    else:
        with _opened(path) as file:
            reader.read(line_blocks(file, path, _EXPECTED))
    return reader.run(str(path))


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    found = path_of(path)
    with open_object(found) if isinstance(found, Address) else opened(found, _EXPECTED) as file:
        yield file


class _Reader:
    """Takes the lines of a file one by one, and counts what is no step."""

    def __init__(self) -> None:
        self.steps = StepTable()
        self.forms: set[str] = set()
        self.counts = Counter[str]()
        self.notes: dict[int, str] = {}
        self.last_line = ""
        self.profile_line = ""
        self._foreign = ForeignLines()
        self._templates = Templates(NAMES, is_special)

    def read(self, blocks: Iterable[bytes]) -> None:
        """Adds the lines of a file, in blocks."""
        for block in blocks:
            place = 0
            while place < len(block):
                place = self._read_rows(block, place) or self._read_one(block, place)
        for found in self._foreign.rest():
            self._add(*foreign_step(found), self.last_line)

    def _read_rows(self, block: bytes, begin: int) -> int:
        """Adds the records of a known shape from a place on; returns their end, 0: none."""
        found = self._templates.rows(block, begin, self.steps.last_number)
        if found is None:
            return 0
        template, rows = found
        if not are_sane(template, rows):
            while begin < rows.end:
                begin = self._read_one(block, begin)
            return begin
        self.forms.add(form_of(template.kind))
        self.steps.extend(template.kind, template.names, rows.numbers, rows.values)
        self.last_line = block[rows.last : rows.end].decode("utf-8", "replace")
        return rows.end

    def _read_one(self, block: bytes, begin: int) -> int:
        """Adds the line at a place; returns its end."""
        end = block.find(b"\n", begin) + 1 or len(block)
        for line in text_lines(block[begin:end]):
            for form, step in self._steps_of(line):
                self._add(form, step, line)
        return end

    def _steps_of(self, line: str) -> Iterable[tuple[str, LoggedStep | None]]:
        """The form and the steps that a line ends; no step if it is broken."""
        try:
            theirs = self._foreign.take(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return [("", None)]
        if theirs is not None:
            return map(foreign_step, theirs)
        found = read_line(line)
        return [] if found is None else [found]

    def _add(self, form: str, step: LoggedStep | None, line: str) -> None:
        if step is None:
            self.counts["unreadable"] += 1
        elif TIME not in step.scalars:
            self.counts["other_records"] += 1
        elif step.number == self.steps.last_number:
            self.counts["repeated"] += 1
        else:
            self.forms.add(form)
            self.steps.append(step)
            self._remember(line, step.number)
            if form in ("jsonl", "maxtext"):
                self._templates.learn(line)

    def _remember(self, line: str, step: int) -> None:
        """Keeps the last record, and the words of a record that has any."""
        self.last_line = line
        if '"profile/mfu"' in line:
            self.profile_line = line
        if '"notes"' in line or '"flags"' in line:
            if len(self.notes) >= _MOST_NOTES:
                del self.notes[next(iter(self.notes))]
            self.notes[step] = words_of(line)

    def run(self, path: str) -> MetricsRun:
        """What was read.

        Raises:
            UserError: no step, or steps of two forms.
        """
        if not self.forms:
            raise UserError(
                f"{path!r} holds no training step; expected JSON lines with {TIME!r}, or lines "
                f"'completed step: 7, seconds: …'; usually another file of the run, or one that "
                f"ends before its first step; pass metrics.jsonl, MaxText's metrics_file, or its "
                f"log"
            )
        if len(self.forms) > 1:
            raise UserError(
                f"{path!r} holds the steps as {' and as '.join(sorted(self.forms))}; expected one "
                f"of them; usually two outputs of a run were joined; pass each as its own file"
            )
        form = self.forms.pop()
        return MetricsRun(
            path=path,
            form=form,
            steps=self.steps,
            notes=self.notes,
            last_record={} if form == "log" else object_of(self.last_line),
            profile=dict(profile_of(self.profile_line)),
            **self.counts,
        )
