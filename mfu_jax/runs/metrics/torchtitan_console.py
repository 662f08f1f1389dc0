"""torchtitan's console: ``[titan] 2025-12-17 01:18:26,708 - root - INFO - step:  2  loss: …``.

Its lines (components/metrics.py, tools/logging.py) have rates but no step time, which follows from
the time stamps of two lines, one line per `log_freq` steps, and includes whatever came between
them, except validation, which logs a line at its end. Quantised training has ``mfu: N/A``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(
    r"(?P<rank>\[[\w ]*\]:)?(?:\[\w+\] )?"
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - .* - INFO - "
    r"(?P<validation>validate )?step: +(?P<step>\d+)  (?P<values>.*tps: .*)"
)
_VALUE = re.compile(r"(?P<name>\w+): +(?P<value>[-+.,\w/]+)")
# Their name → our name and the factor.
_NAMES = {
    "loss": ("learning/loss", 1.0),
    "grad_norm": ("learning/grad_norm", 1.0),
    "tps": ("perf/per_device_tokens_per_sec", 1.0),
    "tflops": ("perf/per_device_tflops_per_sec", 1.0),
    "mfu": ("perf/mfu", 0.01),
}
_TIME = "perf/step_time_seconds"


class Console:
    """Reads the lines of the first rank that logs."""

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
        if "tps: " not in line or (found := _LINE.search(_COLOR.sub("", line))) is None:
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
        return step, dict([*self._time(step, at), *_values(found["values"])])

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
            yield _TIME, (at - last[1]).total_seconds() / (step - last[0])
            if seconds:
                yield "goodput/eval_seconds", seconds


def _values(text: str) -> Iterator[tuple[str, float]]:
    for found in _VALUE.finditer(text):
        if found["name"] in _NAMES and found["value"] != "N/A":
            name, factor = _NAMES[found["name"]]
            yield name, float(found["value"].replace(",", "")) * factor
