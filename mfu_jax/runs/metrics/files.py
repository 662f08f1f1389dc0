"""Reads back a run's metrics: our JSONL, MaxText's ``metrics_file``, or a log.

Imports neither jax nor numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.records.summary import ActivityTotals, StepStatistics, Summary
from mfu_jax.runs.metrics.lines import (
    flags_of,
    object_of,
    profile_of,
    read_line,
    reading_of,
    words_of,
)
from mfu_jax.runs.metrics.step_table import STEP_SECONDS, LoggedStep, StepSegment, StepTable
from mfu_jax.storage.addresses import open_place, path_of
from mfu_jax.util.user_files import line_blocks, text_lines, unreadable

# MaxText's seconds are the time between two dispatches, which equals a step's time only once its
# queue is full: in a real run with ten-millisecond steps, the third one logged "0.001".
WARMUP_STEPS = 3
_MOST_NOTES = 10_000
_EXPECTED = (
    "a metrics file or a log; usually a wrong path; pass the run's folder or its metrics file, "
    "or - and pipe it in"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsRun:
    """All training steps of a file.

    Attributes:
        path: the file.
        form: ``jsonl`` (ours), ``maxtext`` (its metrics_file) or ``log``.
        steps: in file order.
        other_records: records without a step time: MaxText writes evaluations among the steps.
        repeated: lines skipped because they repeat the previous step, as in the logs of all hosts.
        unreadable: lines that look like a record but are broken; a killed run leaves one.
        notes: step → its record's notes in words, for the last steps that have any.
        flags: name of each impossible number → number of steps that have it.
        last_record: the last complete JSON record.
        gpu: the last reading of the devices, and its step; empty if there is none.
        activity: of the tensor cores, as fields of `Summary`.
        profile: the ``profile/…`` numbers of the last profiled steps.
    """

    path: str
    form: str
    steps: StepTable
    other_records: int = 0
    repeated: int = 0
    unreadable: int = 0
    notes: Mapping[int, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, int] = dataclasses.field(default_factory=dict)
    last_record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    profile: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpu: Mapping[str, float] = dataclasses.field(default_factory=dict)
    activity: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def restarts(self) -> int:
        """How often the step number went back, as when a run resumes."""
        numbers = self.steps.numbers
        return sum(map(operator.lt, numbers[1:], numbers))

    def summary(self, *, warmup_steps: int) -> Summary:
        """Statistics of the measured steps.

        Args:
            warmup_steps: steps to exclude after each start, unless the file marks them.
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
            **self.activity,
            warmup_steps=left_out["warmup"],
            compile_steps=left_out["compile"],
            last_loss=loss,
            flags=self.flags,
        )

    def segments(self, *, warmup_steps: int) -> Iterator[tuple[str, StepSegment]]:
        """Segments of steps, each of measured ``step``, ``warmup`` or ``compile`` steps.

        Args:
            warmup_steps: as for `summary`.
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

    def with_scalars(
        self, change: Callable[[Mapping[str, float]], Mapping[str, float]]
    ) -> MetricsRun:
        """The same run with `change` applied to the scalars of every step; flags are of the old."""
        return dataclasses.replace(self, steps=self.steps.changed(change), flags={})


def read_metrics(path: str | Path) -> MetricsRun:
    """Reads a metrics file or a log; the lines tell which it is.

    Args:
        path: JSON lines of this package or MaxText, or text with lines
            ``completed step: 7, seconds: 0.123, TFLOP/s/device: …``; ``-``: standard input.

    Raises:
        UserError: it cannot be read, or has no training step.
    """
    reader = _MetricsReader()
    if str(path) == "-":
        if sys.stdin is None:  # closed by the caller
            raise unreadable("-", "no standard input", _EXPECTED)
        reader.read(line_blocks(sys.stdin.buffer, "-", _EXPECTED))
        return _run_of(reader, "-")
    with open_place(path_of(path), _EXPECTED) as file:
        reader.read(line_blocks(file, path, _EXPECTED))
    return _run_of(reader, str(path))


class _MetricsReader:
    """Reads the lines of a file one by one, and counts those that are not steps.

    Attributes:
        steps: found so far.
        forms: of the lines: ``jsonl``, ``maxtext``, ….
        counts: lines that are not new steps, by reason.
        notes: step → its record's notes in words, for the last steps that have any.
        flags: as in `MetricsRun`.
        last_line: the last line with a step.
        profile_line: the last line with profile numbers.
        gpu_line: the last line with a reading of the devices.
        activity: of the tensor cores.
    """

    def __init__(self) -> None:
        self.steps = StepTable()
        self.forms: set[str] = set()
        self.counts = Counter[str]()
        self.notes: dict[int, str] = {}
        self.flags = Counter[str]()
        self.last_line = ""
        self.profile_line = ""
        self.gpu_line = ""
        self.activity = ActivityTotals()

    def read(self, blocks: Iterable[bytes]) -> None:
        """Adds the lines of a file, in blocks."""
        for block in blocks:
            for line in text_lines(block):
                if (found := read_line(line)) is not None:
                    self._add(*found, line)

    def _add(self, form: str, step: LoggedStep | None, line: str) -> None:
        if step is None:
            self.counts["unreadable"] += 1
        elif STEP_SECONDS not in step.scalars:
            self.counts["other_records"] += 1
        elif step.number == self.steps.last_number:
            self.counts["repeated"] += 1
        else:
            self.forms.add(form)
            self.steps.append(step)
            self._remember(line, step.number)

    def _remember(self, line: str, step: int) -> None:
        """Keeps the last record, and the notes of a record that has any."""
        self.last_line = line
        if '"profile/mfu"' in line:
            self.profile_line = line
        if '"gpu/' in line or '"hardware/' in line:
            if '"gpu/' in line or '"gpu/' not in self.gpu_line:
                self.gpu_line = line
            self.activity.add(dict(reading_of(line)))
        if '"notes"' in line or '"flags"' in line:
            if len(self.notes) >= _MOST_NOTES:
                del self.notes[next(iter(self.notes))]
            record = object_of(line)
            self.notes[step] = words_of(record)
            self.flags.update(flags_of(record))


def _run_of(reader: _MetricsReader, path: str) -> MetricsRun:
    """The run from what was read.

    Raises:
        UserError: no step, or steps of two forms.
    """
    if not reader.forms:
        raise UserError(
            f"{path!r} holds no training step; expected JSON lines with {STEP_SECONDS!r}, or "
            "lines 'completed step: 7, seconds: …'",
            hint="pass metrics.jsonl, a metrics_file or a log",
        )
    if len(reader.forms) > 1:
        raise UserError(
            f"{path!r} holds the steps as {' and as '.join(sorted(reader.forms))}; expected "
            "one of them",
            hint="usually two outputs of a run were joined; pass each as its own file",
        )
    form = reader.forms.pop()
    return MetricsRun(
        path=path,
        form=form,
        steps=reader.steps,
        notes=reader.notes,
        flags=dict(reader.flags),
        last_record={} if form == "log" else object_of(reader.last_line),
        profile=dict(profile_of(reader.profile_line)),
        gpu=dict(reading_of(reader.gpu_line)),
        activity=reader.activity.fields(),
        **reader.counts,
    )
