"""Grouped matmuls of dropless experts: each group of rows times its own matrix, tile by tile.

Such a kernel (megablox's, or XLA's own for ``ragged_dot``) visits a list of tiles that is made
before it runs: a tile of rows shared by two groups is listed once for each of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts

_ROWS, _LIST = 2, 1  # dimensions


def visited_share(record: InstructionRecord) -> float | None:
    """Tiles that a grouped kernel visits, over those that its rows fill.

    None for other kernels. A grouped kernel's operands are the groups' offsets [groups + 1], the
    group and the tile of rows of each step [tiles + groups − 1], and the rows.
    """
    found = _tiles(record)
    return found.visited / found.filled if found else None


def grouped_rows(record: InstructionRecord) -> int | None:
    """Rows of a grouped kernel; None for other kernels."""
    found = _tiles(record)
    return found.rows if found else None


class _Tiles(NamedTuple):
    rows: int
    filled: int
    visited: int


def _tiles(record: InstructionRecord) -> _Tiles | None:
    arrays = record.shape.operand_arrays
    lists = [a.dims[0] for a in arrays if a.dtype == "s32" and len(a.dims) == _LIST]
    rows = next((a.dims[0] for a in arrays if len(a.dims) == _ROWS and a.dtype != "s32"), 0)
    for offsets, groups_of, tiles_of in zip(lists, lists[1:], lists[2:], strict=False):
        filled = groups_of - offsets + 2
        if groups_of == tiles_of and filled > 0 and rows % filled == 0 and rows:
            return _Tiles(rows, filled, groups_of)
    return None


def without_skipped_rows(costs: ProgramCosts, own_rows: float) -> ProgramCosts:
    """Costs in which grouped kernels multiply only rows that are in a group.

    Args:
        costs: costs by the kernels' shapes.
        own_rows: share of such rows where a device gathers the rows of all experts but has only
            some experts: the kernel ends after its last group.
    """
    records, flops = dict(costs.records), Counter(costs.executed.by_dtype)
    for name, record in costs.records.items():
        if own_rows < 1 and visited_share(record) is not None:
            own = {dtype: round(n * own_rows) for dtype, n in record.flops_by_dtype.items()}
            records[name] = replace(record, flops_by_dtype=own)
            for dtype, whole in record.flops_by_dtype.items():
                flops[dtype] -= record.runs * (whole - own[dtype])
    return replace(costs, records=records, executed=replace(costs.executed, by_dtype=flops))
