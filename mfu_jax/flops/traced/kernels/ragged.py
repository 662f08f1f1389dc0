"""Work that depends on lengths that are data: grouped matmuls, paged attention.

The user may give the lengths. Without them, a grouped matmul counts every row once, as its author's
`cost_estimate` does, and paged attention counts as if every sequence filled all its pages.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np

from mfu_jax.flops.lengths import Lengths
from mfu_jax.flops.traced.integers.known_values import ConstantTable
from mfu_jax.util.formatting import counted

RAGGED_DOTS = frozenset({"ragged_dot_general", "ragged_dot"})
_PAGED = re.compile(r"paged_(flash_)?attention")


def is_grouped(eqn: Any) -> bool:
    """Whether a `pallas_call` is a grouped matmul."""
    return _groups_and_rows(eqn) is not None


def _groups_and_rows(eqn: Any) -> tuple[int, int] | None:
    """Numbers of groups and rows of a grouped matmul; None for other kernels.

    Such a kernel has one data-dependent bound and reads four tables, the first of which has each
    group's first row [groups + 1]; the operand after them has the rows. Bound and tables belong
    to its grid or, if it has a loop instead (tokamax), are its first operands ([1] and [...]).
    """
    mapping = eqn.params["grid_mapping"]
    bounds, tables = mapping.num_dynamic_grid_bounds, mapping.num_index_operands
    operands = [v.aval for v in eqn.invars]
    if not (mapping.grid or tables) and operands and operands[0].shape == (1,):
        bounds, tables = 1, 4
    found, rest = operands[bounds : bounds + tables], operands[bounds + tables :]
    if bounds != 1 or [table.ndim for table in found] != [1] * 4 or not rest or not rest[0].ndim:
        return None
    if any(table.dtype.kind not in "iu" for table in found):
        return None
    return found[0].shape[0] - 1, rest[0].shape[0]


def share_of_rows(eqn: Any, lengths: Lengths) -> tuple[Fraction, str]:
    """The fraction of a grouped matmul's rows in a group, and what is wrong with the sizes."""
    found = _groups_and_rows(eqn)
    return _share(*found, lengths) if found else (Fraction(1), "")


def _share(groups: int, rows: int, lengths: Lengths) -> tuple[Fraction, str]:
    sizes = lengths.group_sizes
    if not sizes:
        return Fraction(1), ""
    if len(sizes) != groups or sum(sizes) > rows:
        return Fraction(1), (
            f"group_sizes= has {counted(len(sizes), 'size')} of {sum(sizes)} rows; this "
            f"product has {groups} groups of {rows} rows at most: every row was counted"
        )
    return Fraction(sum(sizes), rows), ""


def grouped_on_gpu(eqn: Any, lengths: Lengths) -> tuple[int, str] | None:
    """FLOPs of one of tokamax's grouped matmuls on GPU, and what is wrong with the sizes.

    None for other kernels. These read seven tables [visits], or two [groups], and multiply rows
    [rows, in] by matrices [groups, in, out], or [rows, in] by [rows, out] for their gradient.
    """
    if len(eqn.outvars) != 1:
        return None
    operands, result = [v.aval for v in eqn.invars], eqn.outvars[0].aval
    is_table = lambda aval: aval.ndim == 1 and aval.dtype.kind in "iu"  # noqa: E731
    tables = {aval.shape[0] for aval in operands if is_table(aval)}
    count = sum(map(is_table, operands))
    arrays = [aval.shape for aval in operands if aval.ndim > 1]
    if len(tables) != 1 or count not in (2, 7) or len(arrays) < 2:
        return None
    (entries,) = tables
    if result.ndim == 3 and [len(shape) for shape in arrays] == [2, 2]:
        rows, (groups, *matrix) = arrays[1][0], result.shape
        widths = [math.prod(arrays[0]) // max(1, rows), arrays[1][1]]
    else:
        matrices = next((shape for shape in arrays if len(shape) == 3), None)
        if result.ndim != 2 or matrices is None or len(arrays[0]) != 2:
            return None
        rows, (groups, *matrix) = result.shape[0], matrices
        widths = [arrays[0][1], result.shape[1]]
    if sorted(widths) != sorted(matrix) or (entries < groups if count == 7 else entries != groups):
        return None
    share, wrong = _share(groups, rows, lengths)
    return int(2 * rows * math.prod(matrix) * share), wrong


def share_of_ragged_dot(eqn: Any, lengths: Lengths) -> tuple[Fraction, str]:
    """The fraction of a `ragged_dot`'s rows in a group, and what is wrong with the sizes.

    A ragged batch dimension is multiplied whole, whatever its groups: they choose nothing.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (ragged, *_) = numbers.lhs_ragged_dimensions
    (_, (lhs_batch, _)) = numbers.dot_dimension_numbers
    if ragged in lhs_batch:
        return Fraction(1), ""
    return _share(eqn.invars[2].aval.shape[-1], eqn.invars[0].aval.shape[ragged], lengths)


def paged_lengths(eqn: Any, name: str, lengths: Lengths) -> tuple[ConstantTable | None, str]:
    """The first table of a paged attention kernel, and a note if its contents are assumed.

    The table is None for other kernels, and if the given lengths are not one per sequence.
    """
    if not _PAGED.search(name) or "ragged" in name:
        return None, ""
    first = eqn.params["grid_mapping"].num_dynamic_grid_bounds
    shapes = [v.aval.shape for v in eqn.invars[first:]]
    (sequences, pages), values = (math.prod(shape) for shape in shapes[:2]), shapes[-1]
    given = lengths.sequence_lengths
    if given and len(given) != sequences:
        return None, (
            f"sequence_lengths= has {len(given)} lengths; the kernel has {sequences} sequences"
        )
    if given:
        return ConstantTable(np.array(given)), ""
    longest = pages // sequences * values[-2]  # values: [heads, pages, keys per page, width]
    return ConstantTable(np.full(shapes[0], longest)), (
        f"sequence lengths are data; counted as if each were {longest}, all of its pages: an upper "
        "bound; give sequence_lengths="
    )
