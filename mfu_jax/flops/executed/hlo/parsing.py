"""Parser of XLA's HLO text: one pass, linear in its length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
    closing_parenthesis,
    is_balanced,
    parse_shape,
    read_lines,
    split_top_level,
)

_INSTRUCTION = re.compile(PATTERN)
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
                self._add(computation, self._read_by_lines(computation))
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
            numbered = enumerate(lines, computation.number + 1)
            self._add(computation, numbered if is_plain else _with_all_operands(numbered))
        self.position += len(body)
        self.number += len(lines)
        return True

    def _add(
        self, computation: HloComputation, lines: Iterable[tuple[int, InstructionLine]]
    ) -> None:
        """Makes the instructions of a computation, of their text and its number."""
        one, indexed = self.kept.setdefault, self.indexed
        made = computation.instructions
        for number, (_, name, shape, opcode, operands, rest) in lines:
            instruction = HloInstruction(
                name, one(shape, shape), one(opcode, opcode), operands, rest, number
            )
            made[name] = instruction
            if opcode in indexed:
                computations, instructions = indexed[opcode]
                computations.append(computation)
                instructions.append(instruction)

    def _read_by_lines(self, computation: HloComputation) -> Iterator[tuple[int, InstructionLine]]:
        """The instructions of a computation of which some span several lines or have errors."""
        made = computation.instructions
        start: re.Match[str] | None = None  # of the instruction to which the following lines belong
        number, tail = 0, ""
        for line in self._lines():
            match = _INSTRUCTION.match(line)
            if match or (line.startswith("}") and _is_whole(tail)):
                if start:
                    root, name, shape, opcode = start.groups()
                    operands, rest = _split_operands(tail, number)
                    if "#" in operands and opcode != "constant":
                        _name_elements(operands, made, number)
                    yield number, (root, name, shape, opcode, operands, rest)
                if not match:
                    return
                if match[2] in made:
                    raise HloParseError("a second instruction of this name", line, self.number)
                if match[1]:
                    computation.mark_root(match[2])
                start, number, tail = match, self.number, line[match.end() :]
            elif line.strip():
                if start is None or _INSTRUCTION_START.match(line):
                    raise HloParseError("not an instruction", line, self.number)
                tail += f"\n{line}"
        raise HloParseError(f"computation %{computation.name} has no end", number=self.number)


def _with_all_operands(
    lines: Iterable[tuple[int, InstructionLine]],
) -> Iterator[tuple[int, InstructionLine]]:
    """The same lines; some operands do not end at the first parenthesis."""
    for number, line in lines:
        if not _is_plain(line[4]):
            line = (*line[:4], *_split_operands(f"{line[4]}){line[5]}", number))
        yield number, line


def _split_operands(tail: str, number: int) -> tuple[str, str]:
    """The operands, and all that follows them, of the text after an opcode's parenthesis."""
    end = closing_parenthesis(tail, 0)
    if end < 0:
        raise HloParseError("operands without a closing parenthesis", tail, number)
    return tail[:end], tail[end + 1 :]


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


def _is_whole(tail: str) -> bool:
    """Whether the brackets of an instruction are closed: some attributes span several lines."""
    return not tail or is_balanced(f"({tail}")


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
