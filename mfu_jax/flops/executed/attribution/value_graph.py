"""An HLO program as the `ProgramValue`s that decide the purpose of its undifferentiated matmuls.

Fusions and calls are inlined, and a loop's body once: weights that one iteration updates are
weights, not gradients, in the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH
from mfu_jax.flops.executed.hlo.module import (
    INSIDE,
    HloComputation,
    HloInstruction,
    HloModule,
)
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.scopes import FlopPhase
from mfu_jax.flops.undifferentiated import ProgramValue

# A value's position; for a tuple, those of its elements.
Position: TypeAlias = "int | list[Position]"

_SAME = frozenset(
    "copy bitcast optimization-barrier opt-barrier copy-done all-reduce-done all-gather-done "
    "collective-permute-done fusion-done".split()
)
# XLA combines several of these into one instruction, under the op_name of one of them.
_COMBINED = frozenset({"all-reduce", "all-gather", "collective-permute"})
# Results that hold their operands' elements: moved, cast, or scaled.
_MOVES = frozenset(
    "all-to-all broadcast concatenate convert copy copy-start dynamic-slice multiply negate pad "
    "reduce-precision reshape reverse slice transpose".split()
)


def value_graph(
    module: HloModule, matmuls: Mapping[int, tuple[str, FlopPhase]]
) -> list[ProgramValue]:
    """The values of a program; the sites are the ``id`` of instructions.

    Args:
        module: the program.
        matmuls: op_name and phase of each matmul that runs, by the ``id`` of its instruction.
    """
    graph = _HloInliner(module, matmuls)
    entry = module.entry
    given: list[Position] = [
        graph.inputs(entry.parameters[number].shape) if number in entry.parameters else []
        for number in range(max(entry.parameters, default=-1) + 1)
    ]
    graph.inline(entry, given)
    return graph.values


def _numbers(position: Position) -> list[int]:
    if isinstance(position, int):
        return [position]
    return [number for element in position for number in _numbers(element)]


class _HloInliner:
    """Adds values, instruction by instruction."""

    def __init__(self, module: HloModule, matmuls: Mapping[int, tuple[str, FlopPhase]]) -> None:
        self.module = module
        self.matmuls = matmuls
        self.values: list[ProgramValue] = []
        self.depth = 0  # of the calls that are being inlined

    def inputs(self, shape: Shape) -> Position:
        """The values of a parameter of the program."""
        if shape.dtype == "tuple":
            return [self.inputs(element) for element in shape.elements]
        return self._append(ProgramValue((), shape.size, is_input=True))

    def inline(self, computation: HloComputation, given: Sequence[Position]) -> Position:
        """Adds a computation's values, given those of its parameters; returns its result's."""
        if self.depth > MAX_DEPTH:
            return self._add(computation.root, list(given))
        self.depth += 1
        known: dict[str, Position] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                text = instruction.operand_text
                number = int(text) if text.isdecimal() else len(given)
                known[instruction.name] = given[number] if number < len(given) else []
            else:
                operands = [known.get(name, []) for name in instruction.operands]
                known[instruction.name] = self._result(instruction, operands)
        self.depth -= 1
        return known[computation.root.name]

    def _result(self, instruction: HloInstruction, operands: list[Position]) -> Position:
        opcode = instruction.opcode
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element" and operands and isinstance(operands[0], list):
            index = instruction.integers("index")[:1] or (0,)
            return operands[0][index[0]] if index[0] < len(operands[0]) else operands[0]
        if opcode in _SAME and operands:
            return operands[0]
        if opcode.removesuffix("-start") in _COMBINED:
            moved: list[Position] = [self._move(_numbers(operand)) for operand in operands]
            return moved[0] if len(moved) == 1 else moved
        if opcode == "conditional":
            return self._chosen(instruction, operands)
        bodies = instruction.computations("body")
        if opcode in INSIDE:
            bodies = instruction.callees
        if len(bodies) == 1:
            return self.inline(self.module[bodies[0]], operands)
        return self._add(instruction, operands)

    def _chosen(self, instruction: HloInstruction, operands: list[Position]) -> Position:
        """The result of a conditional: for each element, those of all branches."""
        branches = zip(instruction.callees, operands[1:], strict=False)
        results = [self.inline(self.module[name], [given]) for name, given in branches]
        return self._either(results) if results else self._add(instruction, operands)

    def _either(self, results: list[Position]) -> Position:
        tuples = [result for result in results if isinstance(result, list)]
        if len(tuples) == len(results) and len({len(elements) for elements in tuples}) == 1:
            return [self._either(list(elements)) for elements in zip(*tuples, strict=True)]
        return self._move(_numbers(results))

    def _move(self, numbers: list[int]) -> int:
        """A value with the elements of others."""
        size = max((self.values[number].size for number in numbers), default=1)
        return self._append(ProgramValue(tuple(numbers), size, is_moved=True))

    def _append(self, value: ProgramValue) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _add(self, instruction: HloInstruction, operands: list[Position]) -> int:
        op_name, phase = self.matmuls.get(id(instruction), (instruction.op_name, "other"))
        is_differentiated = "jvp(" in op_name or "transpose(" in op_name
        is_plain = phase == "forward" and not is_differentiated
        return self._append(
            ProgramValue(
                operands=tuple(_numbers(operands)),
                size=_size(instruction.shape),
                site=id(instruction) if is_plain else 0,
                is_moved=instruction.opcode in _MOVES,
                is_differentiated=is_differentiated,
                is_gradient=phase in ("backward", "rematerialized"),
            )
        )


def _size(shape: Shape) -> int:
    if shape.dtype == "tuple":
        return max(map(_size, shape.elements), default=1)
    return shape.size
