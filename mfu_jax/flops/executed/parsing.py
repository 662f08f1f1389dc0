"""Parser of XLA's HLO text: one pass, linear in its length."""

from __future__ import annotations

import re
from collections.abc import Container

from mfu_jax.flops.executed.hlo import (
    Fields,
    HloComputation,
    HloInstruction,
    HloModule,
    HloParseError,
    Index,
)
from mfu_jax.flops.executed.hlo_shapes import COMMENT, is_balanced, split_top_level
from mfu_jax.flops.executed.opcodes import INDEXED, MATMUL_NAME, ONLY_ELEMENTWISE

# A tuple's shape ends where ` opcode(` begins: nothing within a shape looks like that. Operands
# without brackets and strings end at the first parenthesis. What excludes one character only is
# matched several times faster than a class.
_INSTRUCTION = re.compile(
    r" *(ROOT )?%?([^ ]+) = (\(.*?\)|[^ ]+) ([a-z][^(]*)\((?:([^)]*)\))?(.*)",
    re.DOTALL,
)
_INSTRUCTION_START = re.compile(r"\s*(?:ROOT )?%?[^\s=%\"{}(),]+ = \S")
# Computations of nothing else are most of a program; their instructions are made when needed.
_DEFERRED = ONLY_ELEMENTWISE - INDEXED
_ELEMENT = re.compile(r"%([^\s,(){}#]+)#(\d+)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .* )?\{\s*$", re.DOTALL)


def parse_hlo(text: str) -> HloModule:
    """Parses the text of ``compiled.as_text()``.

    Args:
        text: one HLO module.

    Raises:
        HloParseError: a line cannot be parsed; the error shows it.
    """
    name = header = entry = ""
    computations: dict[str, HloComputation] = {}
    indexed: dict[str, Index] = {opcode: ([], []) for opcode in INDEXED}
    computation: HloComputation | None = None
    known: Container[str] = ()  # the names in `computation`
    deferred: dict[str, Fields] | None = None  # of `computation`
    instructions: dict[str, HloInstruction] = {}  # of `computation`, if not deferred
    last: HloInstruction | None = None
    unread: list[str] = []  # the tail of `last`, where its first line does not say all
    match_instruction = _INSTRUCTION.match
    kept: dict[str, str] = {}
    one = kept.setdefault  # equal shapes and opcodes are few, and one object is quick to compare
    for number, line in enumerate(text.split("\n"), 1):
        if computation is not None:
            match = match_instruction(line)
            if match:
                if unread and last:
                    last.read(unread)
                    unread = []
                root, instruction, shape, opcode, operands, rest = match.groups()
                shape, opcode = one(shape, shape), one(opcode, opcode)
                if instruction in known:
                    raise HloParseError("a second instruction of this name", line, number)
                if root:
                    computation.mark_root(instruction)
                is_plain = operands is not None and "(" not in operands and '"' not in operands
                if deferred is not None:
                    if (
                        is_plain
                        and opcode in _DEFERRED
                        and (opcode != "multiply" or MATMUL_NAME not in rest)
                        and "#" not in operands
                    ):
                        deferred[instruction] = instruction, shape, opcode, operands, rest, number
                        continue
                    deferred, known = None, (instructions := computation.instructions)
                if not is_plain:  # brackets in them, or more lines
                    unread, operands, rest = [line[match.end(4) + 1 :]], "", ""
                if "#" in operands and opcode != "constant":
                    _name_elements(operands, instructions, number)
                last = HloInstruction(instruction, shape, opcode, operands, rest, number)
                instructions[instruction] = last
                if opcode in INDEXED:
                    indexed[opcode][0].append(computation)
                    indexed[opcode][1].append(last)
            elif line.startswith("}") and _is_whole(unread):
                if unread and last:
                    last.read(unread)
                    unread = []
                computation = last = None
            elif line.strip():
                if deferred:  # the last one has more lines
                    deferred, known = None, (instructions := computation.instructions)
                    last = instructions[next(reversed(instructions))]
                if last is None or _INSTRUCTION_START.match(line):
                    raise HloParseError("not an instruction", line, number)
                unread = unread or [f"{last.operand_text}){last.attribute_text}"]
                unread.append(line)
        elif line.endswith("{") and (match := _COMPUTATION.match(line)):
            computation = HloComputation(match[2], number)
            computations[match[2]] = computation
            computation.deferred = known = deferred = {}
            if match[1]:
                entry = match[2]
        elif line.startswith("HloModule "):
            header = line
            name = line[len("HloModule ") :].partition(",")[0].strip()
    if computation is not None:
        raise HloParseError(f"computation %{computation.name} has no end", number=number)
    if not computations:
        raise HloParseError("no computation in it", text[:200], 1)
    if not entry:
        raise HloParseError("no ENTRY computation", text[:200], 1)
    found = {opcode: index for opcode, index in indexed.items() if index[0]}
    return HloModule(name, header, computations, found, entry)


def _name_elements(operands: str, instructions: dict[str, HloInstruction], number: int) -> None:
    """Adds what ``%tuple#3`` in a list of operands stands for, as libtpu dumps it (from 0.0.48)."""
    for match in _ELEMENT.finditer(operands):
        name, index = match[0][1:], int(match[2])
        made = instructions.get(match[1])
        if made is None or name in instructions:
            continue
        shapes = split_top_level(COMMENT.sub("", made.shape_text).strip()[1:-1])
        if index < len(shapes):
            shape, rest = shapes[index].strip(), f", index={index}"
            instructions[name] = HloInstruction(
                name, shape, "get-tuple-element", f"%{match[1]}", rest, number
            )


def _is_whole(tail: list[str]) -> bool:
    """Whether the brackets of an instruction are closed: some attributes span several lines."""
    return not tail or is_balanced("(" + "\n".join(tail))
