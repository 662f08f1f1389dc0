"""Model operations that a program lacks, and operations that it has beyond the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

Operations = Mapping[str, int | Fraction]
"""FLOPs, keyed as `FlopCount.by_operation`."""
_MOST_NAMED = 4


def largest(operations: Operations) -> str:
    """The operations with most FLOPs, in words."""
    largest = sorted(operations.items(), key=lambda item: -item[1])
    named = [f"{name} ({round(flops):,})" for name, flops in largest[:_MOST_NAMED]]
    more = [f"{len(largest) - _MOST_NAMED} more"] if len(largest) > _MOST_NAMED else []
    return ", ".join(named + more)


def beyond(operations: Operations, others: Operations) -> dict[str, Fraction]:
    """By how much each operation exceeds the one of the same name."""
    differences = {name: Fraction(n) - others.get(name, 0) for name, n in operations.items()}
    return {name: flops for name, flops in differences.items() if flops > 0}


def common(operations: Operations, others: Operations) -> dict[str, Fraction]:
    """What both have of each operation."""
    both = {name: min(Fraction(n), Fraction(others.get(name, 0))) for name, n in operations.items()}
    return {name: flops for name, flops in both.items() if flops}


def missing_operations(
    model: Operations,
    executed: Operations,
    order: Callable[[str], int] = lambda name: 0,
) -> dict[str, Fraction]:
    """The operations of a model that a program lacks, with their FLOPs.

    Fusions and rewrites may give work a neighbour's name: a surplus under one name offsets a
    deficit under another of the same phase and scope, else of the same phase, else of any; of
    these, deficits low in `order` first.
    """
    balance = {
        name: Fraction(model.get(name, 0)) - Fraction(executed.get(name, 0))
        for name in sorted({**model, **executed}, key=order)
    }
    for kind in (_phase_and_scope, _phase, lambda _: ""):
        by_kind: dict[str, list[str]] = {}
        for name in balance:
            by_kind.setdefault(kind(name), []).append(name)
        for names in by_kind.values():
            _settle(balance, names)
    return {name: flops for name, flops in balance.items() if flops > 0}


def _phase(operation: str) -> str:
    return operation.split()[0]


def _phase_and_scope(operation: str) -> str:
    return operation.rpartition("/")[0] or _phase(operation)


def _settle(balance: dict[str, Fraction], names: list[str]) -> None:
    """Offsets surpluses under some names against deficits under others."""
    lacking = [name for name in names if balance[name] > 0]
    spare = [name for name in names if balance[name] < 0]
    totals = [sum((abs(balance[n]) for n in side), Fraction(0)) for side in (lacking, spare)]
    moved = min(totals)
    for side, sign in ((lacking, 1), (spare, -1)):
        rest = moved
        for name in side:
            taken = min(rest, abs(balance[name]))
            balance[name] -= sign * taken
            rest -= taken
