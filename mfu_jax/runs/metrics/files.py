"""Reads back a run's metrics: our JSONL, MaxText's ``metrics_file``, a log, or other JSONL files.

Imports neither jax nor numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.errors import UserError
from mfu_jax.logger.summary import StepStatistics, Summary
from mfu_jax.runs.metrics.lines import TIME, gpu_of, object_of, profile_of
from mfu_jax.runs.metrics.pieces import EXPECTED, pieces_of, read_pieces
from mfu_jax.runs.metrics.reader import Reader
from mfu_jax.runs.metrics.step_table import Change, Segment, StepTable
from mfu_jax.storage.addresses import Address, open_object, path_of
from mfu_jax.util.user_files import line_blocks, opened, unreadable

# MaxText's seconds are the time between two dispatches, which equals a step's time only once its
# queue is full: in a real run with ten-millisecond steps, the third one logged "0.001".
WARMUP_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsRun:
    """All training steps of a file.

    Attributes:
        path: the file.
        form: ``jsonl`` (ours), ``maxtext`` (its metrics_file), ``log``, ``levanter`` or
            ``torchtitan``.
        steps: in file order.
        other_records: records without a step time: MaxText writes evaluations among the steps.
        repeated: lines skipped because they repeat the previous step, as in the logs of all hosts.
        unreadable: lines that look like a record but are broken; a killed run leaves one.
        notes: step → its record's notes in words, for the last steps that have any.
        last_record: the last complete JSON record.
        gpu: the last reading of the GPUs, and its step; empty if there is none.
        profile: the ``profile/…`` numbers of the last profiled steps.
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
    gpu: Mapping[str, float] = dataclasses.field(default_factory=dict)

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
        measured = []
        for kind, segment in self.segments(warmup_steps=warmup_steps):
            if losses := segment.columns.get("learning/loss"):
                loss = losses[-1]
            if kind == "step":
                statistics.add_many(segment.columns)
                measured.append(segment.columns)
            else:
                left_out[kind] += len(segment.numbers)
        return Summary(
            **statistics.fields() | _rates(measured),
            warmup_steps=left_out["warmup"],
            compile_steps=left_out["compile"],
            last_loss=loss,
        )

    def segments(self, *, warmup_steps: int) -> Iterator[tuple[str, Segment]]:
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

    def with_scalars(self, change: Change) -> MetricsRun:
        """The same run with `change` applied to the scalars of every step."""
        return dataclasses.replace(self, steps=self.steps.changed(change))


def _rates(measured: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float | None]:
    """Rates of the steps with known amounts: a file may lack them while the batch grows.

    Args:
        measured: steps, by metric; an amount of 0 means unknown.
    """
    rates: dict[str, float | None] = {}
    for amount in ("tokens", "tflops"):
        total = seconds = 0.0
        for columns in measured:
            known = columns.get(f"perf/per_device_{amount}", ())
            total += sum(known)
            seconds += sum(itertools.compress(columns[TIME], known))
        rates[f"{amount}_per_sec_per_device"] = total / seconds if seconds else None
    return rates


def read_metrics(path: str | Path) -> MetricsRun:
    """Reads a metrics file or a log; the lines tell which it is.

    Args:
        path: JSON lines of this package, MaxText, levanter or torchtitan, or text with lines
            ``completed step: 7, seconds: 0.123, TFLOP/s/device: …``; ``-``: standard input.

    Raises:
        UserError: it cannot be read, or has no training step.
    """
    reader = Reader()
    if str(path) == "-":
        if sys.stdin is None:  # closed by the caller
            raise unreadable("-", "no standard input", EXPECTED)
        reader.read(line_blocks(sys.stdin.buffer, "-", EXPECTED))
        return _run_of(reader, "-")
    with _opened(path) as file:
        if isinstance(path_of(path), Address) or not (pieces := pieces_of(file)):
            reader.read(line_blocks(file, path, EXPECTED))
        else:
            reader = read_pieces(path, file, pieces)
    return _run_of(reader, str(path))


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    found = path_of(path)
    with open_object(found) if isinstance(found, Address) else opened(found, EXPECTED) as file:
        yield file


def _run_of(reader: Reader, path: str) -> MetricsRun:
    """The run from what was read.

    Raises:
        UserError: no step, or steps of two forms.
    """
    if not reader.forms:
        raise UserError(
            f"{path!r} holds no training step; expected JSON lines with {TIME!r}, or lines "
            f"'completed step: 7, seconds: …'; usually another file of the run, or one that "
            f"ends before its first step; pass metrics.jsonl, MaxText's metrics_file, or its "
            f"log"
        )
    if len(reader.forms) > 1:
        raise UserError(
            f"{path!r} holds the steps as {' and as '.join(sorted(reader.forms))}; expected one "
            f"of them; usually two outputs of a run were joined; pass each as its own file"
        )
    form = reader.forms.pop()
    return MetricsRun(
        path=path,
        form=form,
        steps=reader.steps,
        notes=reader.notes,
        last_record={} if form == "log" else object_of(reader.last_line),
        profile=dict(profile_of(reader.profile_line)),
        gpu=dict(gpu_of(reader.gpu_line)),
        **reader.counts,
    )
