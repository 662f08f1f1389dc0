"""Settings of the runs, where they differ, and the last record of each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mfu_jax.pages.document import folded, quiet, section
from mfu_jax.pages.markup import Markup
from mfu_jax.pages.tables import Word, table
from mfu_jax.runs.page.columns import Cell, by_run, merged
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import counted, loss_text

_MOST_METRICS = 150
_MOST_NOTES = 60
_LONGEST = 2000  # characters of a setting
_FIELDS = ("step", "kind", "unix_seconds", "notes", "flags")
_NAMES = ("run", "settings", "run_name")  # of the run, and what the table has row by row


def configuration(runs: Mapping[str, RunData]) -> Iterator[Markup]:
    """Where the runs differ, or what differs from its default; all other settings folded.

    Args:
        runs: by name.
    """
    facts = [run.setup.facts for run in runs.values()]
    keys = [key for key in dict.fromkeys(k for found in facts for k in found) if key not in _NAMES]
    if not keys:
        return

    def shown(by: str, some: Sequence[str]) -> Markup:
        rows = [{key: (None, _setting(found, key)) for key in some} for found in facts]
        return by_run(by, merged(rows), list(runs), has_words=True, most=400)

    if len(runs) > 1:
        first = [key for key in keys if len({_setting(found, key) for found in facts}) > 1]
        title, others = "Where the runs differ", "settings that are the same"
    else:
        of_setup = {key for run in runs.values() for key in run.setup.values}
        chosen = {key for run in runs.values() for key in run.setup.chosen}
        first = [key for key in keys if key in chosen | of_setup] if chosen else keys
        title, others = "Configuration", "settings at their defaults"
    rest = [key for key in keys if key not in first]
    yield section(
        title,
        shown("setting", first) if first else quiet("All logged settings are the same."),
        folded(f"{len(rest)} {others}", shown("same", rest)) if rest else None,
    )


def _setting(facts: Mapping[str, str], key: str) -> str:
    return facts.get(key, "not logged")[:_LONGEST]


def record_notes(runs: Mapping[str, RunData]) -> Iterator[Markup]:
    """The notes in the records, latest first: slow hosts, alarms, recompilations.

    Args:
        runs: by name.
    """
    found = [
        (f"{name} step {step}" if len(runs) > 1 else f"step {step}", words)
        for name, run in runs.items()
        for step, words in list(run.metrics.notes.items())[::-1]
        if words
    ]
    if found:
        columns: list[Word[tuple[str, str]]] = [Word("note", lambda row: row[1])]
        body = table("step", found, lambda row: row[0], columns, most=_MOST_NOTES)
        yield section("What the records say", body)


def last_records(runs: Mapping[str, RunData]) -> Iterator[Markup]:
    """The last reading of the devices, and every metric of the last record, if it has no curve.

    Args:
        runs: by name.
    """
    readings = [run.metrics.gpu for run in runs.values()]
    kind = "GPUs" if any(k.startswith("gpu/") for found in readings for k in found) else "TPUs"
    yield from _metrics(f"{kind} at", readings, list(runs))
    yield from _metrics(
        "All metrics of", [r.metrics.last_record for r in runs.values()], list(runs)
    )


def _metrics(
    title: str, records: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[Markup]:
    rows = merged([dict(_numbers(record)) for record in records])
    if rows:
        steps = ", ".join(dict.fromkeys(str(r["step"]) for r in records if "step" in r))
        body = by_run("metric", rows, names, most=_MOST_METRICS)
        yield section(f"{title} step {steps}", folded(counted(len(rows), "metric"), body))


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    for key, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in _FIELDS and is_number:
            yield key, (value if math.isfinite(value) else None, _text(float(value)))


def _text(value: float) -> str:
    return f"{value:,.6g}" if abs(value) >= 1000 else loss_text(value, decimals=4)
