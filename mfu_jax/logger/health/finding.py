"""What a watch reports about one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The findings for one step, usually empty.

    Attributes:
        scalars: metrics for the step's record.
        notes: sentences for a human; a record with one goes to all sinks.
    """

    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __add__(self, other: Health) -> Health:
        if not (other.scalars or other.notes):
            return self
        return Health(scalars={**self.scalars, **other.scalars}, notes=(*self.notes, *other.notes))


NOTHING = Health()
"""The empty result that almost every step has, made once."""
