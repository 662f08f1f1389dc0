"""Parser of XLA's HLO text: computations, instructions, shapes, attributes, backend_config.

One pass splits the text into computations and instructions; what an instruction holds (its shape,
operands and attributes) is parsed when it is asked for, because most of a program's text is never
needed for a count. Linear in the length of the text.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mfu_jax.errors import UserError


class HloParseError(UserError):
    """The text is not the HLO that was expected. The message holds the line and its number."""

    def __init__(self, reason: str, line: str = "", number: int = 0) -> None:
        where = f"HLO line {number}" if number else "HLO text"
        shown = f": {line.strip()[:200]!r}" if line else ""
        super().__init__(
            f"{where}: {reason}{shown}; expected the text of compiled.as_text(), usually this is "
            "text cut short, edited, or of another format; dump it again"
        )
        self.reason, self.line, self.number = reason, line, number


# Bits of an element. `pred` takes a whole byte; tokens and opaque handles have no size.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}


def dtype_bits(dtype: str) -> int:
    """Bits of one element: ``bf16`` → 16, ``s4`` → 4, ``f8e4m3fn`` → 8."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """An array's dtype and dimensions, or a tuple's elements (dtype ``tuple``)."""

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] = ()
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements; of a tuple, of all its arrays together."""
        if self.dtype == "tuple":
            return sum(element.size for element in self.elements)
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array (layout padding left out), or of all arrays of the tuple."""
        if self.dtype == "tuple":
            return sum(element.bytes for element in self.elements)
        return (math.prod(self.dims) * dtype_bits(self.dtype) + 7) // 8

    def leaves(self) -> Iterator[Shape]:
        """The arrays, in order, however deep the tuples nest."""
        if self.dtype != "tuple":
            yield self
        for element in self.elements:
            yield from element.leaves()

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?$")
_COMMENT = re.compile(r"/\*.*?\*/")
_MAX_TUPLE_DEPTH = 64


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Parses ``f32[2,3]{1,0:T(8,128)}`` or ``(s32[], (bf16[4], pred[]))``.

    >>> parse_shape("(s32[], bf16[4,<=8]{1,0})").elements[1].dims
    (4, 8)
    """
    return _parse_shape(_COMMENT.sub("", text).strip(), 0)


def _parse_shape(text: str, depth: int) -> Shape:
    if depth > _MAX_TUPLE_DEPTH:
        raise HloParseError("tuple shape nested too deeply", text)
    if text.startswith("("):
        if not text.endswith(")"):
            raise HloParseError("tuple shape without its closing parenthesis", text)
        parts = split_top_level(text[1:-1])
        return Shape("tuple", elements=tuple(_parse_shape(p, depth + 1) for p in parts))
    match = _ARRAY.match(text)
    if not match:
        raise HloParseError("not a shape", text)
    dtype, dims, layout = match.groups()
    try:
        sizes = tuple(int(d.replace("<=", "")) for d in dims.split(",")) if dims else ()
    except ValueError:
        raise HloParseError("dimensions that are not numbers", text) from None
    if any(size < 0 for size in sizes):
        raise HloParseError("negative dimension", text)
    return Shape(dtype, sizes, layout=layout or "")


_SPECIAL = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}()\[\],]', re.DOTALL)


def split_top_level(text: str) -> list[str]:
    """Splits at the commas outside brackets and strings.

    >>> split_top_level('a={1,2}, b="x,y", c=3')
    ['a={1,2}', 'b="x,y"', 'c=3']
    """
    parts, depth, start = [], 0, 0
    for match in _SPECIAL.finditer(text):
        token = match[0]
        if token == ",":
            if depth == 0:
                parts.append(text[start : match.start()].strip())
                start = match.end()
        elif token in "{([":
            depth += 1
        elif token in "})]":
            depth -= 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one just before `start`, or −1."""
    end = text.find(")", start)
    if end < 0 or (text.find("(", start, end) < 0 and text.find('"', start, end) < 0):
        return end
    depth = 1
    for match in _SPECIAL.finditer(text, start):
        token = match[0]
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def _balanced(text: str) -> bool:
    """Whether an instruction is complete: some attributes go over several lines."""
    depth = 0
    for match in _SPECIAL.finditer(text):
        depth += (match[0] in "{([") - (match[0] in "})]")
    return depth <= 0


_PERCENT_NAME = re.compile(r"%([^\s,(){}]+)")
_INTEGER = re.compile(r"-?\d+")


_CALLEE_KEYS = {
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


class HloInstruction:
    """One instruction. What the line holds beyond name and opcode is parsed on first use."""

    __slots__ = (
        "_attributes",
        "_operand_text",
        "_operands",
        "_tail",
        "is_root",
        "name",
        "number",
        "opcode",
        "shape_text",
    )

    def __init__(
        self, name: str, shape_text: str, opcode: str, tail: str, is_root: bool, number: int
    ) -> None:
        self.name = name
        self.shape_text = shape_text
        self.opcode = opcode
        self.is_root = is_root
        self.number = number
        self._tail = tail  # what follows the opcode's opening parenthesis
        self._operand_text: str | None = None
        self._operands: tuple[str, ...] | None = None
        self._attributes: dict[str, str] | None = None

    def error(self, reason: str) -> HloParseError:
        """An error that shows this instruction."""
        line = f"%{self.name} = {self.shape_text} {self.opcode}({self._tail}"
        return HloParseError(reason, line, self.number)

    @property
    def shape(self) -> Shape:
        """The result's shape."""
        try:
            return parse_shape(self.shape_text)
        except HloParseError as error:
            raise self.error(error.reason) from None

    @property
    def operand_text(self) -> str:
        """What stands between the opcode's parentheses: operands, or a constant's value."""
        if self._operand_text is None:
            end = _closing(self._tail, 0)
            if end < 0:
                raise self.error("operands without their closing parenthesis")
            self._operand_text = self._tail[:end]
        return self._operand_text

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self._operands is None:
            text = self.operand_text
            if self.opcode in ("parameter", "constant"):
                self._operands = ()
            elif "%" in text:
                self._operands = tuple(_PERCENT_NAME.findall(text))
            else:
                parts = split_top_level(_COMMENT.sub("", text))
                self._operands = tuple(part.split()[-1] for part in parts)
        return self._operands

    def operand(self, index: int) -> str:
        """The name of one operand."""
        if index >= len(self.operands):
            raise self.error(f"operand {index} is missing")
        return self.operands[index]

    @property
    def attributes(self) -> Mapping[str, str]:
        """What follows the operands: ``lhs_contracting_dims`` → ``{1}``, values as text."""
        if self._attributes is None:
            end = len(self.operand_text) + 1
            self._attributes = {}
            for part in split_top_level(self._tail[end:]):
                key, equals, value = part.partition("=")
                if equals:
                    self._attributes[key.strip()] = value.strip()
        return self._attributes

    def integers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as ``{0,1}``; none where it is absent."""
        return tuple(map(int, _INTEGER.findall(self.attributes.get(key, ""))))

    def computations(self, key: str) -> tuple[str, ...]:
        """Names of the computations of an attribute: ``calls``, ``body``, ``condition`` …"""
        value = self.attributes.get(key, "")
        if "%" in value:
            return tuple(_PERCENT_NAME.findall(value))
        return tuple(part.strip() for part in value.strip("{}").split(",") if part.strip())

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of all computations that the instruction calls."""
        keys = _CALLEE_KEYS.get(self.opcode, ())
        return tuple(name for key in keys for name in self.computations(key))

    @property
    def op_name(self) -> str:
        """JAX's name stack of the operation, from ``metadata={op_name="…"}``, or nothing."""
        metadata = self.attributes.get("metadata", "")
        start = metadata.find('op_name="')
        if start < 0:
            return ""
        match = _SPECIAL.match(metadata, start + len("op_name="))
        return match[0][1:-1].replace("\\'", "'").replace('\\"', '"') if match else ""

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """``backend_config`` as JSON, or an empty mapping where it is absent or another format."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text) if text else {}
            if isinstance(value, str):  # older XLA: JSON inside of a quoted string
                value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def attribute_string(self, key: str) -> str:
        """A quoted attribute without its quotes, such as ``custom_call_target``."""
        return self.attributes.get(key, "").strip('"')

    def __repr__(self) -> str:
        return f"HloInstruction(%{self.name} = {self.shape_text} {self.opcode}(…))"


class HloComputation:
    """A named list of instructions, callable by instructions of other computations."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.instructions: dict[str, HloInstruction] = {}
        self._parameters: dict[int, HloInstruction] | None = None

    def __getitem__(self, name: str) -> HloInstruction:
        try:
            return self.instructions[name]
        except KeyError:
            raise HloParseError(f"%{self.name} has no instruction %{name}") from None

    def operand(self, instruction: HloInstruction, index: int) -> HloInstruction:
        """The instruction that makes operand `index` of `instruction`."""
        return self[instruction.operand(index)]

    def operand_shapes(self, instruction: HloInstruction) -> list[Shape]:
        """Shapes of all operands."""
        return [self[name].shape for name in instruction.operands]

    @property
    def root(self) -> HloInstruction:
        """The instruction whose value the computation returns."""
        for instruction in reversed(self.instructions.values()):
            if instruction.is_root:
                return instruction
        for instruction in reversed(self.instructions.values()):
            return instruction
        raise HloParseError(f"computation %{self.name} is empty", number=self.number)

    @functools.cached_property
    def users(self) -> Mapping[str, list[HloInstruction]]:
        """The instructions that use each instruction's result, by its name."""
        users: dict[str, list[HloInstruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users

    @property
    def parameters(self) -> Mapping[int, HloInstruction]:
        """Parameters by their number."""
        if self._parameters is None:
            self._parameters = {}
            for instruction in self.instructions.values():
                if instruction.opcode == "parameter":
                    text = instruction.operand_text.strip()
                    if not text.isdecimal():
                        raise instruction.error("parameter without a number")
                    self._parameters[int(text)] = instruction
        return self._parameters


class HloModule:
    """A whole program: its computations by name, and the one that runs first."""

    def __init__(
        self, name: str, header: str, computations: dict[str, HloComputation], entry: str
    ) -> None:
        self.name = name
        self.header = header
        self.computations = computations
        self._entry = entry
        self._callers: dict[str, list[tuple[HloComputation, HloInstruction]]] | None = None

    @property
    def entry(self) -> HloComputation:
        """The ENTRY computation."""
        return self[self._entry]

    def __getitem__(self, name: str) -> HloComputation:
        try:
            return self.computations[name]
        except KeyError:
            raise HloParseError(f"there is no computation %{name}") from None

    def caller(self, name: str) -> tuple[HloComputation, HloInstruction] | None:
        """The computation and instruction that call a computation, where there is just one."""
        if self._callers is None:
            self._callers = {}
            for computation in self.computations.values():
                for instruction in computation.instructions.values():
                    for callee in instruction.callees:
                        callers = self._callers.setdefault(callee, [])
                        if not callers or callers[-1][1] is not instruction:
                            callers.append((computation, instruction))
        callers = self._callers.get(name, [])
        return callers[0] if len(callers) == 1 else None

    def header_int(self, key: str, default: int = 1) -> int:
        """A number of the first line, such as ``num_partitions``."""
        match = re.search(rf"\b{key}=(\d+)", self.header)
        return int(match[1]) if match else default


# A tuple's shape ends where ` opcode(` begins: nothing inside of a shape looks like that.
_INSTRUCTION = re.compile(
    r"\s*(ROOT )?%?([^\s=%]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)$", re.DOTALL
)
_INSTRUCTION_START = re.compile(r"\s*(?:ROOT )?%?[^\s=%\"{}(),]+ = \S")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .* )?\{\s*$", re.DOTALL)


def parse_hlo(text: str) -> HloModule:
    """Parses the text of ``compiled.as_text()``.

    Args:
        text: one HLO module.

    Raises:
        HloParseError: with the line that cannot be read.
    """
    name = header = entry = ""
    computations: dict[str, HloComputation] = {}
    computation: HloComputation | None = None
    pending: list[str] = []  # the lines of one instruction
    pending_number = 0

    def finish() -> None:
        assert computation is not None
        line = "\n".join(pending) if len(pending) > 1 else pending[0]
        pending.clear()
        match = _INSTRUCTION.match(line)
        if not match:
            raise HloParseError("not an instruction", line, pending_number)
        root, instruction, shape, opcode, tail = match.groups()
        computation.instructions[instruction] = HloInstruction(
            instruction, shape, opcode, tail, root is not None, pending_number
        )

    for number, line in enumerate(text.split("\n"), 1):
        if computation is not None:
            if line.startswith("}") and (not pending or _balanced("\n".join(pending))):
                if pending:
                    finish()
                computation = None
            elif _INSTRUCTION_START.match(line):
                if pending:
                    finish()
                pending.append(line)
                pending_number = number
            elif line.strip():
                if not pending:
                    raise HloParseError("not an instruction", line, number)
                pending.append(line)
        elif line.endswith("{") and (match := _COMPUTATION.match(line)):
            computation = HloComputation(match[2], number)
            computations[match[2]] = computation
            if match[1]:
                entry = match[2]
        elif line.startswith("HloModule "):
            header = line
            name = line.split()[1].rstrip(",")
    if computation is not None:
        raise HloParseError(f"computation %{computation.name} has no end", number=number)
    if not computations:
        raise HloParseError("no computation in it", text[:200], 1)
    if not entry:
        raise HloParseError("no ENTRY computation", text[:200], 1)
    return HloModule(name, header, computations, entry)
