"""Parser of XLA's HLO text: one pass, linear in its length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule, Index
from mfu_jax.flops.executed.hlo.opcodes import (
    ELEMENTWISE,
    INDEXED,
    MATMUL_NAME,
    ONLY_ELEMENTWISE,
)
from mfu_jax.flops.executed.hlo.text import (
    COMMENT,
    PATTERN,
    HloParseError,
    InstructionLine,
    is_balanced,
    parse_shape,
    read_lines,
    split_top_level,
)

_INSTRUCTION = re.compile(rf"{PATTERN}(?:([^)]*)\))?(.*)", re.DOTALL)
_INSTRUCTION_START = re.compile(r"\s*(?:ROOT )?%?[^\s=%\"{}(),]+ = \S")
# Most computations contain nothing else; their instructions are made only when needed.
_DEFERRED = ONLY_ELEMENTWISE - INDEXED
_END = re.compile(r"\n}")
_ELEMENT = re.compile(r"%([^\s,(){}#]+)#(\d+)")
# Outside computations: the first line of the program, and of each computation.
_HEADER = re.compile(
    r"^(?:HloModule (.*)|(ENTRY )?(%?)([^\s(]+) (?:\(.*\) -> .* )?\{)$", re.MULTILINE
)
_PERCENT_NAME = re.compile(r"%([^,]++)")


def parse_hlo(text: str) -> HloModule:
    """Parses the text of ``compiled.as_text()``.

    Args:
        text: one HLO module.

    Raises:
        HloParseError: a line cannot be parsed; the error shows it.
    """
    return _Parser(text).module()


def with_large_constants(program: Any) -> HloModule | None:
    """The program with its large constants written out; None if it is only a text."""
    if not hasattr(program, "runtime_executable"):
        return None
    from mfu_jax.util.jax_internals import text_with_large_constants  # text needs no JAX

    text = text_with_large_constants(program)
    return parse_hlo(text) if text else None


class _Parser:
    """Reads a text from `position`, which begins line `number` + 1."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.number = 0
        self.computations: dict[str, HloComputation] = {}
        self.indexed: dict[str, Index] = {opcode: ([], []) for opcode in INDEXED}
        # Few shapes and opcodes are distinct, and one shared object is fast to compare.
        self.kept: dict[str, str] = {}

    def module(self) -> HloModule:
        name = header = entry = ""
        text = self.text
        while match := _HEADER.search(text, self.position):
            self.number += text.count("\n", self.position, match.start()) + 1
            self.position = match.end() + 1
            line, is_entry, percent, found = match.groups()
            if line is not None:
                header, name = match[0], line.partition(",")[0].strip()
                continue
            computation = self.computations[found] = HloComputation(found, self.number)
            if not self._read_at_once(computation, has_percent=bool(percent)):
                self._read_by_lines(computation)
            if is_entry:
                entry = found
        if not self.computations:
            raise HloParseError("no computation in it", text[:200], 1)
        if not entry:
            raise HloParseError("no ENTRY computation", text[:200], 1)
        indexed = {opcode: index for opcode, index in self.indexed.items() if index[0]}
        return HloModule(name, header, self.computations, indexed, entry)

    def _lines(self) -> Iterator[str]:
        """The lines from `position`, which may move meanwhile."""
        text = self.text
        while self.position <= len(text):
            start = self.position
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            self.position = end + 1
            self.number += 1
            yield text[start:end]

    def _read_at_once(self, computation: HloComputation, *, has_percent: bool) -> bool:
        """Reads all instructions of a computation; False if one of its lines needs a closer look.

        Args:
            computation: it begins at `position`.
            has_percent: whether this text writes names with ``%``.
        """
        end = _END.search(self.text, self.position)
        body = self.text[self.position - 1 : end.start()] if end else ""
        lines = read_lines(body)
        if not lines or not _is_plain(lines[-1][4]):  # it may have more lines
            return False
        names = {line[1] for line in lines}
        operands = ", ".join([line[4] for line in lines])
        if len(names) < len(lines) or "#" in operands:
            return False
        for line in lines:
            if line[0]:
                computation.mark_root(line[1])
        is_plain = _is_plain(operands)
        used = set(_PERCENT_NAME.findall(operands))
        computation.is_defined = has_percent and is_plain and used <= names
        opcodes = {line[3] for line in lines}
        if is_plain and opcodes <= _DEFERRED and not _has_products(body, lines):
            computation.deferred = body
            computation.elementwise = _elementwise_flops(lines)
        else:
            self._add(computation, lines, is_plain=is_plain)
        self.position += len(body)
        self.number += len(lines)
        return True

    def _add(
        self, computation: HloComputation, lines: Sequence[InstructionLine], *, is_plain: bool
    ) -> None:
        """Makes the instructions of a computation; `is_plain` if all their operands are."""
        one, indexed = self.kept.setdefault, self.indexed
        made, first = computation.instructions, computation.number + 1
        for number, (_, name, shape, opcode, operands, rest) in enumerate(lines, first):
            instruction = HloInstruction(
                name, one(shape, shape), one(opcode, opcode), operands, rest, number
            )
            if not is_plain and not _is_plain(operands):
                instruction.read([f"{operands}){rest}"])
            made[name] = instruction
            if opcode in indexed:
                computations, instructions = indexed[opcode]
                computations.append(computation)
                instructions.append(instruction)

    def _read_by_lines(self, computation: HloComputation) -> None:
        """Reads a computation in which some instructions span several lines or have errors."""
        last: HloInstruction | None = None
        unread: list[str] = []  # the tail of `last`, if its first line is incomplete
        made = computation.instructions
        for line in self._lines():
            if match := _INSTRUCTION.match(line):
                if unread and last:
                    last.read(unread)
                    unread = []
                root, name, shape, opcode, operands, rest = match.groups()
                if name in made:
                    raise HloParseError("a second instruction of this name", line, self.number)
                if root:
                    computation.mark_root(name)
                if operands is None or not _is_plain(operands):  # or more lines
                    unread, operands, rest = [line[match.end(4) + 1 :]], "", ""
                if "#" in operands and opcode != "constant":
                    _name_elements(operands, made, self.number)
                last = HloInstruction(name, shape, opcode, operands, rest, self.number)
                made[name] = last
                if opcode in self.indexed:
                    self.indexed[opcode][0].append(computation)
                    self.indexed[opcode][1].append(last)
            elif line.startswith("}") and _is_whole(unread):
                if unread and last:
                    last.read(unread)
                return
            elif line.strip():
                if last is None or _INSTRUCTION_START.match(line):
                    raise HloParseError("not an instruction", line, self.number)
                unread = unread or [f"{last.operand_text}){last.attribute_text}"]
                unread.append(line)
        raise HloParseError(f"computation %{computation.name} has no end", number=self.number)


def _name_elements(operands: str, instructions: dict[str, HloInstruction], number: int) -> None:
    """Adds the elements that operands such as ``%tuple#3`` name, in libtpu dumps (from 0.0.48)."""
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


def _has_products(body: str, lines: Iterable[InstructionLine]) -> bool:
    """Whether a multiplication may be a matmul."""
    return MATMUL_NAME in body and any(
        line[3] in ("multiply", "broadcast") and MATMUL_NAME in line[5] for line in lines
    )


def _is_plain(operands: str) -> bool:
    """Whether operands end at the first parenthesis."""
    return "(" not in operands and '"' not in operands


def _is_whole(tail: list[str]) -> bool:
    """Whether the brackets of an instruction are closed: some attributes span several lines."""
    return not tail or is_balanced("(" + "\n".join(tail))


def _elementwise_flops(lines: Iterable[InstructionLine]) -> int | None:
    """FLOPs of instructions that have no rule, from their text; None if a shape is invalid."""
    try:
        return sum([parse_shape(line[2]).size for line in lines if line[3] in ELEMENTWISE])
    except HloParseError:
        return None  # the instruction itself reports it better


def check_module(module: HloModule) -> None:
    """Checks what every complete program has: one ROOT per computation, and defined operands.

    A lost line is an error, not a different count.

    Raises:
        HloParseError: something is missing.
    """
    if not module.header:
        raise HloParseError("no line that begins with HloModule", number=1)
    for computation in module.computations.values():
        _check_root(computation)
        _check_operands(computation)


def _check_root(computation: HloComputation) -> None:
    roots = computation.roots
    if roots != 1:
        count = "no ROOT" if not roots else f"{roots} ROOT instructions"
        raise HloParseError(f"%{computation.name} has {count}", number=computation.number)


def _check_operands(computation: HloComputation) -> None:
    if computation.is_defined:
        return
    known = computation.instructions
    for instruction in known.values():
        for name in instruction.operands:
            if name not in known:
                raise instruction.error(f"%{computation.name} has no instruction %{name}")
