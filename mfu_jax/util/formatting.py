"""Text for people: tables, and numbers with as many digits as they need."""

from __future__ import annotations

import math
import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TextIO

_LONGEST_NAME = 60
_LEAST_ROOM = 12  # columns of a folded cell
MOST_COLUMNS = 100
_STYLES = {
    **{"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"},
    **{"magenta": "35", "cyan": "36"},
}


def readable(value: float) -> str:
    """Three decimals, or enough for three significant digits of a small number.

    >>> [readable(x) for x in (12.5, 0.1234, 0.00213, 0.01, 0.00001, 0.0)]
    ['12.500', '0.123', '0.00213', '0.0100', '0.0000100', '0.000']
    """
    if 0.001 < value < 0.0999:  # typical step times
        return f"{value:#.3g}"
    if value == 0 or not math.isfinite(value) or abs(value) >= 0.1:
        return f"{value:.3f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def loss_text(value: float, *, decimals: int = 3) -> str:
    """A loss with three decimals, as in MaxText; very large or small ones by significant digits.

    >>> [loss_text(x) for x in (4.2111, 0.05, 0.0, 0.0000213, 205603758669824.0, float("nan"))]
    ['4.211', '0.050', '0.000', '2.13e-05', '2.05604e+14', 'nan']
    """
    if 0 < abs(value) < 0.001:
        return f"{value:.3g}"
    return f"{value:.6g}" if abs(value) >= 1e6 else f"{value:.{decimals}f}"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage, ``n/a`` if unknown.

    >>> [percent(x) for x in (0.4123, 1.5, 0.00031, -2.3e-9, None)]
    ['41.2%', '150.0%', '0.0310%', '0%', 'n/a']
    """
    if fraction is None:
        return "n/a"
    if 0 < abs(fraction) < 1e-6:
        return "0%"
    if 0 < abs(fraction) < 0.01:
        return f"{readable(100 * fraction)}%" if abs(fraction) < 0.001 else f"{100 * fraction:.2f}%"
    return f"{100 * fraction:.1f}%"


def seconds_text(seconds: float) -> str:
    """Seconds, milliseconds, microseconds or nanoseconds.

    >>> [seconds_text(s) for s in (1.5, 0.0123, 0.0000456, -0.25, 3.27e-10, 0)]
    ['1.500 s', '12.300 ms', '45.600 µs', '-250.000 ms', '0.327 ns', '0 s']
    """
    size = abs(seconds)
    if not size:
        return "0 s"
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))
    factor, unit = next((unit for unit in units if size * unit[0] >= 1), units[-1])
    return f"{seconds * factor:.3f} {unit}"


def span(seconds: float) -> str:
    """A span of time in its two largest units.

    >>> [span(s) for s in (0, 0.000031, 0.25, 75.0, 7260.0, 200_000.0)]
    ['0 s', '31 µs', '250 ms', '1 min 15 s', '2 h 1 min', '2 d 7 h']
    """
    if seconds < 1:
        number, unit = seconds_text(seconds).split()
        return f"{float(number):.3g} {unit}"
    if seconds < 60:
        return f"{seconds:.3g} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left, parts = round(seconds), []
    for name, size in units:
        count, left = divmod(left, size)
        parts.append(f"{count} {name}" if count else "")
    first = next(index for index, part in enumerate(parts) if part)
    return " ".join(part for part in parts[first : first + 2] if part)


def rounded_up(number: float) -> int:
    """A whole number with at most two digits that are not zero.

    >>> [rounded_up(n) for n in (0.2, 12, 12.1, 347, 5210)]
    [1, 12, 13, 350, 5300]
    """
    unit = 10 ** max(0, len(str(math.ceil(number))) - 2)
    return max(1, math.ceil(number / unit) * unit)


def printable(text: str) -> str:
    """Text on one line, without control characters, which traces and metrics may contain.

    >>> printable("two\\n lines\\x1b")
    'two lines�'
    """
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def short(name: str) -> str:
    """A name on one line, its last 60 characters: scopes and paths of one tree begin alike.

    >>> short("gradient_accumulation/decoder/layers/self_attention/attention_op/qk_product")
    '…ation/decoder/layers/self_attention/attention_op/qk_product'
    """
    name = printable(name)
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def json_text(value: Any) -> str:
    """Strict JSON in ASCII; NaN and infinities, which JSON lacks, become strings.

    >>> print(json_text({"mfu": float("nan"), "steps": [1, 0.5]}))
    {
     "mfu": "NaN",
     "steps": [
      1,
      0.5
     ]
    }
    """
    import json  # a tenth of the start-up time of a command that only prints a table

    return json.dumps(strict(value), indent=1, allow_nan=False)


def encodable(text: str) -> str:
    """`text` with lone surrogates escaped; line breaks are kept."""
    return text.encode("utf-8", "backslashreplace").decode()


def strict(value: Any) -> Any:
    """`value` without what JSON lacks: NaN and Inf at any depth become text.

    >>> strict({"a": [float("nan"), 1.0], 2: float("-inf")})
    {'a': ['NaN', 1.0], '2': '-Infinity'}
    """
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {encodable(str(name)): strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return value


def counted(number: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {word}{'s' * (number != 1)}"


def columns(
    rows: Sequence[Sequence[str]], alignment: str = "<>", *, width: int = 0, fold: int = 0
) -> list[str]:
    """Lines of a table: columns as wide as their widest cell, two spaces between them.

    Args:
        rows: cells by row, including the header; all rows have the same number of cells.
        alignment: ``<`` (left) or ``>`` (right) for each column; the last one also applies to all
            columns after it.
        width: most characters of a line; 0: any number.
        fold: the column whose long cells then go on in the lines below.

    >>> columns([["layer", "FLOPs"], ["mlp", "1,024"], ["attention", "8"]])
    ['layer      FLOPs', 'mlp        1,024', 'attention      8']
    >>> columns([["decoder/layers/mlp", "8"]], width=14)
    ['decoder/   8', '  layers/', '  mlp']
    """
    if width and rows:
        rows = [line for row in rows for line in _folded(row, fold, _room(rows, width, fold))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = alignment.ljust(len(widths), alignment[-1])
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def _room(rows: Sequence[Sequence[str]], width: int, fold: int) -> int:
    """What the other columns leave of a line."""
    widths = [max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)]
    return max(_LEAST_ROOM, width + widths[fold] - sum(widths))


def _folded(row: Sequence[str], fold: int, room: int) -> Iterator[list[str]]:
    """A row's lines; a long cell is broken between words, or after slashes."""
    cell = row[fold]
    is_path = " " not in cell
    text = cell.replace("/", "/ ") if is_path else cell
    lines = textwrap.wrap(text, room, subsequent_indent="  ", break_on_hyphens=False)
    if len(cell) <= room:
        lines = [cell]
    for i, line in enumerate(lines):
        part = line.replace("/ ", "/") if is_path else line
        yield [part if j == fold else "" if i else other for j, other in enumerate(row)]


class Paper(NamedTuple):
    """What lines are written on."""

    columns: int = MOST_COLUMNS
    is_terminal: bool = False
    has_colours: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Self:
        """Of a stream; a terminal may be narrower."""
        if not getattr(stream, "isatty", bool)():
            return cls()
        columns = shutil.get_terminal_size((MOST_COLUMNS, 0)).columns
        has_colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        return cls(min(columns, MOST_COLUMNS), True, has_colours)

    def paint(self, text: str, style: str) -> str:
        """The text in an ANSI style, such as ``bold red``."""
        codes = ";".join(_STYLES[word] for word in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m" if self.has_colours else text

    def wrap(self, text: str) -> str:
        """The text in lines of at most the width, all but the first indented."""
        return textwrap.fill(
            text,
            self.columns,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
