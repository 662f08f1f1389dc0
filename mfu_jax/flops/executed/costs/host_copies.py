"""Asynchronous copies and slices between a device and the memory of its host."""

from __future__ import annotations

from collections.abc import Iterable

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction

_HOST_MEMORY = "S(5)"  # in an array's layout


def host_bytes(
    computation: HloComputation, instruction: HloInstruction, inside: Iterable[HloInstruction]
) -> int:
    """Bytes of a copy or slice whose source or destination is in the host's memory; else 0.

    Args:
        computation: the computation that it is in.
        instruction: the launched one.
        inside: it, and the instructions of the computations that it consists of.
    """
    if not instruction.opcode.endswith("-start") or _HOST_MEMORY not in instruction.shape_text:
        return 0
    sizes = [shape.bytes for shape in computation.operand_shapes(instruction)]
    if any(i.opcode.startswith("dynamic-update-slice") for i in inside):
        return sizes[1]
    results = [shape.bytes for shape in instruction.shape.elements if shape.bytes]
    return min(max(sizes, default=0), *results[:2]) if results else 0


def is_to_host(instruction: HloInstruction) -> bool:
    """Whether an asynchronous copy or slice writes to the host's memory."""
    elements = instruction.shape.elements
    if not instruction.opcode.endswith("-start") or len(elements) < 2:
        return False
    written = elements[1] if elements[0].dtype == "tuple" else elements[0]
    return _HOST_MEMORY in written.layout
