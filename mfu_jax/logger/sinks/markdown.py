"""The logger's texts as Markdown: values and tables become tables, all else is unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = re.compile(r" {2,}")
_PAIR = re.compile(r"[A-Za-z_]\w*=\S*")
_FEWEST_ROWS = 3


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header, and all are padded to the longest.

    >>> print(table_of([["name", "value"], ["peak", "2 | 3"]]))
    | name | value |
    |---|---|
    | peak | 2 \\| 3 |
    """
    width = max(len(row) for row in rows)
    full = [[*row, *[""] * (width - len(row))] for row in rows]
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in full]
    return "\n".join([lines[0], "|" + "---|" * width, *lines[1:]])


def values_as_markdown(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    return table_of([("name", "value"), *((key, str(value)) for key, value in values.items())])


def pairs_of(text: str) -> dict[str, str]:
    """The pairs in a text that is only ``key=value key=value …``; empty for any other text.

    >>> pairs_of("steps=80 run_name=demo"), pairs_of("an = b")
    ({'steps': '80', 'run_name': 'demo'}, {})
    """
    words = text.split()
    if not words or not all(_PAIR.fullmatch(word) for word in words):
        return {}
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def as_markdown(text: str) -> str:
    """A text as Markdown: pairs and aligned columns as tables, notes as lists, else a block."""
    if pairs := pairs_of(text):
        return values_as_markdown(pairs)
    lines = text.splitlines()
    if len(lines) < 2:
        return text
    title, rows, rest = _parts(lines)
    if len(rows) < _FEWEST_ROWS:
        return "\n".join(f"    {line}" for line in lines)
    parts = [title] if title else []
    parts += [table_of(_aligned(rows)), "\n".join(f"- {_escaped(line.strip())}" for line in rest)]
    return "\n\n".join(part for part in parts if part)


def _parts(lines: Sequence[str]) -> tuple[str, list[list[str]], list[str]]:
    """The title, the rows of one table, and the lines after it."""
    cells = [_COLUMNS.split(line.strip()) for line in lines]
    start = 0 if len(cells[0]) > 1 else 1
    end = start
    while end < len(cells) and len(cells[end]) > 1:
        end += 1
    return (lines[0] if start else ""), cells[start:end], list(lines[end:])


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pads short rows with empty cells before the last one, which is a remark."""
    width = max(len(row) for row in rows)
    result = []
    for row in rows:
        is_short = 2 < len(row) < width and not row[-1][-1:].isdigit() and row[-1][-1:] != "%"
        gap = [""] * (width - len(row)) if is_short and row is not rows[0] else []
        result.append([*row[:-1], *gap, row[-1]] if gap else list(row))
    return result


def _cell(text: str) -> str:
    return " ".join(_escaped(text).split())


def _escaped(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    plain = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", plain)
