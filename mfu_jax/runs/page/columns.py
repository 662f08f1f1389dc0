"""Several runs as columns of one table, each with its colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mfu_jax.pages.document import color, folded, quiet, section
from mfu_jax.pages.markup import Markup, joined, tag
from mfu_jax.pages.tables import Column, Word, table
from mfu_jax.runs.comparison.intervals import CONFIDENCE
from mfu_jax.runs.comparison.runs import RunComparison, interval, signed
from mfu_jax.runs.page.ledgers import executed_flops
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.runs.report.verdict import wall_name
from mfu_jax.util.formatting import percent, span

Cell = tuple[float | None, str]
"""A value and its text."""

_NO_CELL: Cell = None, ""


class RunsRow(NamedTuple):
    """A row with one cell for each run."""

    name: str
    cells: tuple[Cell, ...]


def merged(runs: Sequence[Mapping[str, Cell]]) -> list[RunsRow]:
    """The rows of all runs; one that the first run lacks follows the row before it."""
    names: list[str] = []
    for run in runs:
        place = 0
        for name in run:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return [RunsRow(name, tuple(run.get(name, _NO_CELL) for run in runs)) for name in names]


def by_run(
    by: str,
    rows: Sequence[RunsRow],
    names: Sequence[str],
    *,
    titles: Sequence[str] = (),
    has_words: bool = False,
    most: int = 150,
) -> Markup:
    """A table with one column for each run; empty if it has no row.

    Args:
        by: what a row is.
        rows: in display order.
        names: of the runs.
        titles: of the columns, if they are not one for each run.
        has_words: whether the cells are words, not numbers.
        most: rows that are shown.
    """

    def column(place: int, title: str) -> Column[RunsRow] | Word[RunsRow]:
        if has_words:
            return Word(title, lambda row: row.cells[place][1])
        return Column(title, lambda row: row.cells[place][0], lambda row: row.cells[place][1])

    if not titles:
        titles = list(map(of_run, range(len(names)), names)) if len(names) > 1 else ["value"]
    columns = list(map(column, range(len(titles)), titles))
    return table(by, rows, lambda row: row.name, columns, most=most) if rows else joined([])


def of_run(place: int, name: str) -> Markup:
    """A run's name with its colour."""
    return tag("span", tag("i", class_=color(place)), name)


def comparison(found: Sequence[RunComparison], names: Sequence[str]) -> Iterator[Markup]:
    """The trimmed means of every run, and their changes from the first.

    Args:
        found: of the first run with each of the others.
        names: of all runs.
    """
    if not found:
        return
    first: dict[str, Cell] = {}
    others: list[dict[str, Cell]] = []
    titles: list[str] = [of_run(0, names[0])]
    for place, one in enumerate(found, 1):
        of = [(row.metric, row.difference) for row in one.rows]
        first |= {metric.title: (d.a, metric.text(d.a)) for metric, d in of}
        others.append({metric.title: (d.b, metric.text(d.b)) for metric, d in of})
        others.append({m.title: (d.change, f"{signed(d.change)} ({interval(d)})") for m, d in of})
        titles += [of_run(place, names[place]), f"from {names[0]}"]
    text = (
        f"Trimmed means of the measured steps, in which slow ones weigh less than in the means "
        f"above, and changes with their {CONFIDENCE:.0%} intervals."
    )
    body = by_run("metric", merged([first, *others]), names, titles=titles)
    yield section(f"Against {names[0]}", quiet(text), body)


def times(runs: Mapping[str, RunData]) -> Iterator[Markup]:
    """Where the wall clock of each run went."""
    rows = merged([dict(_times(run.time.time)) for run in runs.values()])
    if any(run.time.has_run_log for run in runs.values()):
        yield section("Where the wall clock went", by_run("category", rows, list(runs)))


def _times(time: Mapping[str, float]) -> Iterator[tuple[str, Cell]]:
    wall = sum(time.values())
    for category, seconds in time.items():
        if seconds:
            text = f"{span(seconds)} ({percent(seconds / wall)})"
            yield wall_name(category), (seconds, text)


def ledgers(runs: Mapping[str, RunData]) -> Iterator[Markup]:
    """The FLOPs of each run, from the model's to those that ran, and in every convention."""
    rows = merged([dict(_ledger(run)) for run in runs.values()])
    if rows:
        units = " or ".join(sorted({run.setup.unit for run in runs.values()}))
        body = by_run(f"FLOPs per {units} and device", rows, list(runs))
        yield section("From model FLOPs to what ran", body)
    rows = merged([dict(_conventions(run)) for run in runs.values()])
    if rows:
        note = quiet("MFU of the same steps and step times, counted as others count.")
        body = folded(f"{len(rows)} conventions", by_run("convention", rows, list(runs)))
        yield section("In every convention", note, body)


def _ledger(run: RunData) -> Iterator[tuple[str, Cell]]:
    executed = executed_flops(run)
    for row in run.setup.ledger:
        share = percent(row.flops / executed) if executed and row.flops is not None else ""
        yield row.label, (row.flops, "" if row.flops is None else f"{row.flops:,} ({share})")


def _conventions(run: RunData) -> Iterator[tuple[str, Cell]]:
    for name, (_, mfu) in run.conventions.items():
        yield name, (mfu, percent(mfu))
