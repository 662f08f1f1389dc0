"""A table and a chart for a notebook cell: small, without scripts, in the notebook's colors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from mfu_jax.pages.markup import Markup, number, raw, tag

_MOST_ROWS = 200
_STYLE = """
.mfu-jax { overflow-x: auto; font-size: 13px }
.mfu-jax table { margin: 0; border-collapse: collapse; font-variant-numeric: tabular-nums }
.mfu-jax caption { text-align: left; font-weight: 600; padding: 4px 0 }
.mfu-jax th, .mfu-jax td { padding: 2px 10px 2px 0; text-align: right; background: none }
.mfu-jax th { font-weight: 400; border-bottom: 1px solid currentColor }
.mfu-jax tbody th { border: 0 }
.mfu-jax .word, .mfu-jax tbody th { text-align: left }
.mfu-jax td + .word { padding-left: 10px }
.mfu-jax td[style] { min-width: 160px; background: linear-gradient(90deg,
  transparent var(--from, 0%), color-mix(in srgb, currentColor 18%, transparent) 0 var(--share),
  transparent 0) }
.mfu-jax p { opacity: .75; margin: 2px 0 }
.mfu-jax figure { margin: 8px 0; max-width: 480px }
.mfu-jax svg { font: 12px system-ui, sans-serif; fill: currentColor }
.mfu-jax .grid { stroke: currentColor; stroke-opacity: .2 }
.mfu-jax .curve { fill: none; stroke: currentColor; stroke-width: 1.5 }
.mfu-jax .band { fill-opacity: .18 }
"""


def fragment(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Sequence[int] = (),
    notes: Sequence[str] = (),
    bars: Sequence[tuple[float, float]] = (),
    chart: Markup | None = None,
) -> str:
    """A table as HTML, with its own style.

    Args:
        title: shown above the table.
        head: column headings; the first column names the rows.
        rows: one cell per column; the first 200 rows are shown.
        words: indices of other columns that hold words, not numbers.
        notes: lines below the table.
        bars: where the bar behind each row's last cell begins and ends, in percent of the cell; by
            default behind each share of the whole, from 0.
        chart: shown below the table.
    """
    kinds = ["word" if place in {0, *words} else None for place in range(len(head))]
    cells = list(islice(rows, _MOST_ROWS + 1))
    notes = [*notes, "…"] if len(cells) > _MOST_ROWS else notes
    behind: Iterable[tuple[float, float] | None] = bars or repeat(None)
    shown = zip(cells[:_MOST_ROWS], behind, strict=False)
    table = tag(
        "table",
        tag("caption", title),
        tag("thead", _row(["th"] * len(head), head, kinds)),
        tag("tbody", *(_row(["th", *["td"] * len(row)], row, kinds, bar) for row, bar in shown)),
    )
    lines = [tag("p", note) for note in notes]
    return str(tag("div", raw("style", _STYLE), table, *lines, chart, class_="mfu-jax"))


def _row(
    names: Sequence[str],
    cells: Sequence[str],
    kinds: Sequence[str | None],
    bar: tuple[float, float] | None = None,
) -> Markup:
    """Cells; behind a share of the whole is a bar of that length, or `bar` behind the last one."""
    styles = [_bar(*pair) for pair in zip(names, cells, strict=False)]
    if bar is not None:
        styles[-1] = "--from:{}%;--share:{}%".format(*map(number, sorted(bar)))
    parts = zip(names, cells, kinds, styles, strict=False)
    return tag("tr", *(tag(n, c, class_=kind, style=style) for n, c, kind, style in parts))


def _bar(name: str, cell: str) -> str | None:
    found = re.fullmatch(r"\d+(\.\d+)?%", cell)
    return f"--share:{cell}" if found and name == "td" else None
