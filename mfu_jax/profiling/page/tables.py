"""The page's tables: sortable, longest rows first, the rest as one row."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.pages.markup import Markup, joined, tag
from mfu_jax.pages.tables import Column, Word, rest_row, table, wide
from mfu_jax.profiling.breakdown.tables import Row
from mfu_jax.profiling.profile import Profile
from mfu_jax.util.formatting import percent, readable, seconds_text

_DEEPEST = 4

_COLUMNS: tuple[Column[Row] | Word[Row], ...] = (
    Column[Row]("time", lambda r: r.seconds, lambda r: seconds_text(r.seconds)),
    Column[Row]("of step", lambda r: r.share_of_step, lambda r: percent(r.share_of_step)),
    Column[Row]("runs", lambda r: r.runs, lambda r: f"{r.runs:g}"),
    Column[Row]("GFLOP", lambda r: r.flops, lambda r: readable(r.flops / 1e9) if r.flops else "–"),
    Column[Row]("MFU", lambda r: r.mfu, lambda r: percent(r.mfu) if r.flops else "–"),
    Column[Row]("HFU", lambda r: r.hfu, lambda r: percent(r.hfu) if r.flops else "–"),
    Column[Row]("MB", lambda r: r.hbm_bytes, lambda r: readable(r.hbm_bytes / 1e6)),
    Column[Row]("bandwidth", lambda r: r.bandwidth_share, lambda r: percent(r.bandwidth_share)),
    Word[Row]("bound by", lambda r: r.bound_by),
)


def scope_tables(profile: Profile, rows: Sequence[Row]) -> Markup:
    """The table by scope, once per depth; the script shows one of them.

    Args:
        profile: the profile to show.
        rows: rows of whole scopes.
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
        rows: longest first.
        depth: depth of scopes; 0: whole scopes. Other depths are hidden at first.
    """
    body = table(
        by, rows, lambda row: row.name or "(no scope)", _COLUMNS, foot=_rest, kind="rows paths"
    )
    return wide(body, data_depth=str(depth), hidden="" if depth else None)


def _rest(rows: Sequence[Row]) -> Markup:
    seconds = sum(row.seconds for row in rows)
    share = sum(row.share_of_step for row in rows)
    cells = [tag("td", seconds_text(seconds), data_value=seconds)]
    cells.append(tag("td", percent(share), data_value=share))
    return rest_row(len(rows), *cells, *[tag("td")] * (len(_COLUMNS) - 2))
