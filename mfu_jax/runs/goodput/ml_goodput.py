"""The log format of Google's ``ml-goodput-measurement`` (0.2.3), from our run logs.

Its log has one mapping per event, ordered by time; its cache reads them as JSON lines,
``<job>_timeline.jsonl``.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from mfu_jax.runs.goodput.attribution import AttemptOnRunClock

# The spans of Orbax's records; the first one covers the others.
_SAVE = (
    "checkpoint_manager_blocking",
    "checkpointer_blocking",
    "wait_for_prev",
    "get_old_steps",
)
_RESTORE = ("checkpoint_manager", "checkpointer")
_ROUNDED_US = 100  # the end of a step, and a pause that begins there


def events(job: str, attempts: Sequence[AttemptOnRunClock]) -> list[dict[str, Any]]:
    """All events of a run in the log's format, ordered by time.

    Args:
        job: the job's name.
        attempts: of one process, placed on the run's clock.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    for placed in attempts:
        if not placed.attempt.goes_on:
            found += _start(placed)
        found += _steps(placed)
        found += _pauses(placed)
    if attempts and attempts[-1].how == "clean":
        found.append((attempts[-1].end / 1e6, {"job_end_time": attempts[-1].end / 1e6}))
    found.sort(key=lambda event: event[0])
    return [{"job_name": job, **values} for _, values in found]


_TimedEvents = Iterator[tuple[float, dict[str, Any]]]


def _start(placed: AttemptOnRunClock) -> _TimedEvents:
    start = placed.start / 1e6
    yield start, {"job_start_time": start}
    if placed.attempt.blocks:
        yield start, {"training_prep_start_time": start}
        end = next(_begins(placed))[1]
        yield end, {"training_prep_end_time": end}


def _steps(placed: AttemptOnRunClock) -> _TimedEvents:
    for number, begin, waited in _begins(placed):
        if waited:
            yield begin - waited, {"data_loading_start_time": begin - waited}
            yield begin, {"data_loading_end_time": begin}
        yield begin, {"step_count": number, "step_start_time": begin}


def _begins(placed: AttemptOnRunClock) -> Iterator[tuple[int, float, float]]:
    """The number of each step, its start, and the wait for data before it."""
    for block in placed.attempt.blocks:
        ends = block.ends(placed.at(block.end_m))
        steps = enumerate(zip(ends, block.us, block.data_us, strict=True))
        for index, (end, us, waited) in steps:
            yield block.first + index * block.by, (end - us) / 1e6, waited / 1e6


def _pauses(placed: AttemptOnRunClock) -> _TimedEvents:
    for name, begin_m, end_m in placed.attempt.spans:
        begin = placed.at(begin_m) / 1e6
        end = placed.end / 1e6 if end_m is None else placed.at(end_m) / 1e6
        if name == "checkpoint" and end_m is not None:
            yield begin, _checkpoint(_last_before(placed, begin_m), "save", _SAVE, begin, end)
        elif name == "restore" and placed.attempt.restored is not None:
            yield begin, _checkpoint(placed.attempt.restored, "restore", _RESTORE, begin, end)
        elif name != "restore":
            kind = {"custom_badput_event_type": name}
            yield begin, {**kind, "custom_badput_event_start_time": begin}
            yield end, {**kind, "custom_badput_event_end_time": end}


def _checkpoint(
    step: int, event: str, spans: Sequence[str], begin: float, end: float
) -> dict[str, Any]:
    """A save or a restore, as Orbax logs it; the run log has only its total time."""
    values: dict[str, Any] = {"step": step, "event_type": event, "directory": ""}
    for index, name in enumerate(spans):
        values[f"{name}_start_time"] = begin
        values[f"{name}_duration_secs"] = 0.0 if index else end - begin
    return values


def _last_before(placed: AttemptOnRunClock, moment: float) -> int:
    """Number of the last step that ended before a time of the attempt's clock; -1: none."""
    last = -1
    for block in placed.attempt.blocks:
        ends = block.ends(round(1e6 * block.end_m))
        if not (ended := bisect.bisect_right(ends, 1e6 * moment + _ROUNDED_US)):
            break
        last = block.first + (ended - 1) * block.by
    return last
