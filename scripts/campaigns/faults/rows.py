"""A row of the fault matrix."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class FaultRow:
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

    def shown(self) -> dict[str, str | float]:
        """Column → cell."""
        return {
            "fault": self.kind,
            "tried": self.count,
            "lost at most": self.lost,
            "promise broken": len(self.failures) or "never",
        }
