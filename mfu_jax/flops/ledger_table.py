"""The ledger as a table: one list of rows, as text for the console and read back from a log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mfu_jax.util.formatting import columns

# What `render_rows` writes: at least two spaces between columns.
_LINE = re.compile(
    r"  (?P<label>\S.*?) {2,}(?P<flops>-?[\d,]+)(?: +-?[\d.]+%)?(?: {2,}(?P<note>.*))?"
)


class LedgerRow(NamedTuple):
    """One row: its FLOPs on one device, None if unknown, and what they are."""

    label: str
    flops: int | None
    note: str = ""

    def cells(self, executed: int) -> tuple[str, str, str, str]:
        """The row as text; `executed` are all FLOPs that the program runs."""
        number = "-" if self.flops is None else f"{self.flops:,}"
        known = executed and self.flops is not None
        share = f"{self.flops / executed:z.2%}" if known and self.flops is not None else ""
        return self.label, number, share, self.note


def head(unit: str) -> tuple[str, str, str, str]:
    """The column headings; `unit` is what the FLOPs are of: a step, or a call."""
    return f"FLOPs per {unit} per device", "FLOPs", "of executed", ""


def render_rows(rows: Iterable[LedgerRow], executed: int, unit: str) -> list[str]:
    """The lines of the console's table; see `head`."""
    cells = (head(unit), *(row.cells(executed) for row in rows))
    return columns([(f"  {label}", *rest) for label, *rest in cells], "<>><")


def read_rows(text: str) -> Iterator[LedgerRow]:
    """The rows with a number in a text that `render_rows` wrote."""
    for line in text.splitlines():
        if found := _LINE.fullmatch(line):
            yield LedgerRow(
                found["label"], int(found["flops"].replace(",", "")), found["note"] or ""
            )
