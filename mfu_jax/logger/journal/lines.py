"""The lines of a journal: JSON objects, with the event's name under ``e``.

Every ``t`` is wall time in seconds since 1970; every ``m`` is seconds since the machine booted,
sleep included; ``…_us`` and ``us`` are whole microseconds.

``start``   version, process, processes, host, pid, boot, began_m (of the process), mark_us
            (initial time between two ``alive``)
``steps``   first (number), by (stride), us (of each step), gap_us (before each), data_us (the part
            of that gap in which the device waited for data), kind, and seconds that one step takes
            at the peak: optimal_s, executed_s; t and m at the last step's end
``span``    name, t, m at its start, us; without us it is open; step and step_us of the step before
``restored`` step: the next one, after a checkpoint was restored
``back``    step: the next one; the process repeats the steps from there on
``compile`` spans: [m, us] of each
``alive``   the process was alive; wait_us: the wait for data since the journal's last step ended;
            silence_us: the mean age of the last such sign of life at a random moment
``stop``    how: clean, a signal's name, or ``exception: …``

Adding an event: its line here, its writer in `scribe`, its reader in `mfu_jax.runs.journals`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 1
# Long enough that lines are few and cheap to read, short enough to be rewritten repeatedly.
MOST_STEPS = 256

_END = b"}\n"
# Whole numbers, because code that formats floats would be out of cache when run so seldom.
_ALIVE = b'{"e":"alive","t":%11d.%06d,"m":%11d.%06d'
_ALIVE_REST = b',"wait_us":%15d,"silence_us":%7d}\n'
_as_json = json.JSONEncoder(separators=(",", ":")).encode

Moment = tuple[float, float]
"""Wall time and seconds since boot."""


class StepMark(NamedTuple):
    """One completed step, as the journal keeps it.

    Attributes:
        number: step number.
        end: when it ended.
        us: its time in microseconds.
        data_us: microseconds for which the device waited for data before it.
        cost: its kind, and its seconds at the peak: for the model FLOPs, and the executed ones.
    """

    number: int
    end: Moment
    us: int
    data_us: int
    cost: tuple[str, float | None, float | None]


class StepsLine:
    """Steps of one kind and cost, numbered with a constant stride, in one line.

    Encoded with every batch of steps while it grows, so its columns are kept as text.

    Args:
        step: the first step.
        gap_us: microseconds between the end of the step before it and its start.
    """

    def __init__(self, step: StepMark, gap_us: int) -> None:
        self._first, self._last = step, step
        self._by = 0
        self._count = 0
        self._columns = {"us": "", "gap_us": "", "data_us": ""}
        self._filled = {"us"}  # columns with a number that is not 0
        self._encoded = b""
        self._append(step, gap_us)

    def add(self, step: StepMark, gap_us: int) -> bool:
        """Adds a step; False if it needs another line."""
        by = step.number - self._last.number
        fits = by == (self._by or by) and step.cost == self._first.cost
        if not fits or self._count >= MOST_STEPS:
            return False
        self._by, self._last = by, step
        self._append(step, gap_us)
        return True

    def _append(self, step: StepMark, gap_us: int) -> None:
        self._encoded = b""
        self._count += 1
        for name, number in (("us", step.us), ("gap_us", gap_us), ("data_us", step.data_us)):
            self._columns[name] += f",{number}"
            if number:
                self._filled.add(name)

    def encode(self) -> bytes:
        """The encoded line."""
        if not self._encoded:
            self._encoded = self._line()
        return self._encoded

    def _line(self) -> bytes:
        first = self._first
        values: dict[str, Any] = {"first": first.number}
        if self._by > 1:
            values["by"] = self._by
        kind, optimal, executed = first.cost
        known = {"kind": kind, "optimal_s": optimal, "executed_s": executed}
        values |= {name: value for name, value in known.items() if value not in ("step", None)}
        columns = [
            f',"{name}":[{text[1:]}]'
            for name, text in self._columns.items()
            if name in self._filled
        ]
        head = line("steps", self._last.end, values)
        return head[: -len(_END)] + "".join(columns).encode() + _END


def line(event: str, at: Moment, values: Mapping[str, Any] | None = None) -> bytes:
    """One event as a line."""
    head = {"e": event, "t": round(at[0], 6), "m": round(at[1], 6)}
    return _as_json({**head, **(values or {})}).encode() + b"\n"


def alive_head(t: float, m: float) -> bytes:
    """The beginning of `alive_line`, always of the same length."""
    us = int(1e6 * t), int(1e6 * m)
    return _ALIVE % (*divmod(us[0], 1_000_000), *divmod(us[1], 1_000_000))


def alive_line(at: Moment, wait_seconds: float, silence_seconds: float) -> bytes:
    """A line that the process is alive; of fixed length, so that one can replace another."""
    return alive_head(*at) + _ALIVE_REST % (int(1e6 * wait_seconds), int(1e6 * silence_seconds))


def journal_name(metrics_name: str, index: int) -> str:
    """The journal's name beside a metrics file.

    >>> journal_name("metrics.jsonl", 0)
    'metrics.jsonl.journal.0.jsonl'
    """
    return f"{metrics_name}.journal.{index}.jsonl"
