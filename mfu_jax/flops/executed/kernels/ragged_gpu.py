"""Tokamax's grouped matmuls on GPU, which read their groups from tables in memory.

The user may give the groups' sizes. Otherwise, all groups but one are taken to have one row, which
costs a whole tile: an upper bound.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, ScalarTable
from mfu_jax.flops.executed.kernels.ragged import GroupedBody, check_sizes, needed_flops, visits
from mfu_jax.flops.executed.kernels.registry import KernelCall

_BY_VISIT, _BY_GROUP = 7, 2  # number of tables
_RAGGED = re.compile(r"ragged_?dot", re.IGNORECASE)


def of_groups_on_gpu(call: KernelCall, body: KernelBody) -> GroupedBody:
    """A grouped matmul with the tables that its groups imply; other kernels unchanged.

    One kernel has seven tables [tiles + groups − 1], an entry for each visit of a tile of rows by a
    group: the group, the tile, its first row, the start and end of the group's rows in it, where
    in the tile these begin, and how many there are. The other, for the gradient of the matrices
    [groups, in, out], has the size and the first row of each group [groups].
    """
    integers = list(itertools.takewhile(_is_table, call.operands))
    size, arrays, result = len(integers), call.operands[len(integers) :], call.results[0].dims
    matrices = next((s.dims for s in (*arrays, *call.results) if len(s.dims) == 3), None)
    if matrices is None or len({table.dims for table in integers}) != 1:
        return GroupedBody(body, {})
    (entries,), groups = integers[0].dims, matrices[0]
    tiles = entries - groups + 1
    if not (
        (size == _BY_VISIT and len(result) == 2 and tiles > 0)
        or (size == _BY_GROUP and entries == groups and _is_gradient(arrays, result))
    ):
        return GroupedBody(body, {})
    if all(call.literal(index) for index in range(size)):
        return GroupedBody(body, {})
    rows = result[0] if size == _BY_VISIT else arrays[1].dims[0]
    sizes, note = _sizes(call, groups, rows)
    values = _by_visit(sizes, rows, tiles) if size == _BY_VISIT else _by_group(sizes)
    tables: dict[int, ScalarTable] = {
        index: ((entries,), (*column, *(0,) * (entries - len(column))))
        for index, column in enumerate(values)
    }
    return GroupedBody(body, tables, needed_flops(call, groups, sum(sizes)), note)


def of_groups_by_triton(call: KernelCall, body: KernelBody) -> GroupedBody:
    """A grouped matmul whose last operands are each group's start and end row; others unchanged.

    It multiplies rows [rows, in] by matrices [groups, in, out], or [rows, in] by [rows, out] for
    their gradient.
    """
    tables, arrays = call.operands[-2:], call.operands[:-2]
    matrices = next((s.dims for s in (*arrays, *call.results) if len(s.dims) == 3), (0,))
    is_ragged = _RAGGED.search(call.name) or _RAGGED.search(call.instruction.op_name)
    if not is_ragged or len(arrays) != 2 or not all(map(_is_table, tables)):
        return GroupedBody(body, {})
    groups = matrices[0]
    if [table.dims for table in tables] != [(groups,)] * 2 or call.literal(2) is not None:
        return GroupedBody(body, {})
    sizes, note = _sizes(call, groups, arrays[0].dims[0])
    ends = tuple(itertools.accumulate(sizes))
    made: dict[int, ScalarTable] = {2: ((groups,), (0, *ends[:-1])), 3: ((groups,), ends)}
    return GroupedBody(body, made, needed_flops(call, groups, sum(sizes)), note)


def _is_table(shape: Shape) -> bool:
    return shape.dtype == "s32" and len(shape.dims) == 1


def _is_gradient(arrays: Sequence[Shape], result: tuple[int, ...]) -> bool:
    """Whether the result [groups, in, out] may come from [in, rows] and [rows, out]."""
    shapes = [array.dims for array in arrays]
    if [len(dims) for dims in shapes] != [2, 2]:
        return False
    (width, rows), (others, out) = shapes
    return rows == others and result[1:] == (width, out)


def _sizes(call: KernelCall, groups: int, rows: int) -> tuple[tuple[int, ...], str]:
    """The groups' sizes, and a note if they are a bound."""
    given = call.lengths.group_sizes
    if given:
        check_sizes(given, groups, rows)
        return given, ""
    note = (
        f"{call.name}: the groups' sizes are data; counted as if all of {groups} groups but one "
        "had one row: an upper bound; give group_sizes="
    )
    return (*(1,) * (groups - 1), max(0, rows - groups + 1)), note


def _by_visit(sizes: Sequence[int], rows: int, tiles: int) -> list[tuple[int, ...]]:
    """The seven tables of all visits. Tiles have 2ⁿ rows.

    >>> _by_visit((3, 0, 5), 8, 2)[-1]  # rows of each visit
    (3, 1, 4)
    """
    tile = 1 << (-(-rows // tiles) - 1).bit_length()
    ends = list(itertools.accumulate(sizes))
    entries = []
    for group, number in visits(sizes, tile):
        first = number * tile
        start = max(ends[group] - sizes[group], first)
        end = min(ends[group], first + tile)
        entries.append((group, number, first, start, end, start - first, end - start))
    return list(zip(*entries, strict=True)) or [()] * _BY_VISIT


def _by_group(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(sizes), (0, *itertools.accumulate(sizes[:-1]))]
