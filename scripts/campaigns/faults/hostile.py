"""Hostile arguments and files, drawn by hypothesis, for every command of `mfu-jax`."""

from __future__ import annotations

from collections import defaultdict

from scripts.campaigns.faults.rows import FaultRow
from tests.support.hostile import Result, hostile_inputs


def rows(count: int, seed: int) -> list[FaultRow]:
    """One row per kind of input."""
    by_kind: defaultdict[str, list[Result]] = defaultdict(list)
    for result in hostile_inputs(seed, count):
        by_kind[result.case.kind].append(result)
    return [_row(kind, results) for kind, results in by_kind.items()]


def _row(kind: str, results: list[Result]) -> FaultRow:
    row = FaultRow(f"hostile {kind} on the command line", count=len(results))
    slowest = max(result.seconds for result in results)
    largest = max(result.growth_bytes for result in results)
    row.lost = f"one line, at most {slowest:.1f} s and {largest / 2**20:.0f} MiB"
    row.failures = [
        f"{' '.join(result.argv)[:80]}: {text[:80]}"
        for result in results
        for text in result.failures
    ]
    return row
