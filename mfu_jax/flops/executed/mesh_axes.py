"""Names the mesh axes along which devices exchange data, and kinds of instructions."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from mfu_jax.flops.executed.records import InstructionRecord

_PERMUTATION = "collective-permute"
_DeviceGroups = frozenset[frozenset[int]]


_PART = re.compile(r"-(start|done|update)$")


def kind_of(record: InstructionRecord, mesh: Mapping[str, int]) -> str:
    """What an instruction and those like it in another program of the step have in common.

    Its custom kernels, the collective with its axes, ``matmul``, or the opcode.

    Args:
        record: the instruction; of an asynchronous one, its start.
        mesh: axis → size, in device order; empty if unknown.
    """
    if record.kernels:
        return ", ".join(record.kernels)
    if record.collective:
        axes = axes_of(record, mesh)
        return f"{record.collective.kind} over {axes}" if axes else record.collective.kind
    return "matmul" if record.flops else _PART.sub("", record.opcode)


def axes_of(record: InstructionRecord, mesh: Mapping[str, int]) -> str:
    """The axes of a collective's groups, such as ``data`` or ``data+model``.

    Args:
        record: the collective's record.
        mesh: axis → size, in device order; empty if unknown.

    Returns:
        The axes; if no axes form its groups, the groups' size and the stride of their devices.
    """
    if names := named_axes(record, mesh):
        return names
    groups = frozenset(map(frozenset, record.device_groups))
    if not groups:
        size = record.collective.group_size if record.collective else 0
        return f"groups of {size}" if size else ""
    first = sorted(min(groups, key=min))
    distance = first[1] - first[0] if len(first) > 1 else 0
    return f"groups of {len(first)}, {distance} apart" if distance else "one device each"


def named_axes(record: InstructionRecord, mesh: Mapping[str, int]) -> str:
    """As `axes_of`; empty if no axes form its groups."""
    # A device that a permutation leaves in place is a pair with itself.
    groups = frozenset(group for group in map(frozenset, record.device_groups) if len(group) > 1)
    is_permutation = record.collective is not None and record.collective.kind == _PERMUTATION
    for names, of_axes in _groups_of(tuple(mesh.items())) if groups else ():
        if groups == of_axes or (is_permutation and _within(groups, of_axes)):
            return "+".join(names)
    return ""


def _within(pairs: _DeviceGroups, groups: _DeviceGroups) -> bool:
    """Whether every pair is in one of the groups."""
    return all(any(pair <= group for group in groups) for pair in pairs)


@functools.lru_cache(maxsize=8)
def _groups_of(mesh: tuple[tuple[str, int], ...]) -> list[tuple[tuple[str, ...], _DeviceGroups]]:
    """The groups along every combination of axes, smallest combinations first."""
    sizes = {name: size for name, size in mesh if size > 1}
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    found = []
    for count in range(1, len(sizes) + 1):
        for names in itertools.combinations(sizes, count):
            chosen = [list(sizes).index(name) for name in names]
            others = [axis for axis in range(ids.ndim) if axis not in chosen]
            rows = ids.transpose(others + chosen).reshape(
                -1, math.prod(sizes[name] for name in names)
            )
            found.append((names, frozenset(frozenset(row) for row in rows.tolist())))
    return found
