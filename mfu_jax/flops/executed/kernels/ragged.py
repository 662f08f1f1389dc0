"""Kernels whose work depends on lengths that are data: grouped matmuls, paged attention.

The user may give the lengths. Otherwise, paged attention is counted as if every sequence
filled its pages, an upper bound.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, ScalarTable, UnknownBodyError
from mfu_jax.flops.executed.kernels.registry import KernelCall
from mfu_jax.util.formatting import counted

_PAGED_ATTENTION = re.compile(r"paged_(flash_)?attention")


class GroupedBody(NamedTuple):
    """A kernel with its groups' sizes.

    Attributes:
        body: the body, with the grid that they imply.
        tables: the tables that they imply, by operand.
        needed: FLOPs of the groups' products alone, without what fills up tiles; None if all.
        note: what the count assumes.
        inside: FLOPs of the visited tiles' rows, of which `needed` is a part, without what lies
            beyond the arrays; None if unknown.
    """

    body: KernelBody
    tables: dict[int, ScalarTable]
    needed: int | None = None
    note: str = ""
    inside: int | None = None


def of_given_groups(call: KernelCall, body: KernelBody) -> GroupedBody:
    """A grouped matmul with the grid and tables that `group_sizes` imply; others unchanged.

    The kernels of megablox, and XLA's own for `ragged_dot`, have one dynamic axis, the visits of a
    tile of rows by a group, and four tables: first rows of the groups [groups + 1], the group and
    the tile of each visit [tiles + groups − 1], and a group offset [1]. Those of tokamax have a
    loop instead of a grid, and the number of visits [1] as a table before the others.
    """
    sizes = call.lengths.group_sizes
    dynamic = [axis for axis, steps in enumerate(body.grid) if steps < 0]
    first = 0 if dynamic else 1  # of the four, among the body's tables
    tables = [shape.dims for shape in call.operands[1:5]]
    if len(dynamic or ["loop"]) != 1 or list(map(len, tables)) != [1] * 4:
        return GroupedBody(body, {})
    if len(body.tables) != 4 + first or (first and (body.grid or call.operand(0).dims != (1,))):
        return GroupedBody(body, {})
    if not sizes and call.literal(0) is not None:
        return GroupedBody(body, {})
    if not sizes:
        raise UnknownBodyError("its grid depends on the groups' sizes (give group_sizes=)")
    groups = math.prod(tables[0]) - 1
    tiles = math.prod(tables[1]) - groups + 1
    rows = call.operand(5).dims[0]
    check_sizes(sizes, groups, rows)
    tile = -(-rows // max(1, tiles))
    visited = visits(sizes, tile)
    grid = tuple(len(visited) if axis in dynamic else n for axis, n in enumerate(body.grid))
    first_rows = (0, *itertools.accumulate(sizes))
    made = {
        first: (tables[0], first_rows),
        first + 1: ((len(visited),), tuple(group for group, _ in visited)),
        first + 2: ((len(visited),), tuple(tile for _, tile in visited)),
        first + 3: ((1,), (0,)),
    }
    if first:
        made[0] = ((1,), (len(visited),))
    in_tiles = sum(min(tile, rows - number * tile) for _, number in visited)
    return GroupedBody(
        dataclasses.replace(body, grid=grid),
        made,
        needed_flops(call, groups, sum(sizes)),
        inside=needed_flops(call, groups, in_tiles),
    )


def check_sizes(sizes: Sequence[int], groups: int, rows: int) -> None:
    """Refuses sizes that the user gave for other groups than a kernel's.

    Raises:
        UnknownBodyError: there are more or fewer, or they have too many rows.
    """
    if len(sizes) != groups or sum(sizes) > rows:
        raise UnknownBodyError(
            f"group_sizes= has {counted(len(sizes), 'size')} of {sum(sizes)} rows; the kernel "
            f"has {groups} groups of {rows} rows at most"
        )


def needed_flops(call: KernelCall, groups: int, rows: int) -> int | None:
    """FLOPs of rows [rows, in] times their group's matrix, one of [groups, in, out].

    The matrices are an operand, or the result if they are a gradient. A kernel multiplies whole
    tiles, even if a matrix ends within one.
    """
    arrays = (*call.operands, *call.results)
    sizes = [math.prod(s.dims[1:]) for s in arrays if len(s.dims) == 3 and s.dims[0] == groups]
    return 2 * rows * max(sizes) if sizes else None


def visits(sizes: Sequence[int], tile: int) -> list[tuple[int, int]]:
    """(group, tile of rows) for each tile that has a row of a group.

    >>> visits((3, 0, 5), 4)
    [(0, 0), (2, 0), (2, 1)]
    """
    visits, start = [], 0
    for group, size in enumerate(sizes):
        end = start + size
        if size:
            visits += [(group, number) for number in range(start // tile, -(-end // tile))]
        start = end
    return visits


def sequence_lengths(call: KernelCall, table: int) -> tuple[ScalarTable, str] | None:
    """The lengths that paged attention reads from its first table, and a note if they are a bound.

    None for other tables and kernels.
    """
    if table or not _PAGED_ATTENTION.search(call.name) or "ragged" in call.name:
        return None
    dims, pages = call.operand(0).dims, math.prod(call.operand(1).dims)
    given = call.lengths.sequence_lengths
    if given:
        if len(given) != math.prod(dims):
            raise UnknownBodyError(
                f"sequence_lengths= has {len(given)} lengths; the kernel has {math.prod(dims)} "
                "sequences"
            )
        return (dims, tuple(given)), ""
    page = call.operands[-1].dims[-2]  # of the values: [heads, pages, keys of a page, width]
    longest = pages // math.prod(dims) * page
    note = (
        f"{call.name}: sequence lengths are data; counted as if each were {longest}, all of its "
        "pages: an upper bound; give sequence_lengths="
    )
    return (dims, (longest,) * math.prod(dims)), note
