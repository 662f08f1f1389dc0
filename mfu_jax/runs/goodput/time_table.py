"""The division of a run's wall clock as text."""

from __future__ import annotations

from mfu_jax.runs.goodput.run_time import CATEGORIES, Attempt, RunTime
from mfu_jax.util.formatting import columns, percent, span

_MOST_ATTEMPTS = 10


def render(run: RunTime) -> str:
    """Goodput, the time by category, and how the last processes ended."""
    if not run.has_run_log or run.wall_seconds is None:
        return "\n".join(f"  note         {note}" for note in run.notes)
    processes = "1 process" if not run.restarts else f"{run.restarts + 1} processes"
    if len(run.processes) > 1:
        processes += f" (number {run.processes[0].name} of the job's {len(run.processes)})"
    lines = [
        f"  wall clock   {span(run.wall_seconds)} in {processes}: "
        f"goodput {percent(run.goodput)}, effective MFU {percent(run.effective_mfu)}",
        f"  steps        {run.steps} counted, {run.lost_steps} lost (done again)",
        *(f"  {line}" for line in _table(run)),
        *(f"  {line}" for line in _attempts(run)),
        *(f"  note         {note}" for note in run.notes),
    ]
    return "\n".join(lines)


def _table(run: RunTime) -> list[str]:
    wall = run.wall_seconds or 1.0
    rows = [
        [name, span(seconds), percent(seconds / wall), CATEGORIES[name].ml_goodput]
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
