"""Horizontal bars of one whole, each with its numbers: where a peak, a step or a day went."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.pages.markup import Markup, number, tag


class BarRow(NamedTuple):
    """One bar.

    Attributes:
        name: at its left.
        kind: its style-sheet class.
        points: its length, in percent of the whole.
        seconds: None: no time is shown.
        time: the same for display.
        share: `points` for display, if not as a percentage.
        note: below the bar.
        meaning: of the name, shown when the pointer rests on it.
    """

    name: str
    kind: str
    points: float
    seconds: float | None = None
    time: str = ""
    share: str = ""
    note: str = ""
    meaning: str | None = None


def bars(rows: Sequence[BarRow], label: str, *, whole: BarRow | None = None) -> Markup:
    """The bars, each from where the last one ended.

    Args:
        rows: in display order.
        label: what they show, for screen readers.
        whole: a bar above them, which they divide.
    """
    begins = itertools.accumulate((row.points for row in rows), initial=0.0)
    found = [] if whole is None else [_bar(whole, 0.0)]
    found += map(_bar, rows, begins)
    return tag("div", *found, class_="bars", role="table", aria_label=label)


def _bar(row: BarRow, begin: float) -> Markup:
    ends = sorted(max(0.0, min(100.0, at)) for at in (begin, begin + row.points))
    fill = f"left:{number(ends[0])}%;width:{number(ends[1] - ends[0])}%"
    share = row.share or f"{row.points:.1f}%"
    mark = tag("i", class_=row.kind, style=fill) if row.points else None
    return tag(
        "div",
        tag("span", row.name, class_="name", role="rowheader", title=row.meaning),
        tag("span", mark, class_="track", aria_hidden="true"),
        tag("span", row.time, class_="n", role="cell", data_seconds=row.seconds),
        tag("span", share, class_="n", role="cell", data_points=row.points),
        tag("small", row.note, role="cell", class_="most") if row.note else None,
        class_="bar",
        role="row",
        data_bar=row.name,
    )
