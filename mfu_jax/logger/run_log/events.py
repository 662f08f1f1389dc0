"""The events of a run log: what happened in a process, one JSON object per line.

A run has two kinds of files, each with a thread that writes it: ``metrics.jsonl``, in which every
line is a step's record, as pandas and MaxText's readers expect, and
``metrics.jsonl.events.N.jsonl``, with everything that happened in process N. Both only grow.

Every line has its kind under ``e``, its sequence number ``seq`` in the process's log, wall time
``t`` in seconds since 1970 and ``m`` in seconds since the machine booted, sleep included. ``us``
and ``…_us`` are whole microseconds.

``start``    version, process, processes, host, pid, boot, began_m (of the process), command,
             versions (package → version), commit (of the working folder's repository)
``steps``    consecutive ones: first (number), us (of each step), gap_us (before each), data_us (the
             part of that gap in which the device waited for data), kind (if not ``step``), and the
             seconds that one step takes at the peak: optimal_s, executed_s; t and m at the last
             step's end. Earlier versions wrote by, the stride of the numbers
``span``     name, t and m at its start; without us it begins, and a line with the same name and m
             and with us ends it. step and step_us of the step before it. Only a long ``data_wait``
             is written, and the next ``steps`` has its time, too
``restored`` step: the next one, after a checkpoint was restored
``back``     step: the next one; the process repeats the steps from there on
``compile``  spans: [m, us] of each
``alive``    nothing else was written for a while; between these, the file's mtime is set
``stop``     how: clean, a signal's name, or ``exception: …``
``logger``   log_period: a logger begins to record steps
``setup``    values, texts
``text``     step (the last before it), tag, text
``alarm``    step, text: what somebody should look at, as a hang
``failure``  step, reason: the exception that ended the loop
``summary``  the totals of the run
``hosts``    the result of an exchange of the job's processes
``behind``   sink, step: the sink has the records up to that one, and has fallen behind
``caught_up`` sink

Adding an event: its line here, its writer in `RunLog`, its reader in `mfu_jax.runs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 2

START, STEPS, SPAN, RESTORED, BACK = "start", "steps", "span", "restored", "back"
COMPILE, ALIVE, STOP = "compile", "alive", "stop"
LOGGER, SETUP, TEXT = "logger", "setup", "text"
ALARM, FAILURE, SUMMARY = "alarm", "failure", "summary"
HOSTS, BEHIND, CAUGHT_UP = "hosts", "behind", "caught_up"

DATA_WAIT = "data_wait"

# How often a process shows that it is alive: for this part of its age, within these limits.
_PART_OF_AGE = 1 / 800
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 1.0
# Longest time between two lines; a later mtime than this is that of a copy.
QUIET_SECONDS = 60.0

_as_json = json.JSONEncoder(separators=(",", ":"), default=str).encode

Moment = tuple[float, float]
"""Wall time and seconds since boot."""


class Event(NamedTuple):
    """Something that happened, besides a step's record.

    Attributes:
        kind: one of those above.
        at: when.
        values: its other fields.
        number: its place in the process's log, which the log sets.
    """

    kind: str
    at: Moment
    values: Mapping[str, Any]
    number: int = 0


def line(event: Event) -> bytes:
    """The line of an event."""
    t, m = (round(seconds, 6) for seconds in event.at)
    head = {"e": event.kind, "seq": event.number, "t": t, "m": m}
    return _as_json({**head, **event.values}).encode() + b"\n"


def events_name(metrics_name: str, index: int) -> str:
    """The name of a process's events file, beside a metrics file.

    >>> events_name("metrics.jsonl", 0)
    'metrics.jsonl.events.0.jsonl'
    """
    return f"{metrics_name}.events.{index}.jsonl"


def alive_seconds(age: float) -> float:
    """How often a process of that age shows that it is alive, in seconds.

    Twenty times a second date the kill of a process that lived for seconds to 0.03 s. A longer life
    needs fewer, but not by much: the errors of many kills add up in the time between processes.
    """
    return min(max(_SHORTEST_SECONDS, _PART_OF_AGE * age), _LONGEST_SECONDS)
