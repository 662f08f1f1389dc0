"""Metrics of other trainers as our steps: levanter's and torchtitan's JSON lines, and a console.

levanter (tracker/json_logger.py) writes ``{"tracker": …, "event": "log", "step": 7, "metrics": …}``
after its logger's prefix, several lines per step. Times are of a step without the wait for
data; rates are of all devices, whose number follows from its summary of theoretical FLOP/s.

torchtitan's metrics (components/metrics.py) are per device, one record per `log_freq` steps.

torchtitan's console, ``[titan] 2025-12-17 01:18:26,708 - root - INFO - step:  2  loss: …``, has
rates but no step time, which follows from the time stamps of two lines, one line per `log_freq`
steps, and includes whatever came between them, except validation, which logs a line at its end.
Quantised training has ``mfu: N/A``.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mfu_jax.runs.metrics.step_table import STEP_SECONDS

_MARKS = re.compile(r'"tracker": ?"|"throughput/duration"|"time_metrics/end_to_end\(s\)"')
# Their name → our name and the factor. "total": of all devices.
_LEVANTER = {
    "throughput/duration": (STEP_SECONDS, 1.0),
    "throughput/loading_time": ("goodput/data_wait_seconds", 1.0),
    "throughput/mfu": ("perf/mfu", 0.01),
    "train/loss": ("learning/loss", 1.0),
    "throughput/tokens_per_second": ("total/per_device_tokens_per_sec", 1.0),
    "throughput/gflops_per_second": ("total/per_device_tflops_per_sec", 1e-3),
}
_TORCHTITAN = {
    "time_metrics/end_to_end(s)": (STEP_SECONDS, 1.0),
    "throughput(tps)": ("perf/per_device_tokens_per_sec", 1.0),
    "tflops": ("perf/per_device_tflops_per_sec", 1.0),
    "mfu(%)": ("perf/mfu", 0.01),
    "loss_metrics/global_avg_loss": ("learning/loss", 1.0),
    "memory/max_reserved(GiB)": ("memory/peak_bytes_in_use", 2.0**30),
}
_FLOPS, _FLOPS_OF_ONE = "throughput/theoretical_flops", "throughput/theoretical_flops_per_device"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CONSOLE_LINE = re.compile(
    r"(?P<rank>\[[\w ]*\]:)?(?:\[\w+\] )?"
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - .* - INFO - "
    r"(?P<validation>validate )?step: +(?P<step>\d+)  (?P<values>.*tps: .*)"
)
_CONSOLE_VALUE = re.compile(r"(?P<name>\w+): +(?P<value>[-+.,\w/]+)")
# Their name → our name and the factor.
_CONSOLE = {
    "loss": ("learning/loss", 1.0),
    "grad_norm": ("learning/grad_norm", 1.0),
    "tps": ("perf/per_device_tokens_per_sec", 1.0),
    "tflops": ("perf/per_device_tflops_per_sec", 1.0),
    "mfu": ("perf/mfu", 0.01),
}

ForeignStep = tuple[str, Any, dict[str, float]]
"""Form, step number, and the step's scalars."""


class ForeignLines:
    """Joins the lines of one step.

    Attributes:
        devices: of the job, from levanter's summary; 0: not stated.
    """

    def __init__(self) -> None:
        self.devices = 0
        self._console = _TorchtitanConsole()
        self._form = ""
        self._step: Any = None
        self._scalars: dict[str, float] = {}

    def take(self, line: str) -> list[ForeignStep] | None:
        """Reads one line.

        Args:
            line: a line of a file.

        Returns:
            The steps that it completes; None if it is not from these trainers.

        Raises:
            ValueError: it looks like one of theirs, but is broken; `TypeError` and `KeyError` too.
        """
        if (console := self._console.take(line)) is not None:
            return [("torchtitan", *console)]
        if not _MARKS.search(line):
            return None
        record = json.loads(line[line.index("{") :])
        if STEP_SECONDS in record:
            return None
        form, step, scalars = self._read(record)
        if not scalars or step is None:
            return []
        ended = list(self.rest()) if (form, step) != (self._form, self._step) else []
        self._form, self._step = form, step
        self._scalars.update(scalars)
        return ended

    def rest(self) -> Iterator[ForeignStep]:
        """The step whose lines are still being read."""
        if self._scalars:
            yield self._form, self._step, dict(_per_device(self._scalars, self.devices))
        self._scalars = {}

    def _read(self, record: Mapping[str, Any]) -> tuple[str, Any, list[tuple[str, float]]]:
        if "tracker" in record:
            metrics = dict(_flat(record.get("metrics") or record.get("summary") or {}))
            self._count_devices(metrics)
            step = record.get("step") if record.get("event") == "log" else None
            return "levanter", step, _named(metrics, _LEVANTER)
        step = record.get("step", record.get("_step"))
        if "throughput/duration" in record:
            self._count_devices(record)
            return "levanter", step, _named(record, _LEVANTER)
        return "torchtitan", step, _named(record, _TORCHTITAN)

    def _count_devices(self, metrics: Mapping[str, Any]) -> None:
        whole, one = metrics.get(_FLOPS), metrics.get(_FLOPS_OF_ONE)
        if isinstance(whole, int | float) and isinstance(one, int | float) and one > 0:
            self.devices = round(whole / one)


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        else:
            yield name, value


def _named(
    metrics: Mapping[str, Any], names: Mapping[str, tuple[str, float]]
) -> list[tuple[str, float]]:
    return [
        (ours, float(metrics[theirs]) * factor)
        for theirs, (ours, factor) in names.items()
        if metrics.get(theirs) is not None
    ]


def _per_device(scalars: Mapping[str, float], devices: int) -> Iterator[tuple[str, float]]:
    """Rates of all devices divided by their number; omitted if that is unknown."""
    for name, value in scalars.items():
        if not name.startswith("total/"):
            yield name, value
        elif devices:
            yield f"perf/{name.removeprefix('total/')}", value / devices


class _TorchtitanConsole:
    """Reads the console's lines of the first rank that logs."""

    def __init__(self) -> None:
        self._rank: str | None = None
        self._last: tuple[int, datetime.datetime] | None = None
        self._eval_seconds = 0.0

    def take(self, line: str) -> tuple[int, dict[str, float]] | None:
        """A line's step and scalars; None if it is another kind of line, or of another rank.

        Args:
            line: a line of a log.

        Raises:
            ValueError: it is such a line, but broken.
        """
        if "tps: " not in line or (found := _CONSOLE_LINE.search(_COLOR.sub("", line))) is None:
            return None
        if self._rank is None:
            self._rank = found["rank"] or ""
        if (found["rank"] or "") != self._rank:
            return None
        step = int(found["step"])
        at = datetime.datetime.strptime(found["at"], "%Y-%m-%d %H:%M:%S,%f")
        if found["validation"]:
            self._validated(step, at)
            return None
        return step, dict([*self._time(step, at), *_console_values(found["values"])])

    def _validated(self, step: int, at: datetime.datetime) -> None:
        """Starts the next steps at validation's end; a line of the same step gives its own time."""
        last, self._last = self._last, (step, at)
        if last is not None and step == last[0] and at > last[1]:
            self._eval_seconds = (at - last[1]).total_seconds()

    def _time(self, step: int, at: datetime.datetime) -> Iterator[tuple[str, float]]:
        """The mean step time since the last line; nothing after a start."""
        last, self._last = self._last, (step, at)
        seconds, self._eval_seconds = self._eval_seconds, 0.0
        if last is not None and step > last[0] and at > last[1]:
            yield STEP_SECONDS, (at - last[1]).total_seconds() / (step - last[0])
            if seconds:
                yield "goodput/eval_seconds", seconds


def _console_values(text: str) -> list[tuple[str, float]]:
    found = {of["name"]: of["value"].replace(",", "") for of in _CONSOLE_VALUE.finditer(text)}
    return _named({name: None if v == "N/A" else v for name, v in found.items()}, _CONSOLE)
