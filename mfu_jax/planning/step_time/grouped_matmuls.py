"""Grouped matmuls of dropless experts: each group of rows times its own matrix, tile by tile.

Such a kernel (megablox's, or XLA's own for ``ragged_dot``) visits a list of tiles that is made
before it runs: a tile of rows shared by two groups is listed once for each of them. It multiplies
whole tiles: if the tile size does not divide a dimension, the last tile is as long as the others,
and a tile takes whole matrix units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts
from mfu_jax.util.values import typed

_OF_MATRICES, _ROWS, _LIST = 3, 2, 1  # dimensions; of matrices: groups, in, out
_BYTES = 2  # of a number in bfloat16


def visited_share(record: InstructionRecord, unit: int = 1) -> float | None:
    """Multiplied elements over useful ones in a grouped kernel, which visits tiles more than once.

    None for other kernels. A grouped kernel's operands are the groups' offsets [groups + 1], the
    group and the tile of rows of each step [tiles + groups − 1], and the rows.

    Args:
        record: the instruction.
        unit: rows, and columns, of a matrix unit, which multiplies as much of the matrices at once.
    """
    found = _tiles(record)
    if found is None:
        return None
    filled = math.prod(_filled(width, unit) for width in _widths(record))
    return found.visited / found.filled * filled


def _widths(record: InstructionRecord) -> tuple[int, ...]:
    """In and out of a grouped kernel's matrices [groups, in, out]; empty if it has none."""
    arrays = (*record.shape.operand_arrays, *record.shape.results)
    return next((a.dims[1:] for a in arrays if len(a.dims) == _OF_MATRICES), ())


def _filled(width: int, unit: int) -> float:
    """A width in whole matrix units, over itself (scaling book, "How to think about TPUs")."""
    return math.ceil(width / unit) * unit / width


class _Tiles(NamedTuple):
    groups: int
    rows: int
    filled: int
    visited: int


def _tiles(record: InstructionRecord) -> _Tiles | None:
    arrays = record.shape.operand_arrays
    lists = [a.dims[0] for a in arrays if a.dtype == "s32" and len(a.dims) == _LIST]
    rows = next((a.dims[0] for a in arrays if len(a.dims) == _ROWS and a.dtype != "s32"), 0)
    for offsets, groups_of, tiles_of in zip(lists, lists[1:], lists[2:], strict=False):
        filled = groups_of - offsets + 2
        if offsets > 1 and groups_of == tiles_of and filled > 0 and rows % filled == 0 and rows:
            return _Tiles(offsets - 1, rows, filled, groups_of)
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


class Grid(NamedTuple):
    """A grouped kernel's grid in a run's tiles.

    Attributes:
        steps: of the grid, to the last row that is in a group.
        visited: multiplied elements over useful ones.
        bytes: that its steps copy between HBM and VMEM.
    """

    steps: float
    visited: float
    bytes: float


_PASSES = ("fwd", "dlhs", "drhs")
_MATRICES = ("wi", "wo")


class Tile(NamedTuple):
    """Tile size in rows, in the model's width, and in the hidden width."""

    rows: int = 512
    embed: int = 1024
    mlp: int = 1024


# MaxText's names for the three, older ones last.
_FIELDS = (
    ("batch_seq",),
    ("embed_dim", "activation_dim"),
    ("mlp_dim", "weight_dim"),
)


@dataclass(frozen=True, kw_only=True)
class KernelTiles:
    """The tiles of one run.

    Attributes:
        emb_dim: the model's width.
        tiles: by matrix and pass: ``wi_fwd``.
    """

    emb_dim: int
    tiles: Mapping[str, Tile]

    def visited_share(self, record: InstructionRecord, unit: int = 1) -> float | None:
        """As the function `visited_share`, in these tiles."""
        grid = self.grid(record, unit)
        return grid.visited if grid else None

    def grid(self, record: InstructionRecord, unit: int = 1) -> Grid | None:
        """The grid of a grouped kernel; None for other kernels.

        A step copies its tiles of the operands, but not one that it shares with the step before:
        matrices whole in the contracted dimension stay for all rows of a group. A result is
        written once it is summed.
        """
        found, widths = _tiles(record), _widths(record)
        if found is None or not widths:
            return None
        matrix, which = "wo" if "/wo/" in record.op_name else "wi", _pass(record)
        tile = self.tiles[f"{matrix}_{which}"]
        sizes = [min(n, tile.embed if n == self.emb_dim else tile.mlp) for n in widths]
        counts = [math.ceil(n / size) for n, size in zip(widths, sizes, strict=True)]
        rows = math.ceil(found.rows / tile.rows) + found.groups - 1
        visited = rows * tile.rows / found.rows
        for n, size, count in zip(widths, sizes, counts, strict=True):
            visited *= count * size / n * _filled(size, unit)
        own = min(1.0, record.flops / (2 * found.rows * math.prod(widths)))  # without_skipped_rows
        steps, per_group = own * rows * math.prod(counts), found.groups / rows
        whole = math.prod(sizes)
        if which == "drhs":
            numbers = tile.rows * sum(sizes) + whole * per_group
        else:
            contracted = 1 if which == "dlhs" else 0
            passes = counts[contracted]
            numbers = tile.rows * (sizes[contracted] + sizes[1 - contracted] / passes)
            numbers += whole * (1 if passes > 1 else per_group)
        return Grid(steps, visited, steps * numbers * _BYTES)


def tiles_of_run(keys: Mapping[str, str], emb_dim: int) -> KernelTiles | None:
    """The tiles set by a run's MaxText keys; None if its kernels choose their own.

    Raises:
        UserError: a size is not a number.
    """
    if keys.get("sparse_matmul") == "false":
        return None
    if keys.get("use_tokamax_gmm") == "true" and not any("_tile_" in key for key in keys):
        return None
    names = [f"{matrix}_{which}" for matrix in _MATRICES for which in _PASSES]
    return KernelTiles(emb_dim=emb_dim, tiles={name: _tile(keys, name) for name in names})


def _tile(keys: Mapping[str, str], name: str) -> Tile:
    matrix, _, which = name.partition("_")
    heads = (f"{matrix}_tile_{which}_", f"tile_{which}_", "tile_")
    sizes = dict(zip(Tile._fields, Tile(), strict=True))
    for field, ends in zip(Tile._fields, _FIELDS, strict=True):
        given = (head + end for head in heads for end in ends if head + end in keys)
        if key := next(given, ""):
            sizes[field] = max(1, typed(key, keys[key], int))
    return Tile(**sizes)


def _pass(record: InstructionRecord) -> str:
    """A kernel's pass: weight gradients return matrices; row gradients are in the backward pass."""
    if any(len(array.dims) == _OF_MATRICES for array in record.shape.results):
        return "drhs"
    return "dlhs" if record.phase == "backward" else "fwd"
