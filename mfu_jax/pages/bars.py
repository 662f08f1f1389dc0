"""Horizontal bars of one whole, each with its numbers: where a peak, a step or a day went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.pages.markup import Markup, number, tag


class BarRow(NamedTuple):
    """One bar.

    Attributes:
        name: at its left.
        kind: its style-sheet class.
        begin: of the bar, in percent of the whole.
        points: its length, in percent of the whole.
        share: the same for display.
        seconds: None: no time is shown.
        time: the same for display.
        note: below the bar.
        meaning: of the name, shown when the pointer rests on it.
    """

    name: str
    kind: str
    begin: float
    points: float
    share: str
    seconds: float | None = None
    time: str = ""
    note: str = ""
    meaning: str | None = None


def bars(rows: Sequence[BarRow], label: str) -> Markup:
    """The bars, from the first to the last.

    Args:
        rows: in display order.
        label: what they show, for screen readers.
    """
    return tag("div", *map(_bar, rows), class_="bars", role="table", aria_label=label)


def _bar(row: BarRow) -> Markup:
    ends = sorted(max(0.0, min(100.0, at)) for at in (row.begin, row.begin + row.points))
    fill = f"left:{number(ends[0])}%;width:{number(ends[1] - ends[0])}%"
    mark = tag("i", class_=row.kind, style=fill) if row.points else None
    return tag(
        "div",
        tag("span", row.name, class_="name", role="rowheader", title=row.meaning),
        tag("span", mark, class_="track", aria_hidden="true"),
        tag("span", row.time, class_="n", role="cell", data_seconds=row.seconds),
        tag("span", row.share, class_="n", role="cell", data_points=row.points),
        tag("small", row.note, role="cell", class_="most") if row.note else None,
        class_="bar",
        role="row",
        data_bar=row.name,
    )
