"""User-given lengths of groups and sequences, which are data in a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mfu_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths that a program reads from its data; empty if unknown.

    Attributes:
        group_sizes: rows of each group (expert) of a grouped matmul, on one device.
        sequence_lengths: keys of each sequence in paged attention.
    """

    group_sizes: tuple[int, ...] = ()
    sequence_lengths: tuple[int, ...] = ()

    @property
    def named(self) -> dict[str, tuple[int, ...]]:
        """As keyword arguments."""
        return {"group_sizes": self.group_sizes, "sequence_lengths": self.sequence_lengths}

    @classmethod
    def of(cls, group_sizes: Sequence[int] = (), sequence_lengths: Sequence[int] = ()) -> Lengths:
        """The lengths that a caller gave.

        Raises:
            UserError: one of them is not a sequence of whole numbers.

        >>> Lengths.of(group_sizes=[300, 0, 212])
        Lengths(group_sizes=(300, 0, 212), sequence_lengths=())
        """
        return cls(
            group_sizes=_checked("group_sizes", group_sizes, "rows per group"),
            sequence_lengths=_checked("sequence_lengths", sequence_lengths, "keys per sequence"),
        )


NO_LENGTHS = Lengths()


def _checked(name: str, values: Any, what: str) -> tuple[int, ...]:
    try:
        numbers = tuple(value.__index__() for value in values)
    except (AttributeError, TypeError):
        numbers = (-1,)
    if min(numbers, default=0) < 0:
        raise UserError(
            f"{name}={values!r}: expected the {what}, whole numbers of 0 or more",
            hint="usually one number for all, or an array that is traced; pass them as in "
            f"{name}=(128, 64)",
        )
    return numbers
