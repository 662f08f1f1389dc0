"""Factorisations that a TPU program expands into blocks: custom calls, and matmuls between them.

Each is counted once, by the textbook formula, at its first block; this includes its matmuls. All
instructions of an expansion have the primitive's op_name; within one name, each is connected.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from mfu_jax.flops.executed.cost_types import (
    NOTHING,
    InstructionCost,
    MatmulCost,
    unaccounted,
)
from mfu_jax.flops.executed.formulas import textbook
from mfu_jax.flops.executed.formulas.matmuls import MATMULS
from mfu_jax.flops.executed.hlo.module import (
    HloComputation,
    HloInstruction,
    HloModule,
    InstructionRef,
)
from mfu_jax.flops.executed.hlo.shapes import Shape

_BLOCKS = {
    "cholesky": "Cholesky",
    "lu": "LuDecompositionBlock",
    "geqrf": "QrDecompositionBlock",
    "householder_product": "CompactWyHelper",
    "triangular_solve": "InvertDiagBlocks",
    "eigh": "EighTpu",
}
_ROUTINES = tuple(_BLOCKS.values())
_LEAST_RANK = {**dict.fromkeys(_BLOCKS, 2), "triangular_solve": 3, "eigh": 1}
# XLA may append an instruction's own name to the primitive that it is expanded from.
_OWN_NAME = re.compile(rf"(/(?:{'|'.join(_BLOCKS)}))/[\w-]+\.\d+$")
_WINDOW = re.compile(r"size=([\dx]+)")
_PASSED_ON = frozenset("get-tuple-element bitcast tuple copy copy-start copy-done".split())


class TpuFactorizations:
    """Finds the expanded factorisations of a program."""

    def __init__(self, module: HloModule) -> None:
        self.module = module

    def cost(self, instruction: HloInstruction) -> InstructionCost | None:
        """What is counted of an expansion at an instruction; None if it belongs to none.

        The textbook's FLOPs at the first block, nothing elsewhere.
        """
        return self._parts.get(id(instruction))

    @functools.cached_property
    def _parts(self) -> Mapping[int, InstructionCost]:
        names: dict[str, set[str]] = defaultdict(set)  # by computation with blocks
        for computation, instruction in self.module.with_opcode("custom-call"):
            if _is_block(instruction):
                names[computation.name].add(_op_name(instruction))
        parts: dict[int, InstructionCost] = {}
        for name, op_names in names.items():
            for op_name in op_names:
                for members in self._expansions(self.module[name], op_name):
                    parts |= _counted(_primitive(op_name), members)
            for op_name, blocks in self._sharing(self.module[name], op_names).items():
                for members in self._expansions(self.module[name], op_name):
                    parts |= _counted(_primitive(op_name), members, blocks)
        return parts

    def _sharing(
        self, computation: HloComputation, op_names: set[str]
    ) -> Mapping[str, list[HloInstruction]]:
        """Names of expansions that read another one's blocks, with these blocks.

        The solves of a gradient and of its primal have the same matrix: XLA inverts it once.
        """
        blocks: dict[str, HloInstruction] = {}
        found: dict[str, list[HloInstruction]] = defaultdict(list)
        for instruction in computation.instructions.values():
            read = [blocks[name] for name in instruction.operands if name in blocks]
            if _is_block(instruction):
                blocks[instruction.name] = instruction
            elif read and instruction.opcode in _PASSED_ON:
                blocks[instruction.name] = read[0]
            elif read:
                for op_name in self._names(computation, instruction) - op_names:
                    if _primitive(op_name) == _primitive(_op_name(read[0])):
                        found[op_name] += [b for b in read if b not in found[op_name]]
        return found

    def _names(self, computation: HloComputation, instruction: HloInstruction) -> set[str]:
        """The op_names of the matmuls and blocks that an instruction is or contains."""
        return {_op_name(part) for _, part in self._inside(computation, instruction)}

    def _expansions(
        self, computation: HloComputation, op_name: str
    ) -> Iterator[list[InstructionRef]]:
        """The blocks and matmuls of each expansion of one name."""
        root: dict[str, str] = {}
        members: dict[str, list[InstructionRef]] = defaultdict(list)

        def find(name: str) -> str:
            while root[name] != name:
                name = root[name]
            return name

        for instruction in computation.instructions.values():
            parts = self._inside(computation, instruction)
            inside = [(c, part) for c, part in parts if _op_name(part) == op_name]
            operands = [name for name in instruction.operands if name in root]
            is_named = _op_name(instruction) == op_name or bool(inside)
            if not is_named and not (instruction.opcode in _PASSED_ON and operands):
                continue
            root[instruction.name] = instruction.name
            for operand in operands:
                root[find(operand)] = find(instruction.name)
            members[instruction.name] = inside
        together: dict[str, list[InstructionRef]] = defaultdict(list)
        for name, inside in members.items():
            together[find(name)] += inside
        yield from together.values()

    def _inside(
        self, computation: HloComputation, instruction: HloInstruction
    ) -> Iterator[InstructionRef]:
        """The blocks and matmuls that an instruction is, or that its fusion contains."""
        if instruction.opcode == "fusion":
            for callee in map(self.module.__getitem__, instruction.callees):
                for inner in callee.instructions.values():
                    yield from self._inside(callee, inner)
        elif _is_part(instruction):
            yield computation, instruction


def _op_name(instruction: HloInstruction) -> str:
    return _OWN_NAME.sub(r"\1", instruction.op_name)


def _primitive(op_name: str) -> str:
    return op_name.rpartition("/")[2]


def _target(instruction: HloInstruction) -> str:
    is_call = instruction.opcode == "custom-call"
    return instruction.attribute_string("custom_call_target") if is_call else ""


def _is_block(instruction: HloInstruction) -> bool:
    """Whether it is a block of its primitive, whose sizes give the matrix's."""
    target = _BLOCKS.get(_primitive(_op_name(instruction)))
    return target is not None and _target(instruction).startswith(target)


def _is_part(instruction: HloInstruction) -> bool:
    """Whether it is work of an expansion: a matmul, or any of the compiler's block routines.

    A matmul with a vector is written as a multiplication and a sum.
    """
    is_matmul = instruction.opcode in MATMULS or instruction.opcode in ("reduce", "reduce-window")
    return is_matmul or _target(instruction).startswith(_ROUTINES)


def _counted(
    primitive: str,
    members: Sequence[InstructionRef],
    shared: Sequence[HloInstruction] = (),
) -> dict[int, InstructionCost]:
    """The costs of an expansion, counted at its first block; if blocks are shared, at a matmul."""
    blocks = [i for _, i in members if _is_block(i)] or list(shared)
    if not blocks or not members:
        return {}
    seen = sum(MATMULS[i.opcode](c, i) for c, i in members if i.opcode in MATMULS)
    shapes = [next(i.shape.leaves()) for i in blocks]
    if any(len(shape.dims) < _LEAST_RANK[primitive] for shape in shapes):
        raise blocks[0].error("a factorisation's block with too few dimensions")
    matmuls = [_summed(i) for _, i in members if i.opcode != "custom-call"]
    is_complex = any(map(_has_two_parts, blocks)) and primitive != "eigh"
    if is_complex:  # each matmul is three real ones
        is_whole = len(matmuls) % 3 == 0
        matmuls = sorted(matmuls, key=lambda shape: shape.dims)[::3] if is_whole else []
    flops = _RULES[primitive](shapes, matmuls)
    if flops is not None and is_complex:
        flops *= textbook.real_products("c64")
    counted = {id(i): NOTHING for _, i in members}
    computation, first = next((c, i) for c, i in members if shared or i is blocks[0])
    if flops is None:
        reason = "the sizes of its blocks do not say the matrix's"
        counted[id(first)] = InstructionCost(unaccounted=unaccounted(first, primitive, reason))
    elif flops:
        dtype = computation.operand(first, 0).shape.dtype
        matmul = MatmulCost(first, flops, dtype, kernel=primitive, seen_by_xla=seen)
        counted[id(first)] = InstructionCost(matmul)
    return counted


def _has_two_parts(block: HloInstruction) -> bool:
    """Whether a block's result has a real and an imaginary part."""
    first, *others = block.shape.leaves()
    return first in others[:1]


def _summed(instruction: HloInstruction) -> Shape:
    """A matmul's result; for a sum that is broadcast again immediately, the sum."""
    sizes = _WINDOW.search(instruction.attribute("window"))
    if instruction.opcode != "reduce-window" or not sizes:
        return instruction.shape
    pairs = zip(instruction.shape.dims, sizes[1].split("x"), strict=False)
    return Shape(instruction.shape.dtype, tuple(dim for dim, size in pairs if size == "1"))


_FlopsRule = Callable[[Sequence[Shape], Sequence[Shape]], int | None]


def _batch(shape: Shape) -> int:
    return math.prod(shape.dims[:-2])


def _width(blocks: Sequence[Shape]) -> int:
    return sum(block.dims[-1] for block in blocks)


def _cholesky(blocks: Sequence[Shape], matmuls: Sequence[Shape]) -> int:
    return _batch(blocks[0]) * textbook.cholesky(_width(blocks))


def _panels(count: Callable[[int, int], int]) -> _FlopsRule:
    """The rule for blocks of columns, the first of which has all rows."""

    def rule(blocks: Sequence[Shape], matmuls: Sequence[Shape]) -> int:
        return _batch(blocks[0]) * count(max(b.dims[-2] for b in blocks), _width(blocks))

    return rule


def _form_q(blocks: Sequence[Shape], matmuls: Sequence[Shape]) -> int:
    largest = max(matmuls or blocks, key=lambda shape: shape.size)
    rows, columns = largest.dims[-2:]
    return _batch(blocks[0]) * textbook.form_q(rows, columns, _width(blocks))


def _triangular_solve(blocks: Sequence[Shape], matmuls: Sequence[Shape]) -> int | None:
    """A routine inverts the diagonal blocks, possibly for two solves with the same matrix.

    Of k block rows, all but the first are updated, and all are then multiplied: 2k − 1 matmuls. The
    first block row has fewer rows than the others if the matrix is solved from its end, else the
    last one; its product with an inverse of one element is no matmul.
    """
    *_, count, side, _ = blocks[0].dims
    if any(block.dims[-3:] != blocks[0].dims[-3:] for block in blocks) or not matmuls:
        return None
    right_hand_sides = max(shape.size for shape in matmuls) // side  # over the whole batch
    sizes = [divmod(shape.size, max(1, right_hand_sides)) for shape in matmuls]
    rows = [whole for whole, _ in sizes]
    least, ran = min(rows), sum(rows)
    n = (count - 1) * side + least
    solves, rest = divmod(len(matmuls), 2 * count - 1)
    from_end = n + (count - 1) * side
    ways = [a * (2 * n - side) + (solves - a) * from_end for a in range(solves + 1)]
    if rest and least == 1:
        solves, rest = divmod(len(matmuls), 2 * count - 2)
        ways = [solves * (2 * n - side - 1)]
    if rest or ran not in ways or any(part for _, part in sizes) or not 0 < least <= side:
        return None
    return solves * textbook.triangular_solve(n, right_hand_sides)


def _eigh(blocks: Sequence[Shape], matmuls: Sequence[Shape]) -> int:
    """A block routine takes quarters; its first result is half of the diagonal."""
    return sum(
        math.prod(block.dims[:-1]) * textbook.symmetric_eigenvectors(2 * block.dims[-1])
        for block in blocks
    )


_RULES: dict[str, _FlopsRule] = {
    "cholesky": _cholesky,
    "lu": _panels(textbook.lu),
    "geqrf": _panels(textbook.qr),
    "householder_product": _form_q,
    "triangular_solve": _triangular_solve,
    "eigh": _eigh,
}
