"""Traffic of instructions that are not fused into others: with HBM, and with the host's memory.

Operands are read once and results written once, but slices and in-place updates touch only part of
their operand, arrays in faster memory (TPU memory space S(1) and others) cause no HBM traffic, and
those of a collective that a fusion carries along are counted at the collective's start.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from mfu_jax.flops.executed.costs.collectives import carried_along
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.opcodes import PARTS
from mfu_jax.flops.executed.hlo.shapes import Shape

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier optimization-barrier partition-id replica-id domain add-dependency".split()
)
_SLICES = PARTS - {"dynamic-update-slice"}
_ALIASES = "output_to_operand_aliasing"
_HOST_MEMORY = "S(5)"  # in an array's layout
_DEEPEST = 8  # nested bitcasts and fusions that are followed


class Traffic:
    """The HBM traffic of a program's instructions."""

    def __init__(self, module: HloModule) -> None:
        self.module = module

    def bytes(self, computation: HloComputation, instruction: HloInstruction) -> int:
        """Bytes that one run of an unfused instruction reads from and writes to HBM."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")) or opcode == "async-start":
            return 0
        operands = computation.operand_shapes(instruction)
        result = instruction.shape
        if not operands:
            return result.hbm_bytes
        if opcode == "fusion":
            return self._fusion(instruction, operands, result)
        if opcode == "fusion-start" and len(result.elements) > 1:  # (operands, result, …)
            return self._fusion(instruction, operands, result.elements[1])
        if opcode.endswith("-start") and len(result.elements) > 1:
            # (destination, source, …) of a copy; (operands, result, …) of anything else.
            result = result.elements[0 if opcode == "copy-start" else 1]
        if opcode.removesuffix("-start") in _SLICES:
            return _in_hbm(operands[0], result) + result.hbm_bytes + _bytes(operands[1:])
        if opcode == "dynamic-update-slice" and len(operands) > 1:
            return operands[1].hbm_bytes + _in_hbm(operands[0], operands[1])
        if opcode == "scatter" and len(operands) == 3:
            # Reads and writes the updated rows.
            return 2 * _in_hbm(operands[0], operands[2]) + _bytes(operands[1:])
        return _bytes(operands) + result.hbm_bytes

    def _fusion(self, fusion: HloInstruction, operands: list[Shape], result: Shape) -> int:
        names, carried = fusion.callees, frozenset[str]()
        if len(names) == 1 and _ALIASES in fusion.attribute_text:
            # A chain's fusions return the collective's arrays in place.
            carried = carried_along(self.module[names[0]])
        if not carried and (len(names) != 1 or names[0] not in self._cut):
            return _bytes(operands) + result.hbm_bytes
        fused, total = self.module[names[0]], 0
        for number, shape in enumerate(operands):
            parameter = fused.parameters.get(number)
            if parameter is None or parameter.name not in carried:
                touched = self._touched(fused, parameter)
                total += shape.hbm_bytes if touched is None else min(shape.hbm_bytes, touched)
        root, is_tuple = fused.root, fused.root.opcode == "tuple"
        parts = [fused[name] for name in root.operands] if is_tuple else [root]
        shapes = result.elements if is_tuple else [result]
        for part, shape in zip(parts, shapes, strict=False):
            if part.name not in carried:
                written = _written(fused, part)
                total += min(shape.hbm_bytes, written.bytes) if written else shape.hbm_bytes
        return total

    def _touched(
        self,
        fused: HloComputation,
        source: HloInstruction | None,
        depth: int = 0,
        *,
        updated: bool = False,
    ) -> int | None:
        """Bytes of a fused parameter that slices and in-place updates read; None if all bytes.

        Args:
            fused: the fusion's computation.
            source: the parameter, or what it is renamed to; None if it is not known.
            depth: number of renamings and fusions so far.
            updated: whether `source` is the parameter after an update in place.
        """
        if source is None:
            return None
        users = fused.users.get(source.name, ())
        return _added(self._read_by(fused, source, user, depth, updated) for user in users)

    def _read_by(
        self,
        fused: HloComputation,
        source: HloInstruction,
        user: HloInstruction,
        depth: int,
        updated: bool,
    ) -> int | None:
        """Bytes that one user reads; arguments as for `_touched`."""
        places = [number for number, name in enumerate(user.operands) if name == source.name]
        if user.opcode in _SLICES and places[0] == 0:
            return user.shape.bytes
        if updated and user is fused.root and user.opcode == "tuple":
            return 0  # it stays where it is
        if depth >= _DEEPEST:
            return None
        if user.opcode == "dynamic-update-slice" and places == [0]:
            # The rest of it is not read, unless something uses the result.
            return self._touched(fused, user, depth + 1, updated=True)
        if _only_renames(user):
            return self._touched(fused, user, depth + 1, updated=updated)
        if user.opcode != "fusion" or len(user.callees) != 1:
            return None
        nested = self.module[user.callees[0]]
        inside = (nested.parameters.get(number) for number in places)
        return _added(self._touched(nested, parameter, depth + 1) for parameter in inside)

    @functools.cached_property
    def _cut(self) -> set[str]:
        """Computations with a slice or an update, or with a fusion that has one."""
        with_opcode = self.module.with_opcode
        callers: dict[str, list[str]] = defaultdict(list)
        for computation, fusion in (*with_opcode("fusion"), *with_opcode("fusion-start")):
            for name in fusion.callees:
                callers[name].append(computation.name)
        found: set[str] = set()
        stack = [computation.name for opcode in PARTS for computation, _ in with_opcode(opcode)]
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack += callers[name]
        return found


def _added(sizes: Iterable[int | None]) -> int | None:
    """Their sum; None if one of them is."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _only_renames(instruction: HloInstruction) -> bool:
    """A bitcast, or a fusion that returns its operand in another tiling of the same memory."""
    if instruction.opcode != "fusion" or _ALIASES not in instruction.attribute_text:
        return instruction.opcode == "bitcast"
    return instruction.attributes.get(_ALIASES, "").startswith("{{}: (0")


def _written(fused: HloComputation, part: HloInstruction) -> Shape | None:
    """The update's shape, if a fusion's result is an operand that it updates in place."""
    for _ in range(_DEEPEST):
        if part.opcode == "dynamic-update-slice":
            return fused.operand(part, 1).shape
        if not _only_renames(part):
            break
        part = fused.operand(part, 0)
    return None


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum([shape.hbm_bytes for shape in shapes])


def _in_hbm(place: Shape, part: Shape) -> int:
    """Bytes of `part` if `place`, the array that it is part of, is in HBM."""
    return 0 if place.is_in_fast_memory else part.bytes


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
