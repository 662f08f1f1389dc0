"""What all campaigns share: the seed, promises that are tried many times, the exit code."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from scripts import results

_SHOWN_FAILURES = 5  # of a row


@dataclasses.dataclass
class Promise:
    """One promise, tried many times.

    Attributes:
        kind: what was tried, in words.
        count: number of trials.
        worst: the worst that was observed, in words.
        failures: broken promises, one per line.
        allowed: share of the trials that may fail.
    """

    kind: str
    count: int = 0
    worst: str = "nothing"
    failures: list[str] = dataclasses.field(default_factory=list)
    allowed: float = 0.0

    def expect(self, holds: object, text: str) -> None:
        """Records a failure unless `holds`."""
        if not holds:
            self.failures.append(text)

    @property
    def is_broken(self) -> bool:
        """Whether more trials failed than may."""
        return len(self.failures) > self.allowed * self.count

    def cells(self) -> results.Row:
        """Column → cell."""
        return {
            "tried": self.kind,
            "times": self.count,
            "at worst": self.worst,
            "promise broken": len(self.failures) or "never",
        }


def seeded(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a campaign, with ``--seed``.

    Args:
        doc: the campaign's docstring.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    return parser


def verdict(rows: Sequence[Promise]) -> int:
    """Prints the table and the first failures; the exit code, 1 if a promise was broken."""
    print("\n".join([results.table([row.cells() for row in rows]), *first_failures(rows)]))
    return int(any(row.is_broken for row in rows))


def first_failures(rows: Sequence[Promise]) -> list[str]:
    """Some broken promises of each row, a line each."""
    return [f"{row.kind}: {text}" for row in rows for text in row.failures[:_SHOWN_FAILURES]]
