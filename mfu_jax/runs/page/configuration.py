"""Settings of the runs and where they differ, and the last record of each run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mfu_jax.pages.document import quiet, section
from mfu_jax.pages.markup import Markup
from mfu_jax.pages.tables import Column, Word, table, wide
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import loss_text

_MOST_METRICS = 150
_MOST_NOTES = 60
_LONGEST = 2000  # characters of a setting
_FIELDS = ("step", "kind", "unix_seconds", "notes", "flags")


class _Setting(NamedTuple):
    name: str
    texts: tuple[str, ...]


def configuration(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Markup]:
    """Where the runs differ, and all settings of each.

    Args:
        runs: one or more.
        names: of the runs.
    """
    facts = [run.setup.facts for run in runs]
    keys = list(dict.fromkeys(key for found in facts for key in found))
    settings = [
        _Setting(key, tuple(f.get(key, "not logged")[:_LONGEST] for f in facts)) for key in keys
    ]
    if not settings:
        return
    if len(runs) > 1:
        different = [s for s in settings if len(set(s.texts)) > 1]
        words = quiet("All logged settings are the same.")
        shown = wide(_table(different, names, "difference")) if different else words
        yield section("Where the runs differ", shown)
    yield section("Configuration", wide(_table(settings, names, "setting")))


def _table(settings: Sequence[_Setting], names: Sequence[str], by: str) -> Markup:
    columns = [_column(i, name) for i, name in enumerate(names)]
    return table(by, settings, lambda setting: setting.name, columns, most=400)


def _column(place: int, name: str) -> Word[_Setting]:
    return Word(name or "value", lambda setting: setting.texts[place])


def record_notes(run: RunData, name: str) -> Iterator[Markup]:
    """The notes in the records, latest first: slow hosts, alarms, recompilations.

    Args:
        run: the run to show.
        name: of the run, if there are several.
    """
    found = [(f"step {step}", words) for step, words in run.metrics.notes.items() if words]
    if found:
        columns: list[Word[tuple[str, str]]] = [Word("note", lambda row: row[1])]
        body = table("step", found[::-1], lambda row: row[0], columns, most=_MOST_NOTES)
        yield section(f"What the records say{name}", wide(body))


def last_record(run: RunData, name: str) -> Iterator[Markup]:
    """Every metric of the last record, for metrics without a curve.

    Args:
        run: the run to show.
        name: of the run, if there are several.
    """
    yield from _metrics("All metrics of", run.metrics.last_record, name)


def last_gpus(run: RunData, name: str) -> Iterator[Markup]:
    """The last reading of the devices, because not every record has one.

    Args:
        run: the run to show.
        name: of the run, if there are several.
    """
    kind = "GPUs" if any(key.startswith("gpu/") for key in run.metrics.gpu) else "TPUs"
    yield from _metrics(f"{kind} at", run.metrics.gpu, name)


def _metrics(title: str, record: Mapping[str, Any], name: str) -> Iterator[Markup]:
    found = [
        (key, float(value))
        for key, value in record.items()
        if key not in _FIELDS and _is_number(value)
    ]
    if found:
        columns: list[Column[tuple[str, float]]] = [
            Column("value", lambda r: _finite(r[1]), lambda r: _text(r[1]))
        ]
        body = table("metric", found, lambda row: row[0], columns, most=_MOST_METRICS)
        yield section(f"{title} step {record.get('step', '')}{name}", wide(body))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: float) -> str:
    return f"{value:,.6g}" if abs(value) >= 1000 else loss_text(value, decimals=4)
