"""Parser of XLA's HLO text: computations, instructions, shapes, attributes, backend_config.

One pass splits the text into computations and instructions. Shapes, operands and attributes are
parsed on first use, because a count never needs most of a program's text. Linear in the length of
the text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from mfu_jax.flops.executed.hlo_shapes import (
    COMMENT,
    ELIDED,
    SPECIAL,
    HloParseError,
    Shape,
    closing_parenthesis,
    dtype_bits,
    is_balanced,
    parse_shape,
    split_top_level,
)

__all__ = [
    "CALLEE_KEYS",
    "ELIDED",
    "HloComputation",
    "HloInstruction",
    "HloModule",
    "HloParseError",
    "Shape",
    "dtype_bits",
    "parse_hlo",
    "parse_shape",
]

_PERCENT_NAME = re.compile(r"%([^\s,(){}]+)")
_INTEGER = re.compile(r"-?\d+")
_PLAIN_VALUE = re.compile(r'(?:\{[^{}"]*\}|[^\s,{}()\["]+)(?=,|$)')

# The attributes that name the computations of an instruction, by its opcode without ``-start``.
CALLEE_KEYS = {
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async": ("calls",),
    "while": ("body", "condition"),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


class HloInstruction:
    """One instruction. Everything but its name and opcode is parsed on first use."""

    __slots__ = (
        "_attributes",
        "_callees",
        "_lines",
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
        self._tail = tail
        self._lines: list[str] | None = None
        self._operand_text: str | None = None
        self._operands: tuple[str, ...] | None = None
        self._attributes: dict[str, str] | None = None
        self._callees: tuple[str, ...] | None = None

    def extend(self, line: str) -> None:
        """Appends a line of an instruction that spans several."""
        if self._lines is None:
            self._lines = []
        self._lines.append(line)

    def is_complete(self) -> bool:
        """Whether all brackets are closed: some attributes span several lines."""
        return not self._lines or is_balanced(self.tail)

    @property
    def tail(self) -> str:
        """The text after the opcode's opening parenthesis."""
        if self._lines:
            self._tail = "\n".join((self._tail, *self._lines))
            self._lines = None
        return self._tail

    def error(self, reason: str) -> HloParseError:
        """An error that shows this instruction."""
        line = f"%{self.name} = {self.shape_text} {self.opcode}({self.tail}"
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
        """The text between the opcode's parentheses: operands, or a constant's value."""
        if self._operand_text is None:
            end = closing_parenthesis(self.tail, 0)
            if end < 0:
                raise self.error("operands without a closing parenthesis")
            self._operand_text = self._tail[:end]
        return self._operand_text

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self._operands is None:
            self._operands = self._read_operands()
        return self._operands

    def _read_operands(self) -> tuple[str, ...]:
        if self.opcode in ("parameter", "constant"):
            return ()
        text = self.operand_text
        if text.startswith("%") and "/" not in text and "(" not in text:  # no types, no comments
            return tuple(text[1:].split(", %"))
        if "%" in text:
            return tuple(_PERCENT_NAME.findall(text))
        return tuple([part.split()[-1] for part in split_top_level(COMMENT.sub("", text))])

    def operand(self, index: int) -> str:
        """The name of one operand."""
        if index >= len(self.operands):
            raise self.error(f"operand {index} is missing")
        return self.operands[index]

    @property
    def attributes(self) -> Mapping[str, str]:
        """The attributes after the operands: ``lhs_contracting_dims`` → ``{1}``, as text."""
        if self._attributes is None:
            end = len(self.operand_text) + 1
            self._attributes = {}
            for part in split_top_level(self.tail[end:]):
                key, equals, value = part.partition("=")
                if equals:
                    self._attributes[key.strip()] = value.strip()
        return self._attributes

    def attribute(self, key: str) -> str:
        """One attribute's text, empty if absent; parses the others only if necessary."""
        if self._attributes is None:
            tail = self.tail
            start = tail.find(f"{key}=")
            if start < 0:
                return ""
            # The key may also occur in a string, or as the end of another key.
            if tail.find('"', 0, start) < 0 and tail[start - 2 : start] == ", ":
                match = _PLAIN_VALUE.match(tail, start + len(key) + 1)
                if match:
                    return match[0]
        return self.attributes.get(key, "")

    def integers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as ``{0,1}``; empty if absent."""
        return tuple(map(int, _INTEGER.findall(self.attribute(key))))

    def computations(self, key: str) -> tuple[str, ...]:
        """Names of the computations in an attribute: ``calls``, ``body``, ``condition`` …"""
        value = self.attribute(key)
        if "%" in value:
            return tuple(_PERCENT_NAME.findall(value))
        return tuple(part.strip() for part in value.strip("{}").split(",") if part.strip())

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of all computations that the instruction calls, in the order of `CALLEE_KEYS`."""
        if self._callees is None:
            keys = CALLEE_KEYS.get(self.opcode.removesuffix("-start"), ())
            self._callees = tuple([name for key in keys for name in self.computations(key)])
        return self._callees

    @property
    def runs_on_host(self) -> bool:
        """Whether it hands its computation to the host: `compute_on("device_host")`."""
        if '"host"' not in self.tail and '"HostExecute"' not in self.tail:
            return False
        return self.attribute_string("async_execution_thread") == "host" or (
            self.attribute_string("custom_call_target") == "HostExecute"
        )

    @property
    def loop_computations(self) -> tuple[str, str]:
        """Names of the body and the condition of a ``while``."""
        bodies, conditions = self.computations("body"), self.computations("condition")
        if len(bodies) != 1 or len(conditions) != 1:
            raise self.error("while without body or condition")
        return bodies[0], conditions[0]

    @property
    def op_name(self) -> str:
        """JAX's name stack of the operation, from ``metadata={op_name="…"}``, empty if absent."""
        tail = self.tail
        start = tail.find('op_name="', tail.find("metadata={"))
        if start < 0:
            return ""
        match = SPECIAL.match(tail, start + len("op_name="))
        return match[0][1:-1].replace("\\'", "'").replace('\\"', '"') if match else ""

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """``backend_config`` as JSON; empty if absent or in another format."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text) if text else {}
            if isinstance(value, str):  # older XLA: JSON in a quoted string
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
    """A program: its computations by name, and the one that runs first."""

    def __init__(
        self, name: str, header: str, computations: dict[str, HloComputation], entry: str
    ) -> None:
        self.name = name
        self.header = header
        self.computations = computations
        self._entry = entry
        self._callers: dict[str, tuple[HloComputation, HloInstruction] | None] | None = None

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
        """The computation and instruction that call a computation, if there is exactly one."""
        if self._callers is None:
            self._callers = self._find_callers()
        return self._callers.get(name)

    def _find_callers(self) -> dict[str, tuple[HloComputation, HloInstruction] | None]:
        """The one caller of each computation, None for several."""
        callers: dict[str, tuple[HloComputation, HloInstruction] | None] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode.removesuffix("-start") in CALLEE_KEYS:
                    for callee in set(instruction.callees):
                        is_first = callee not in callers
                        callers[callee] = (computation, instruction) if is_first else None
        return callers

    def header_int(self, key: str, default: int = 1) -> int:
        """A number in the first line, such as ``num_partitions``."""
        match = re.search(rf"\b{key}=(\d+)", self.header)
        return int(match[1]) if match else default


# A tuple's shape ends where ` opcode(` begins: nothing within a shape looks like that.
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
        HloParseError: a line cannot be parsed; the error shows it.
    """
    name = header = entry = ""
    computations: dict[str, HloComputation] = {}
    computation: HloComputation | None = None
    instructions: dict[str, HloInstruction] = {}
    last: HloInstruction | None = None
    match_instruction = _INSTRUCTION.match
    for number, line in enumerate(text.split("\n"), 1):
        if computation is not None:
            match = match_instruction(line)
            if match:
                root, instruction, shape, opcode, tail = match.groups()
                if instruction in instructions:
                    raise HloParseError("a second instruction of this name", line, number)
                last = HloInstruction(instruction, shape, opcode, tail, root is not None, number)
                instructions[instruction] = last
            elif line.startswith("}") and (last is None or last.is_complete()):
                computation = last = None
            elif line.strip():
                if last is None or _INSTRUCTION_START.match(line):
                    raise HloParseError("not an instruction", line, number)
                last.extend(line)
        elif line.endswith("{") and (match := _COMPUTATION.match(line)):
            computation = HloComputation(match[2], number)
            computations[match[2]] = computation
            instructions = computation.instructions
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
    return HloModule(name, header, computations, entry)
