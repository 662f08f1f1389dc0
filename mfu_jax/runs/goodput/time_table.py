"""The division of a run's wall clock as text."""

from __future__ import annotations

from mfu_jax.runs.goodput.ml_goodput import NAMES
from mfu_jax.runs.goodput.run_time import Attempt, RunTime
from mfu_jax.util.formatting import columns, percent, seconds_text

_MOST_ATTEMPTS = 10


def render(run: RunTime) -> str:
    """Goodput, the time by category, and how the last processes ended."""
    if not run.has_run_log or run.wall_seconds is None:
        return "\n".join(f"  note         {note}" for note in run.notes)
    processes = "1 process" if not run.restarts else f"{run.restarts + 1} processes"
    lines = [
        f"  wall clock   {span(run.wall_seconds)} in {processes}: "
        f"goodput {percent(run.goodput)}, effective MFU {percent(run.effective_mfu)}",
        f"  steps        {run.steps} counted, {run.lost_steps} lost (done again)",
        *(f"  {line}" for line in _table(run)),
        *(f"  {line}" for line in _attempts(run)),
        *(f"  note         {note}" for note in run.notes),
    ]
    return "\n".join(lines)


def span(seconds: float) -> str:
    """A span of time in its two largest units.

    >>> [span(s) for s in (0, 0.000031, 0.25, 75.0, 7260.0, 200_000.0)]
    ['0 s', '31 µs', '0.25 s', '1 min 15 s', '2 h 1 min', '2 d 7 h']
    """
    if seconds < 0.01:
        number, unit = seconds_text(seconds).split()
        return f"{float(number):.3g} {unit}"
    if seconds < 60:
        return f"{seconds:.3g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left, parts = round(seconds), []
    for name, size in units:
        count, left = divmod(left, size)
        parts.append(f"{count} {name}" if count else "")
    first = next(index for index, part in enumerate(parts) if part)
    return " ".join(part for part in parts[first : first + 2] if part)


def _table(run: RunTime) -> list[str]:
    wall = run.wall_seconds or 1.0
    rows = [
        [name, span(seconds), percent(seconds / wall), NAMES[name]]
        for name, seconds in run.time.items()
        if seconds > 0
    ]
    return columns([["", "time", "share", "ml-goodput-measurement"], *rows], "<>><")


def _attempts(run: RunTime) -> list[str]:
    """The last processes, a line each."""
    hidden = len(run.attempts) - _MOST_ATTEMPTS
    more = [f"… and {hidden} processes before:"] if hidden > 0 else []
    return [*more, *map(_attempt, run.attempts[-_MOST_ATTEMPTS:])]


def _attempt(attempt: Attempt) -> str:
    steps = "no step"
    if attempt.first_step is not None:
        steps = f"steps {attempt.first_step} to {attempt.last_step}"
    lost = f", {attempt.lost_steps} lost" if attempt.lost_steps else ""
    return (
        f"process {attempt.pid} on {attempt.host}: {span(attempt.end - attempt.start)}, "
        f"{steps}{lost}, {attempt.how}"
    )
