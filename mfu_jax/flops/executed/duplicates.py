"""Matmuls that a program runs several times on the same operands.

XLA may put a copy of a matmul into each fusion that uses its result, where it takes computing it
again for cheaper than storing it (seen on TPU v6e and 7x: logits, attention scores).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from mfu_jax.flops.executed.dataflow import MAX_DEPTH, Frame, UnknownValueError, enter
from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule

_NOT_THE_VALUE = {"metadata", "backend_config", "sharding", "frontend_attributes", "calls"}
_SAME_VALUE = {"bitcast", "copy", "copy-done", "copy-start"}

Place = tuple[HloComputation, HloInstruction]


def duplicates(module: HloModule, places: Iterable[Place]) -> list[HloInstruction]:
    """The instructions, of those given, that compute what an earlier one of them does already."""
    alike: dict[Hashable, list[Place]] = defaultdict(list)
    for computation, instruction in places:
        if op_name := instruction.op_name:
            alike[op_name, instruction.shape.dims].append((computation, instruction))
    repeated = []
    for places_alike in alike.values():
        if len(places_alike) < 2:
            continue
        # Unrolled layers look alike; their first operands tell most of them apart.
        groups: dict[Hashable, list[tuple[Frame, HloInstruction]]] = defaultdict(list)
        for computation, instruction in places_alike:
            frame = _frame_in_fusions(module, computation)
            groups[_first_leaf(module, frame, instruction)].append((frame, instruction))
        for group in groups.values():
            seen = set()
            for frame, instruction in group if len(group) > 1 else ():
                value = _value(module, frame, instruction, {}, 0)
                if value in seen:
                    repeated.append(instruction)
                seen.add(value)
    return repeated


def _first_leaf(module: HloModule, frame: Frame, instruction: HloInstruction) -> Hashable:
    """Where the first operands of first operands end: the same for equal values."""
    for _ in range(MAX_DEPTH):
        if frame.arguments is None:
            while instruction.opcode in _SAME_VALUE and instruction.operands:
                instruction = frame.computation.operand(instruction, 0)
            return (frame.computation.name, instruction.name)
        if instruction.opcode == "parameter" and instruction.operand_text.isdecimal():
            number = int(instruction.operand_text)
            if number >= len(frame.arguments):
                break
            frame, instruction = frame.arguments[number]
        elif instruction.opcode == "fusion":
            try:
                frame = enter(module, frame, instruction)
            except UnknownValueError:
                break
            instruction = frame.computation.root
        elif instruction.operands:
            instruction = frame.computation.operand(instruction, 0)
        else:
            return (instruction.opcode, instruction.operand_text)
    return None


def _frame_in_fusions(module: HloModule, computation: HloComputation) -> Frame:
    """The frame of a fused computation, up to the one that is not fused."""
    chain: list[tuple[HloComputation, HloInstruction, HloComputation]] = []
    while len(chain) < MAX_DEPTH:
        caller = module.caller(computation.name)
        if caller is None or caller[1].opcode != "fusion":
            break
        chain.append((*caller, computation))
        computation = caller[0]
    frame = Frame(computation)
    for outer, instruction, callee in reversed(chain):
        operands = (outer[name] for name in instruction.operands)
        frame = Frame(callee, tuple((frame, operand) for operand in operands))
    return frame


def _value(
    module: HloModule,
    frame: Frame,
    instruction: HloInstruction,
    memo: dict[tuple[int, str], Hashable],
    depth: int,
) -> Hashable:
    """What an instruction computes, as an expression over unfused instructions."""
    if frame.arguments is None:
        while instruction.opcode in _SAME_VALUE and instruction.operands:
            instruction = frame.computation.operand(instruction, 0)
        return (frame.computation.name, instruction.name)
    key = (id(frame), instruction.name)
    if key in memo:
        return memo[key]
    if depth > MAX_DEPTH:
        return key
    value: Hashable
    if instruction.opcode == "parameter" and instruction.operand_text.isdecimal():
        number = int(instruction.operand_text)
        if number >= len(frame.arguments):
            return key
        value = _value(module, *frame.arguments[number], memo, depth + 1)
    elif instruction.opcode in _SAME_VALUE and instruction.operands:
        value = _value(module, frame, frame.computation.operand(instruction, 0), memo, depth + 1)
    elif instruction.opcode == "fusion":
        try:
            inner = enter(module, frame, instruction)
        except UnknownValueError:
            return key
        value = _value(module, inner, inner.computation.root, memo, depth + 1)
    else:
        operands = (frame.computation[name] for name in instruction.operands)
        attributes = tuple(
            (k, v) for k, v in instruction.attributes.items() if k not in _NOT_THE_VALUE
        )
        value = (
            instruction.opcode,
            instruction.shape.dims,
            attributes,
            "" if instruction.operands else instruction.operand_text,
            tuple(_value(module, frame, operand, memo, depth + 1) for operand in operands),
        )
    value = hash(value)
    memo[key] = value
    return value
