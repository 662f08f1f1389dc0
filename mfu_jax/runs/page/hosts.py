"""The hosts of a run: which is slow at what, and which are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mfu_jax.pages.document import notes, quiet, section
from mfu_jax.pages.markup import Markup
from mfu_jax.pages.tables import Column, Word, of_value, table
from mfu_jax.runs.report.collective_waits import CollectiveWait
from mfu_jax.runs.report.processes import JobProcess
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import seconds_text, short

_TIMES = {
    "step time": "step_time",
    "waits for device": "slack",
    "waits for data": "data",
    "Python": "python",
    "call": "dispatch",
    "garbage collector": "gc",
    "own work": "cpu",
    "no core": "starved",
    "stopped": "stopped",
}


def hosts(run: RunData) -> Iterator[Markup]:
    """The section; empty for a run of one process.

    Args:
        run: the run to show.
    """
    found = run.processes
    if found is None:
        return
    columns: list[Column[JobProcess] | Word[JobProcess]] = [
        Word("host", lambda host: host.name),
        Word("state", _state),
        of_value("last step", lambda host: host.step if host.step >= 0 else None, "{:,}".format),
        of_value("late", lambda host: host.late, seconds_text),
        *(of_value(title, _time(field), seconds_text) for title, field in _TIMES.items()),
    ]
    rows = table("process", found.processes, lambda one: str(one.process), columns)
    text = f"{found.summary}. Seconds are means of a step, over the last window."
    yield section("Hosts", quiet(text), notes(found.findings), rows)


def _time(field: str) -> Callable[[JobProcess], float | None]:
    return lambda host: host.times.get(field)


def _state(host: JobProcess) -> str:
    return "slow" if host.slow else "missing" if host.is_missing else ""


def collectives(run: RunData) -> Iterator[Markup]:
    """The section on a profile of several hosts; empty without one.

    Args:
        run: the run to show.
    """
    found = run.waits
    if found is None:
        return
    columns: list[Column[CollectiveWait]] = [
        of_value("step time", lambda host: host.step_seconds, seconds_text),
        of_value("in collectives", lambda host: host.collective_seconds, seconds_text),
        of_value("of it, waits", lambda host: host.wait_seconds, seconds_text),
    ]
    rows = table("host", found.hosts, lambda host: host.host, columns)
    text = (
        f"{len(found.hosts)} hosts, the one that is waited for first. Seconds are means of a step, "
        f"from the profile in {short(found.source)}."
    )
    yield section(
        "Waits in collectives",
        quiet(text),
        notes([found.finding] if found.finding else []),
        rows,
    )
