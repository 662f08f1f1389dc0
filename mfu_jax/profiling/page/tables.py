"""Tables of the page: sortable, the longest rows first, the rest as one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mfu_jax.formatting import percent, readable
from mfu_jax.profiling.page.markup import Markup, joined, tag
from mfu_jax.profiling.profile import Profile
from mfu_jax.profiling.render import seconds_text
from mfu_jax.profiling.tables import Row

_MOST_ROWS = 150
_DEEPEST = 4
_LONGEST_NAME = 200


class _Column(NamedTuple):
    title: str
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]


_COLUMNS = (
    _Column("time", lambda r: r.seconds, lambda r: seconds_text(r.seconds)),
    _Column("of step", lambda r: r.share_of_step, lambda r: percent(r.share_of_step)),
    _Column("runs", lambda r: r.runs, lambda r: f"{r.runs:g}"),
    _Column("GFLOP", lambda r: r.flops, lambda r: readable(r.flops / 1e9) if r.flops else "–"),
    _Column("MFU", lambda r: r.mfu, lambda r: percent(r.mfu) if r.flops else "–"),
    _Column("HFU", lambda r: r.hfu, lambda r: percent(r.hfu) if r.flops else "–"),
    _Column("MB", lambda r: r.hbm_bytes, lambda r: readable(r.hbm_bytes / 1e6)),
    _Column("bandwidth", lambda r: r.bandwidth_share, lambda r: percent(r.bandwidth_share)),
)


def scope_tables(profile: Profile, rows: Sequence[Row]) -> Markup:
    """The table by scope, once for each depth; the script shows one of them.

    Args:
        profile: what is shown.
        rows: of whole scopes.
    """
    found: list[tuple[int, Sequence[Row]]] = [(0, rows)]
    most = max((row.name.count("/") + 1 for row in rows), default=1)
    depths = range(1, min(most, _DEEPEST + 1))
    found += [(depth, profile.table("scope", depth=depth)) for depth in depths]
    choice = [tag("option", "all", value="0", selected="")]
    choice += [tag("option", str(depth), value=str(depth)) for depth in depths]
    select = tag("select", *choice, id="depth")
    tables = [row_table("scope", rows, depth=depth) for depth, rows in found]
    return joined([tag("p", tag("label", "depth of scopes ", select), class_="script"), *tables])


def row_table(by: str, rows: Sequence[Row], *, depth: int = 0) -> Markup:
    """A table of the longest rows.

    Args:
        by: what a row is.
        rows: the longest first.
        depth: of scopes; 0: all. Other depths are hidden at first.
    """
    head = tag("tr", *(_head(title) for title in (by, *(c.title for c in _COLUMNS), "bound by")))
    body = [_row(row) for row in rows[:_MOST_ROWS]]
    table = tag(
        "table",
        tag("thead", head),
        tag("tbody", *body),
        tag("tfoot", *_rest(rows[_MOST_ROWS:])),
        data_by=by,
        class_="rows",
    )
    hidden = "" if depth else None
    return tag("div", table, class_="wide", data_depth=str(depth), hidden=hidden)


def _head(title: str) -> Markup:
    return tag("th", tag("button", title, type="button"), scope="col")


def _row(row: Row) -> Markup:
    name = _shown(row.name) or "(no scope)"
    cells = [tag("th", tag("bdi", name), scope="row", title=name)]
    for column in _COLUMNS:
        cells.append(tag("td", column.text(row), data_value=column.value(row)))
    return tag("tr", *cells, tag("td", row.bound_by, class_="word"))


def _shown(name: str) -> str:
    """A name that fits, its end kept: scopes differ there."""
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _rest(rows: Sequence[Row]) -> Iterator[Markup]:
    if rows:
        seconds = sum(row.seconds for row in rows)
        share = sum(row.share_of_step for row in rows)
        cells = [tag("td", seconds_text(seconds), data_value=seconds)]
        cells.append(tag("td", percent(share), data_value=share))
        empty = [tag("td")] * (len(_COLUMNS) - 1)
        yield tag("tr", tag("th", f"rest: {len(rows):,} more", scope="row"), *cells, *empty)
