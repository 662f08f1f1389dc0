"""Reads back the metrics of a run: our JSONL, MaxText's ``metrics_file``, or a log.

Imports neither jax nor numpy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, first_line
from mfu_jax.logger.summary import StepStatistics, Summary
from mfu_jax.storage.addresses import open_text

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
_LOG_LINE = re.compile(r"completed step: (?P<step>\d+)(?P<rest>[^\"\x1b\n]*)")
_LOG_VALUE = re.compile(r", (?P<name>[A-Za-z/_ ]+): (?P<value>[-+.\w]+)(?P<percent>%?)")
_KIND = re.compile(r"\[(compile|warmup)\]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """One training step of a file.

    Attributes:
        number: as in the file.
        kind: ``step``, ``compile`` or ``warmup``; None if the file does not say.
        scalars: metric name → value: ``perf/step_time_seconds``, ….
    """

    number: int
    kind: str | None
    scalars: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsRun:
    """All training steps of a file.

    Attributes:
        path: the file.
        form: ``jsonl`` (ours), ``maxtext`` (its metrics_file) or ``log``.
        steps: in the file's order.
        other_records: records without a step time: MaxText writes evaluations among the steps.
        repeated: lines skipped because they repeat the step before, as the logs of all hosts do.
        unreadable: lines that look like a record but are broken; a killed run leaves one.
    """

    path: str
    form: str
    steps: tuple[LoggedStep, ...]
    other_records: int = 0
    repeated: int = 0
    unreadable: int = 0

    @property
    def restarts(self) -> int:
        """How often the step number went back, as it does when a run resumes."""
        return sum(b.number < a.number for a, b in zip(self.steps, self.steps[1:], strict=False))

    def summary(self, *, warmup_steps: int) -> Summary:
        """Statistics of the measured steps.

        Args:
            warmup_steps: steps to exclude after each start, if the file does not mark them.
        """
        statistics, left_out, loss = StepStatistics(), Counter[str](), None
        since_start, last = 0, -1
        for step in self.steps:
            since_start = 0 if step.number < last else since_start
            kind = step.kind or ("warmup" if since_start < warmup_steps else "step")
            since_start, last = since_start + 1, step.number
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

    def with_scalars(
        self, change: Callable[[Mapping[str, float]], Mapping[str, float]]
    ) -> MetricsRun:
        """The same run with `change` applied to the scalars of every step."""
        steps = (dataclasses.replace(s, scalars=change(s.scalars)) for s in self.steps)
        return dataclasses.replace(self, steps=tuple(steps))


def read_metrics(path: str | Path) -> MetricsRun:
    """Reads a metrics file or a log; its lines tell which.

    Args:
        path: JSON lines of this package or of MaxText, or text with lines
            ``completed step: 7, seconds: 0.123, TFLOP/s/device: …``.

    Raises:
        UserError: it cannot be read, or holds no training step.
    """
    steps: list[LoggedStep] = []
    forms, others, repeated, unreadable = set(), 0, 0, 0
    try:
        with open_text(path) as lines:
            for form, found in filter(None, map(_read_line, lines)):
                if found is None:
                    unreadable += 1
                elif _TIME not in found.scalars:
                    others += 1
                elif steps and steps[-1].number == found.number:
                    repeated += 1
                else:
                    forms.add(form)
                    steps.append(found)
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error.strerror or first_line(error)}); expected a "
            f"metrics file or a log; usually a wrong path or a folder; pass the file that "
            f"metrics_file named"
        ) from None
    if not steps:
        raise UserError(
            f"{str(path)!r} holds no training step; expected JSON lines with {_TIME!r}, or lines "
            f"'completed step: 7, seconds: …'; usually another file of the run, or one that ends "
            f"before its first step; pass metrics.jsonl, MaxText's metrics_file, or its log"
        )
    if len(forms) > 1:
        raise UserError(
            f"{str(path)!r} holds the steps as {' and as '.join(sorted(forms))}; expected one of "
            f"them; usually two outputs of a run were joined; pass each as its own file"
        )
    return MetricsRun(
        path=str(path),
        form=forms.pop(),
        steps=tuple(steps),
        other_records=others,
        repeated=repeated,
        unreadable=unreadable,
    )


def _read_line(line: str) -> tuple[str, LoggedStep | None] | None:
    """The form of a line and its step; None if not recognised, no step if it is broken."""
    if line.startswith("{") and '"step"' in line:
        try:
            return _read_json(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError):
            return "jsonl", None
    if match := _LOG_LINE.search(line):
        return _read_log(int(match["step"]), match["rest"])
    return None


def _read_json(values: Mapping[str, Any]) -> tuple[str, LoggedStep]:
    kind = values.get("kind")
    scalars = {k: float(v) for k, v in values.items() if "/" in k}  # reads "NaN", too
    form = "maxtext" if kind is None else "jsonl"
    return form, LoggedStep(number=int(values["step"]), kind=kind, scalars=_complete(scalars))


def _read_log(number: int, text: str) -> tuple[str, LoggedStep | None]:
    try:
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


def _complete(scalars: dict[str, float]) -> dict[str, float]:
    """Adds the amounts per step; a log line has only the rates.

    Raises:
        ValueError: the step time is negative or not finite.
    """
    seconds = scalars.get(_TIME, 0.0)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(seconds)
    for amount in ("perf/per_device_tflops", "perf/per_device_tokens"):
        scalars.setdefault(amount, scalars.get(f"{amount}_per_sec", 0.0) * seconds)
    return scalars
