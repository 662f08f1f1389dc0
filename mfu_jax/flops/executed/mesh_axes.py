"""Names the mesh axes along which devices exchange data, and kinds of instructions."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mfu_jax.flops.executed.hlo.replica_groups import groups_along
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


def mesh_of(program: Any) -> Mapping[str, int]:
    """Axis → size of a program's mesh, in device order; empty if unknown.

    Args:
        program: a compiled program, a dump of one, or its text.
    """
    if topology := getattr(program, "topology", None):
        return topology.mesh
    if not hasattr(program, "input_shardings"):
        return {}
    import jax  # text needs none

    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    meshes = (getattr(sharding, "mesh", None) for sharding in shardings)
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return {} if mesh is None else {str(axis): int(n) for axis, n in mesh.shape.items()}


def within_slice(mesh: Mapping[str, int], devices: int) -> Mapping[str, int]:
    """The part of a mesh that a program has: all of it, or one of the slices along its first axes.

    Args:
        mesh: axis → size, in device order.
        devices: those of the program, which XLA compiles for one slice.

    >>> within_slice({"data": 4, "fsdp": 4}, devices=8)
    {'data': 2, 'fsdp': 4}
    """
    slices, found = max(1, math.prod(mesh.values()) // devices), {}
    for axis, size in mesh.items():
        outer = math.gcd(size, slices)
        slices //= outer
        found[axis] = size // outer
    return found


def axes_of(record: InstructionRecord, mesh: Mapping[str, int]) -> str:
    """The axes of a collective's groups, such as ``data`` or ``data+model``.

    Args:
        record: the collective's record.
        mesh: axis → size, in device order; empty if unknown.

    Returns:
        The axes; if no axes form its groups, the groups' size and the stride of their devices.
    """
    size = record.collective.group_size if record.collective else 0
    return named_axes(record, mesh) or axes_between(record.device_groups, {}, size)


def named_axes(record: InstructionRecord, mesh: Mapping[str, int]) -> str:
    """As `axes_of`; empty if no axes form its groups."""
    kind = record.collective.kind if record.collective else ""
    return _named(record.device_groups, mesh, is_permutation=kind == _PERMUTATION)


def axes_between(
    device_groups: Iterable[Iterable[int]], mesh: Mapping[str, int], size: int = 0
) -> str:
    """As `axes_of`, of devices that exchange data: in groups, or as pairs of a permutation."""
    groups = frozenset(map(frozenset, device_groups))
    if names := _named(groups, mesh, is_permutation=any(len(group) < 3 for group in groups)):
        return names
    if not groups:
        return f"groups of {size}" if size else ""
    first = sorted(min(groups, key=min))
    distance = first[1] - first[0] if len(first) > 1 else 0
    return f"groups of {len(first)}, {distance} apart" if distance else "one device each"


def _named(
    device_groups: Iterable[Iterable[int]], mesh: Mapping[str, int], *, is_permutation: bool
) -> str:
    # A device that a permutation leaves in place is a pair with itself.
    groups = frozenset(group for group in map(frozenset, device_groups) if len(group) > 1)
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
            rows = groups_along(ids, chosen).tolist()
            found.append((names, frozenset(map(frozenset, rows))))
    return found
