"""Matmuls that a program runs several times on the same operands.

Where recomputing a matmul is cheaper than storing its result, XLA may copy it into each fusion that
uses the result (seen on TPU v6e and 7x: logits, attention scores). If the results do not fit
into memory, it recomputes them later, even if nothing in the program asks for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable

from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, Dataflow
from mfu_jax.flops.executed.hlo.module import (
    INSIDE,
    HloComputation,
    HloInstruction,
    HloModule,
    InstructionRef,
)
from mfu_jax.flops.executed.hlo.value_refs import Frame, UnknownValueError

_NOT_THE_VALUE = {"metadata", "backend_config", "sharding", "frontend_attributes", "calls"}
_SAME_VALUE = {"bitcast", "copy", "copy-done", "copy-start"}

# XLA names what it recomputes to save memory after the original: ``fusion.7.remat2``.
_RECOMPUTED = re.compile(r"\.remat\d*(?=\.|$)")


def is_recomputed(module: HloModule, computation: HloComputation, matmul: HloInstruction) -> bool:
    """Whether XLA recomputes a matmul, or the fusion that it is in, to save memory.

    It does if the name is marked and the original is still there. The operands may be other copies
    of the same weights, so comparing values may not show it.
    """
    ref: InstructionRef | None = (computation, matmul)
    while ref is not None:
        name = ref[1].name
        if (match := _RECOMPUTED.search(name)) and _original(*ref, name[: match.start()]):
            return True
        ref = module.caller(ref[0].name)
        if ref is not None and ref[1].opcode not in INSIDE:
            return False
    return False


def _original(computation: HloComputation, copied: HloInstruction, name: str) -> bool:
    """Whether an instruction of this name, or a clone of it, does the same as `copied`.

    If it makes several arrays, XLA may recompute only some, or more from the same matmul.
    """
    arrays = {leaf.dims for leaf in copied.shape.leaves()}
    return any(
        (other.name == name or other.name.startswith(f"{name}."))
        and not _RECOMPUTED.search(other.name)
        and (other.opcode, other.op_name) == (copied.opcode, copied.op_name)
        and not arrays.isdisjoint(leaf.dims for leaf in other.shape.leaves())
        for other in computation.instructions.values()
    )


def duplicates(dataflow: Dataflow, refs: Iterable[InstructionRef]) -> list[HloInstruction]:
    """The given instructions that recompute what an earlier one computes."""
    alike: dict[Hashable, list[InstructionRef]] = defaultdict(list)
    for computation, instruction in refs:
        if op_name := instruction.op_name:
            alike[op_name, instruction.shape.dims].append((computation, instruction))
    repeated: list[HloInstruction] = []
    hashes = _ExpressionHashes(dataflow)
    for refs_alike in alike.values():
        if len(refs_alike) < 2:
            continue
        seen = set()
        for computation, instruction in refs_alike:
            value = hashes.value(dataflow.frame_in_fusions(computation), instruction)
            if value in seen:
                repeated.append(instruction)
            seen.add(value)
    return repeated


def _unfused(frame: Frame, instruction: HloInstruction) -> Hashable:
    """A key for the value of an instruction that is not in a fusion."""
    while instruction.opcode in _SAME_VALUE and instruction.operands:
        instruction = frame.computation.operand(instruction, 0)
    return (frame.computation.name, instruction.name)


class _ExpressionHashes:
    """Hashes what instructions compute, as expressions over unfused instructions."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self.memo: dict[tuple[int, str], Hashable] = {}  # by the frame, which the dataflow keeps

    def value(self, frame: Frame, instruction: HloInstruction, depth: int = 0) -> Hashable:
        """Equal for two instructions that compute the same expression."""
        if frame.call is None:
            return _unfused(frame, instruction)
        key = (id(frame), instruction.name)
        if key not in self.memo:
            if depth > MAX_DEPTH:
                return key
            try:
                self.memo[key] = hash(self._expression(frame, instruction, depth + 1))
            except UnknownValueError:
                return key
        return self.memo[key]

    def _expression(self, frame: Frame, instruction: HloInstruction, depth: int) -> Hashable:
        computation = frame.computation
        if instruction.opcode == "parameter" and instruction.operand_text.isdecimal():
            return self.value(*frame.argument(instruction), depth)
        if instruction.opcode in _SAME_VALUE and instruction.operands:
            return self.value(frame, computation.operand(instruction, 0), depth)
        if instruction.opcode == "fusion":
            inner = self.dataflow.enter(frame, instruction)
            return self.value(inner, inner.computation.root, depth)
        operands = (computation[name] for name in instruction.operands)
        attributes = tuple(
            (k, v) for k, v in instruction.attributes.items() if k not in _NOT_THE_VALUE
        )
        return (
            instruction.opcode,
            instruction.shape.dims,
            attributes,
            "" if instruction.operands else instruction.operand_text,
            tuple(self.value(frame, operand, depth) for operand in operands),
        )
