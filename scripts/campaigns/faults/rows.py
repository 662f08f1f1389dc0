"""A row of the fault matrix, and the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass
class Row:
    """The cost of one kind of fault.

    Attributes:
        kind: the fault, in words.
        count: number of trials.
        lost: the most that was observed to be lost, in words.
        failures: broken promises, one per line; empty: the promise held.
    """

    kind: str
    count: int = 0
    lost: str = "nothing"
    failures: list[str] = dataclasses.field(default_factory=list)

    def expect(self, holds: object, text: str) -> None:
        """Records a failure unless `holds`."""
        if not holds:
            self.failures.append(text)


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, followed by the failures."""
    rows = list(rows)
    lines = ["| fault | tried | lost at most | promise broken |", "|---|---|---|---|"]
    lines += [
        f"| {row.kind} | {row.count:,} | {row.lost} | {len(row.failures) or 'never'} |"
        for row in rows
    ]
    failures = [f"- {row.kind}: {text}" for row in rows for text in row.failures[:5]]
    return "\n".join([*lines, *(["", *failures] if failures else [])])
