"""HBM traffic of instructions that are not fused into others.

Operands are read once and results written once, but slices and in-place updates touch only part of
their operand, and arrays in faster memory (TPU memory space S(1) and others) cause no HBM traffic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule, Shape

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier optimization-barrier partition-id replica-id domain add-dependency".split()
)
_SLICES = {"dynamic-slice", "slice", "gather"}
_PARTIAL = {*_SLICES, "dynamic-update-slice"}
_FAST_MEMORY = re.compile(r"S\([1-9]\d*\)")


def hbm_bytes(module: HloModule, computation: HloComputation, instruction: HloInstruction) -> int:
    """Bytes that one run of an unfused instruction reads from and writes to HBM."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")) or opcode == "async-start":
        return 0
    operands = [computation[name].shape for name in instruction.operands]
    result = instruction.shape
    if not operands:
        return _bytes(result)
    if opcode.endswith("-start") and len(result.elements) > 1:
        result = result.elements[1]
    if opcode in _SLICES:
        return _in_hbm(operands[0], result) + _bytes(result) + sum(map(_bytes, operands[1:]))
    if opcode == "dynamic-update-slice" and len(operands) > 1:
        return _bytes(operands[1]) + _in_hbm(operands[0], operands[1])
    if opcode == "scatter" and len(operands) == 3:
        # Reads and writes the updated rows.
        return 2 * _in_hbm(operands[0], operands[2]) + sum(map(_bytes, operands[1:]))
    if opcode == "fusion":
        names = instruction.callees
        if len(names) == 1:
            return _fusion(module[names[0]], operands, result)
    return sum(map(_bytes, operands)) + _bytes(result)


def _fusion(fused: HloComputation, operands: list[Shape], result: Shape) -> int:
    if not any(i.opcode in _PARTIAL for i in fused.instructions.values()):
        return sum(map(_bytes, operands)) + _bytes(result)
    users = fused.users
    total = 0
    for number, shape in enumerate(operands):
        parameter = fused.parameters.get(number)
        touched = None if parameter is None else _touched(fused, users, parameter, 0)
        total += _bytes(shape) if touched is None else min(_bytes(shape), _in_hbm_n(shape, touched))
    root = fused.root
    parts = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    shapes = list(result.elements) if root.opcode == "tuple" else [result]
    for part, shape in zip(parts, shapes, strict=False):
        written = _written(fused, part)
        total += min(_bytes(shape), _in_hbm_n(shape, written.bytes)) if written else _bytes(shape)
    return total


def _touched(
    fused: HloComputation,
    users: Mapping[str, list[HloInstruction]],
    source: HloInstruction,
    depth: int,
) -> int | None:
    """Bytes that slices and in-place updates read of a fused parameter; None if all bytes."""
    total = 0
    for user in users.get(source.name, []):
        if user.opcode in _SLICES and user.operands[:1] == (source.name,):
            total += user.shape.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[:1] == (source.name,):
            continue  # updated in place: the rest is not read
        elif user.opcode == "bitcast" and depth < 8:
            inner = _touched(fused, users, user, depth + 1)
            if inner is None:
                return None
            total += inner
        else:
            return None
    return total


def _written(fused: HloComputation, part: HloInstruction) -> Shape | None:
    """The update's shape, if a fusion's result is an operand that it updates in place."""
    for _ in range(8):
        if part.opcode == "dynamic-update-slice":
            return fused.operand(part, 1).shape
        if part.opcode != "bitcast":
            break
        part = fused.operand(part, 0)
    return None


@functools.lru_cache(maxsize=65536)
def _bytes(shape: Shape) -> int:
    return sum(leaf.bytes for leaf in shape.leaves() if not _FAST_MEMORY.search(leaf.layout))


def _in_hbm(place: Shape, part: Shape) -> int:
    """Bytes of `part` if `place`, the array that it is part of, is in HBM."""
    return _in_hbm_n(place, part.bytes)


def _in_hbm_n(place: Shape, size: int) -> int:
    return 0 if _FAST_MEMORY.search(place.layout) else size
