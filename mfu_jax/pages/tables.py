"""Sortable tables that show the first rows, and the rest as one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from mfu_jax.pages.markup import Markup, tag
from mfu_jax.util.formatting import percent

MOST_ROWS = 150
_LONGEST_NAME = 200

RowT = TypeVar("RowT")


class Column(NamedTuple, Generic[RowT]):
    """A column of numbers.

    Attributes:
        title: its heading.
        value: a row's number, by which the column sorts; None: no number.
        text: that number formatted for display.
    """

    title: str
    value: Callable[[RowT], float | None]
    text: Callable[[RowT], str]


class Word(NamedTuple, Generic[RowT]):
    """A column of words."""

    title: str
    text: Callable[[RowT], str]


def of_value(
    title: str, value: Callable[[RowT], float | None], text: Callable[[float], str]
) -> Column[RowT]:
    """A column whose text is that of its value; ``n/a`` where there is none."""
    return Column(title, value, lambda row: "n/a" if (of := value(row)) is None else text(of))


def ledger_table(
    by: str, rows: Sequence[tuple[str, int | None, str]], executed: int | None
) -> Markup:
    """A FLOPs ledger.

    Args:
        by: what the FLOPs are of: the heading of the first column.
        rows: label, FLOPs and note of each row.
        executed: all FLOPs that the program runs.
    """

    def share(row: tuple[str, int | None, str]) -> float | None:
        return row[1] / executed if executed and row[1] is not None else None

    columns: list[Column[tuple[str, int | None, str]] | Word[tuple[str, int | None, str]]] = [
        Column("FLOPs", lambda row: row[1], lambda row: f"{row[1]:,}"),
        of_value("of executed", share, percent),
        Word("what it is", lambda row: row[2]),
    ]
    return table(by, rows, lambda row: row[0], columns, kind="ledger")


def table(
    by: str,
    rows: Sequence[RowT],
    name: Callable[[RowT], str],
    columns: Sequence[Column[RowT] | Word[RowT]],
    *,
    caption: str = "",
    most: int = MOST_ROWS,
    foot: Callable[[Sequence[RowT]], Markup] | None = None,
    kind: str = "rows",
) -> Markup:
    """A table that the reader can sort, with its own scroll bars, which the keyboard reaches.

    Args:
        by: what a row is: the heading of the first column.
        rows: in display order.
        name: a row's name.
        columns: all columns but the first.
        caption: above the table, where its section has several.
        most: how many rows are shown.
        foot: makes one row of all others; by default it says how many there are.
        kind: style-sheet classes: ``rows`` sorts, ``paths`` keeps the ends of long names.
    """
    heads = [_head(column.title, isinstance(column, Word)) for column in columns]
    head = tag("tr", _head(by), *heads)
    body = [_row(name(row), row, columns) for row in rows[:most]]
    rest = rows[most:]
    parts = [tag("caption", caption)] if caption else []
    parts += [tag("thead", head), tag("tbody", *body)]
    if rest:
        parts.append(tag("tfoot", foot(rest) if foot else rest_row(len(rest))))
    found = tag("table", *parts, data_by=by, class_=kind)
    return tag("div", found, class_="wide", tabindex="0", role="region", aria_label=caption or by)


def _head(title: str, is_word: bool = False) -> Markup:
    button = tag("button", title, type="button")
    return tag("th", button, scope="col", class_="word" if is_word else None)


def _row(name: str, row: RowT, columns: Sequence[Column[RowT] | Word[RowT]]) -> Markup:
    name = shown(name)
    cells = [tag("th", tag("bdi", name), scope="row", title=name)]
    for column in columns:
        if isinstance(column, Column):
            cells.append(tag("td", column.text(row), data_value=column.value(row)))
        else:
            cells.append(tag("td", column.text(row), class_="word"))
    return tag("tr", *cells)


def shown(name: str) -> str:
    """A name shortened to fit; its end is kept, because that is where paths differ."""
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def rest_row(count: int, *cells: Markup) -> Markup:
    """The row that stands for those not shown."""
    return tag("tr", tag("th", f"rest: {count:,} more", scope="row"), *cells)
