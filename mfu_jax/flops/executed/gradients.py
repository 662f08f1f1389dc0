"""Finds the matmuls that use gradients: an optimizer's, whose op_names do not identify them.

The op_names of work after the backward pass have no transformation. Neither have those of
undifferentiated forward work, such as a rollout; but that does not depend on a backward matmul.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from mfu_jax.flops.executed.dataflow import MAX_DEPTH
from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule

# Whether a value was computed from gradients; for a tuple, whether each element was.
Taint: TypeAlias = "bool | tuple[Taint, ...]"

_CALLS = frozenset({"fusion", "call", "async-start"})


def gradient_users(module: HloModule, backward: Collection[int]) -> set[int]:
    """Ids of all instructions that depend on a backward matmul.

    A loop's state enters its body as it was before the loop: weights that one iteration updates are
    weights, not gradients, in the next one.

    Args:
        module: the program.
        backward: ``id`` of each backward matmul's instruction.
    """
    walk = _Walk(module, backward)
    entry = module.entry
    walk.run(entry, [False] * (max(entry.parameters, default=-1) + 1), 0)
    return walk.users


def _any(taint: Taint) -> bool:
    return any(map(_any, taint)) if isinstance(taint, tuple) else taint


def _either(a: Taint, b: Taint) -> Taint:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_either(x, y) for x, y in zip(a, b, strict=True))
    return _any(a) or _any(b)


class _Walk:
    """Follows gradients through the computations of a program."""

    def __init__(self, module: HloModule, backward: Collection[int]) -> None:
        self.module = module
        self.backward = backward
        self.users: set[int] = set()
        self.done: dict[tuple[str, tuple[Taint, ...]], Taint] = {}

    def run(self, computation: HloComputation, arguments: list[Taint], depth: int) -> Taint:
        """The taint of a computation's result; records the users in it."""
        key = (computation.name, tuple(arguments))
        if key in self.done or depth > MAX_DEPTH:
            return self.done.get(key, any(map(_any, arguments)))
        taints: dict[str, Taint] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                text = instruction.operand_text
                number = int(text) if text.isdecimal() else len(arguments)
                taint = arguments[number] if number < len(arguments) else False
            else:
                operands = [taints.get(name, False) for name in instruction.operands]
                if any(map(_any, operands)):
                    self.users.add(id(instruction))
                taint = self._result(computation, instruction, operands, depth)
            taints[instruction.name] = taint or id(instruction) in self.backward
        self.done[key] = taints[computation.root.name]
        return self.done[key]

    def _result(
        self,
        computation: HloComputation,
        instruction: HloInstruction,
        operands: list[Taint],
        depth: int,
    ) -> Taint:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element" and operands and isinstance(operands[0], tuple):
            (index,) = instruction.integers("index") or (0,)
            return operands[0][index] if index < len(operands[0]) else _any(operands[0])
        if opcode in _CALLS:
            names = instruction.callees
            results = [self.run(self.module[name], operands, depth + 1) for name in names]
        elif opcode == "while" and operands:
            names = instruction.computations("body")
            results = [self.run(self.module[name], operands, depth + 1) for name in names]
            results.append(operands[0])
        elif opcode == "conditional":
            branches = zip(instruction.callees, operands[1:], strict=False)
            results = [self.run(self.module[name], [given], depth + 1) for name, given in branches]
        elif opcode in ("copy", "optimization-barrier", "opt-barrier", "bitcast") and operands:
            return operands[0]
        else:
            return any(map(_any, operands))
        taint = results[0] if results else False
        for other in results[1:]:
            taint = _either(taint, other)
        return taint
