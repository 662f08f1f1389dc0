"""Reads back the metrics of a run: our JSONL, MaxText's ``metrics_file``, a log, or others' JSONL.

Imports neither jax nor numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mfu_jax.errors import UserError
from mfu_jax.logger.summary import StepStatistics, Summary
from mfu_jax.runs.foreign_metrics import ForeignLines, Found
from mfu_jax.runs.step_table import Change, LoggedStep, StepTable
from mfu_jax.storage.addresses import Address, open_object, path_of
from mfu_jax.user_files import opened, text_lines, unreadable
from mfu_jax.values import convert

# MaxText's seconds are the time between two dispatches, which equals a step's time only once its
# queue is full: in a real run of ten-millisecond steps the third one took "0.001".
WARMUP_STEPS = 3
_TIME = "perf/step_time_seconds"
# Names in the log lines of MaxText (common/metric_logger.py, 0.2.5) and ours → metric names.
_LOG_NAMES = {
    "seconds": _TIME,
    "TFLOP/s/device": "perf/per_device_tflops_per_sec",
    "Tokens/s/device": "perf/per_device_tokens_per_sec",
    "total_weights": "learning/total_weights",
    "loss": "learning/loss",
    "MFU": "perf/mfu",
    "HFU": "perf/hfu",
}
# All that a summary, a benchmark's table or a page is made of; the rest of a record is not kept.
_NAMES = frozenset(
    {
        *_LOG_NAMES.values(),
        *(f"goodput/{use}_seconds" for use in ("data_wait", "eval", "checkpoint", "compile")),
        "unix_seconds",
        *("perf/per_device_tflops", "perf/per_device_tokens", "perf/mbu"),
        *("compile/seconds", "memory/peak_bytes_in_use"),
    }
)
# A step of under a picosecond, or over 30 years, would poison every sum and quotient.
_SECONDS = (1e-12, 1e9)
_AMOUNTS = (1e-30, 1e30)
_MOST_NOTES, _LONGEST_NOTE = 10_000, 500
_EXPECTED = (
    "a metrics file or a log; usually a wrong path or a folder; pass the file that metrics_file "
    "named, or - and pipe it in"
)
_LOG_LINE = re.compile(r"completed step: (?P<step>\d+)(?P<rest>[^\"\x1b\n]*)")
_LOG_VALUE = re.compile(r", (?P<name>[A-Za-z/_ ]+): (?P<value>[-+.\w]+)(?P<percent>%?)")
_KIND = re.compile(r"\[(compile|warmup)\]")


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
        return sum(b < a for a, b in itertools.pairwise(self.steps.numbers))

    def summary(self, *, warmup_steps: int) -> Summary:
        """Statistics of the measured steps.

        Args:
            warmup_steps: steps to exclude after each start, if the file does not mark them.
        """
        statistics, left_out, loss = StepStatistics(), Counter[str](), None
        for kind, step in self.with_kinds(warmup_steps=warmup_steps):
            loss = step.scalars.get("learning/loss", loss)
            if kind == "step":
                statistics.add(step.scalars)
            else:
                left_out[kind] += 1
        return Summary(
            **statistics.fields(),
            warmup_steps=left_out["warmup"],
            compile_steps=left_out["compile"],
            last_loss=loss,
        )

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
        reader.read(text_lines(sys.stdin.buffer, "-", _EXPECTED))
    else:
        with _opened(path) as file:
            reader.read(text_lines(file, path, _EXPECTED))
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

    def read(self, lines: Iterable[str]) -> None:
        """Adds the lines."""
        for line in lines:
            for form, step in self._steps_of(line):
                self._add(form, step, line)
        for found in self._foreign.rest():
            self._add(*_foreign_step(found), self.last_line)

    def _steps_of(self, line: str) -> Iterable[tuple[str, LoggedStep | None]]:
        """The form and the steps that a line ends; no step if it is broken."""
        try:
            theirs = self._foreign.take(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return [("", None)]
        if theirs is not None:
            return map(_foreign_step, theirs)
        found = _read_line(line)
        return [] if found is None else [found]

    def _add(self, form: str, step: LoggedStep | None, line: str) -> None:
        if step is None:
            self.counts["unreadable"] += 1
        elif _TIME not in step.scalars:
            self.counts["other_records"] += 1
        elif len(self.steps) and self.steps.numbers[-1] == step.number:
            self.counts["repeated"] += 1
        else:
            self.forms.add(form)
            self.steps.append(step)
            self._remember(line, step.number)

    def _remember(self, line: str, step: int) -> None:
        """Keeps the last record, and the words of a record that has any."""
        self.last_line = line
        if '"profile/mfu"' in line:
            self.profile_line = line
        if '"notes"' in line or '"flags"' in line:
            if len(self.notes) >= _MOST_NOTES:
                del self.notes[next(iter(self.notes))]
            self.notes[step] = _words_of(line)

    def run(self, path: str) -> MetricsRun:
        """What was read.

        Raises:
            UserError: no step, or steps of two forms.
        """
        if not self.forms:
            raise UserError(
                f"{path!r} holds no training step; expected JSON lines with {_TIME!r}, or lines "
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
            last_record={} if form == "log" else _object(self.last_line),
            profile=dict(_profile_of(self.profile_line)),
            **self.counts,
        )


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _profile_of(line: str) -> Iterator[tuple[str, float]]:
    for name, value in _object(line).items():
        if name.startswith("profile/") and isinstance(value, int | float):
            yield name, float(value)


def _words_of(line: str) -> str:
    """The notes and flags of a record."""
    record = _object(line)
    parts = [record.get(name) for name in ("notes", "flags")]
    words = [str(word) for part in parts if isinstance(part, list | dict) for word in part]
    return "; ".join(words)[:_LONGEST_NOTE]


def _read_line(line: str) -> tuple[str, LoggedStep | None] | None:
    """The form of a line and its step; None if not recognised, no step if it is broken."""
    if line.startswith("{") and '"step"' in line:
        try:
            return _read_json(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return "jsonl", None
    if match := _LOG_LINE.search(line):
        return _read_log(match["step"], match["rest"])
    return None


def _read_json(values: Mapping[str, Any]) -> tuple[str, LoggedStep]:
    kind = values.get("kind")
    if not isinstance(kind, str | None):
        raise TypeError(kind)
    scalars = {k: float(v) for k, v in values.items() if k in _NAMES}  # reads "NaN", too
    form = "maxtext" if kind is None else "jsonl"
    return form, LoggedStep(number=_step(values["step"]), kind=kind, scalars=_complete(scalars))


def _foreign_step(found: Found) -> tuple[str, LoggedStep | None]:
    form, step, scalars = found
    try:
        return form, LoggedStep(number=_step(step), kind=None, scalars=_complete(scalars))
    except (ValueError, TypeError, OverflowError):
        return form, None


def _read_log(step: str, text: str) -> tuple[str, LoggedStep | None]:
    try:
        number = _step(step)
        scalars = {
            _LOG_NAMES[found["name"]]: float(found["value"]) / (100 if found["percent"] else 1)
            for found in _LOG_VALUE.finditer(text)
            if found["name"] in _LOG_NAMES and found["value"] != "n"  # n/a
        }
        scalars = _complete(scalars)
    except ValueError:
        return "log", None
    kind = _KIND.search(text)
    # Our own lines mark the steps that are not measured, so all others are.
    known = kind[1] if kind else "step" if "perf/mfu" in scalars else None
    return "log", LoggedStep(number=number, kind=known, scalars=scalars)


def _step(value: Any) -> int:
    """A step's number: whole, not negative, of 64 bits; MaxText writes 7.0."""
    number: int = convert(value, int)
    if not 0 <= number < 2**63:
        raise ValueError(number)
    return number


def _complete(scalars: dict[str, float]) -> dict[str, float]:
    """Adds the amounts per step; a log line has only the rates.

    Raises:
        ValueError: the step time or an amount is none: negative, not finite, or absurd.
    """
    seconds = scalars.get(_TIME, 0.0)
    for name, value in scalars.items():
        least, most = _SECONDS if name == _TIME else _AMOUNTS
        if name.startswith("perf/") and not (value == 0 or least <= value <= most):
            raise ValueError(value)
    for amount in ("perf/per_device_tflops", "perf/per_device_tokens"):
        scalars.setdefault(amount, scalars.get(f"{amount}_per_sec", 0.0) * seconds)
    return scalars
