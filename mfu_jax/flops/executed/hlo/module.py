"""A program in XLA's HLO: computations, instructions, shapes, attributes, backend_config.

Shapes and attributes are parsed on first use, because a count never needs most of a program's text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.text import (
    PERCENT_NAME,
    WITHOUT_OPERANDS,
    HloParseError,
    op_name_in,
    operand_names,
    parse_shape,
    plain_attribute,
    read_lines,
    split_top_level,
)

_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_INTEGER = re.compile(r"-?\d+")

# The attributes that name the computations of an instruction, by its opcode without ``-start``.
CALLEE_KEYS = {
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async": ("calls",),
    "while": ("body", "condition"),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
CALLS = tuple([f"{opcode}{start}" for opcode in CALLEE_KEYS for start in ("", "-start")])
INSIDE = ("fusion", "call", "async-start", "fusion-start", "call-start")
"""Opcodes that run one computation, once, on their operands."""


@dataclass(slots=True, eq=False, repr=False)
class HloInstruction:
    """One instruction. Its shape and attributes are parsed on first use.

    Attributes:
        name: unique in its computation.
        shape_text: the result's shape.
        opcode: as in the text: ``dot``, ``all-gather-start`` …
        operand_text: the text between the opcode's parentheses: operands, or a constant's value.
        attribute_text: the text after the operands.
        number: number of its first line.
    """

    name: str
    shape_text: str
    opcode: str
    operand_text: str
    attribute_text: str
    number: int
    _operands: tuple[str, ...] | None = None
    _attributes: dict[str, str] | None = None
    _callees: tuple[str, ...] | None = None

    def error(self, reason: str) -> HloParseError:
        """An error that shows this instruction."""
        line = f"%{self.name} = {self.shape_text} {self.opcode}({self.operand_text})"
        return HloParseError(reason, line + self.attribute_text, self.number)

    @property
    def shape(self) -> Shape:
        """The result's shape."""
        try:
            return parse_shape(self.shape_text)
        except HloParseError as error:
            raise self.error(error.reason) from None

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        if self._operands is None:
            names = () if self.opcode in WITHOUT_OPERANDS else operand_names(self.operand_text)
            self._operands = tuple(names)
        return self._operands

    def operand(self, index: int) -> str:
        """The name of one operand."""
        if index >= len(self.operands):
            raise self.error(f"operand {index} is missing")
        return self.operands[index]

    @property
    def attributes(self) -> Mapping[str, str]:
        """The attributes after the operands: ``lhs_contracting_dims`` → ``{1}``, as text."""
        if self._attributes is None:
            self._attributes = {}
            for part in split_top_level(self.attribute_text):
                key, equals, value = part.partition("=")
                if equals:
                    self._attributes[key.strip()] = value.strip()
        return self._attributes

    def attribute(self, key: str) -> str:
        """One attribute's text, empty if absent; parses the others only if necessary."""
        alone = plain_attribute(self.attribute_text, key) if self._attributes is None else None
        return self.attributes.get(key, "") if alone is None else alone

    def integers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as ``{0,1}``; empty if absent."""
        return tuple(map(int, _INTEGER.findall(self.attribute(key))))

    def one_integer(self, key: str, *, below: int) -> int:
        """An attribute that numbers a dimension or an element.

        Raises:
            HloParseError: it is absent, not one number, or not under `below`.
        """
        found = self.integers(key)
        if len(found) != 1 or not 0 <= found[0] < below:
            raise self.error(f"{self.opcode} without a valid {key}")
        return found[0]

    def kept_ranges(self) -> tuple[range, ...]:
        """The positions that a ``slice`` keeps.

        Raises:
            HloParseError: it does not give them for each of its dimensions.
        """
        found = _SLICE.findall(self.attribute("slice"))
        if len(found) != len(self.shape.dims):
            raise self.error("slice without the positions that it keeps")
        return tuple(range(int(start), int(end), int(step or 1)) for start, end, step in found)

    def computations(self, key: str) -> tuple[str, ...]:
        """Names of the computations in an attribute: ``calls``, ``body``, ``condition`` …"""
        value = self.attribute(key)
        if value[:1] == "%" and not (" " in value or "," in value):
            return (value[1:],)
        if "%" in value:
            return tuple(PERCENT_NAME.findall(value))
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
        if '"host"' not in self.attribute_text and '"HostExecute"' not in self.attribute_text:
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
        return op_name_in(self.attribute_text)

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
        return self.attribute(key).strip('"')

    def __repr__(self) -> str:
        return f"HloInstruction(%{self.name} = {self.shape_text} {self.opcode}(…))"


@dataclass(slots=True, eq=False, repr=False)
class HloComputation:
    """A named list of instructions, callable by instructions of other computations.

    Attributes:
        name: unique in its module.
        number: number of its first line.
        deferred: the text of its instructions until they are needed, which may be never.
        elementwise: FLOPs of one run, if it has only elementwise work; else None.
        is_defined: whether reading it showed all operands to be defined.
        roots: how many are marked as ROOT: one, in a complete program.
    """

    name: str
    number: int
    deferred: str = ""
    elementwise: int | None = None
    is_defined: bool = False
    roots: int = 0
    _made: dict[str, HloInstruction] = field(default_factory=dict)
    _marked: str = ""
    _parameters: dict[int, HloInstruction] | None = None
    _users: dict[str, list[HloInstruction]] | None = None

    @property
    def instructions(self) -> dict[str, HloInstruction]:
        """By name, in the order of the text."""
        if self.deferred:
            lines = enumerate(read_lines(self.deferred) or (), self.number + 1)
            self._made = {line[1]: HloInstruction(*line[1:], number) for number, line in lines}
            self.deferred = ""
        return self._made

    def mark_root(self, name: str) -> None:
        """Records an instruction that is marked as ROOT."""
        self.roots += 1
        self._marked = self._marked or name

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
        if self.roots:
            return self.instructions[self._marked]
        for instruction in reversed(self.instructions.values()):
            return instruction
        raise HloParseError(f"computation %{self.name} is empty", number=self.number)

    @property
    def users(self) -> Mapping[str, list[HloInstruction]]:
        """The instructions that use each instruction's result, by its name."""
        if self._users is None:
            users = self._users = {}
            for instruction in self.instructions.values():
                for name in instruction.operands:
                    users.setdefault(name, []).append(instruction)
        return self._users

    @property
    def parameters(self) -> Mapping[int, HloInstruction]:
        """Parameters by their number."""
        if self._parameters is None:
            self._parameters = {}
            for instruction in self.instructions.values():
                if instruction.opcode == "parameter":
                    text = instruction.operand_text.strip()
                    if not text.isdecimal() or int(text) >= len(self.instructions):
                        raise instruction.error("parameter without a number that it can have")
                    self._parameters[int(text)] = instruction
        return self._parameters


InstructionRef = tuple[HloComputation, HloInstruction]
"""An instruction, and the computation that it is in."""
# Not a list of pairs: each garbage collection would visit millions of them.
Index = tuple[list[HloComputation], list[HloInstruction]]
_Callers = tuple[dict[str, HloComputation], dict[str, HloInstruction | None]]  # None for several


@dataclass(eq=False, repr=False)
class HloModule:
    """A program.

    Attributes:
        name: name of the program.
        header: its first line.
        computations: by name.
        indexed: for each opcode of `opcodes.INDEXED`, the computations and instructions with it.
        entry_name: the computation that runs first.
        full: returns the program with its large constants written out, or None.
    """

    name: str
    header: str
    computations: dict[str, HloComputation]
    indexed: Mapping[str, Index]
    entry_name: str
    full: Callable[[], HloModule | None] = lambda: None

    @property
    def entry(self) -> HloComputation:
        """The ENTRY computation."""
        return self[self.entry_name]

    def __getitem__(self, name: str) -> HloComputation:
        try:
            return self.computations[name]
        except KeyError:
            raise HloParseError(f"there is no computation %{name}") from None

    def with_opcode(self, opcode: str) -> Iterable[InstructionRef]:
        """The instructions of an opcode in `indexed`, with their computations."""
        return zip(*self.indexed.get(opcode, ((), ())), strict=True)

    @functools.cached_property
    def slicing(self) -> frozenset[str]:
        """Names of the computations that have a ``dynamic-slice``."""
        return frozenset([computation.name for computation, _ in self.with_opcode("dynamic-slice")])

    def caller(self, name: str) -> InstructionRef | None:
        """The computation and instruction that call a computation, if there is exactly one."""
        computations, calls = self._callers
        return (computations[name], call) if (call := calls.get(name)) else None

    @functools.cached_property
    def _callers(self) -> _Callers:
        computations: dict[str, HloComputation] = {}
        calls: dict[str, HloInstruction | None] = {}
        for opcode in CALLS:
            for computation, call in self.with_opcode(opcode):
                callees = call.callees
                for callee in callees if len(callees) == 1 else set(callees):
                    calls[callee] = None if callee in calls else call
                    computations[callee] = computation
        return computations, calls

    def reducer_opcode(self, instruction: HloInstruction) -> str:
        """The opcode that combines both parameters of a reducer; empty if it does anything else."""
        names = instruction.computations("to_apply")
        if len(names) != 1:
            return ""
        reducer = self[names[0]]
        makers = {reducer[name] for name in reducer.root.operands}
        is_plain = len(makers) == 2 and all(maker.opcode == "parameter" for maker in makers)
        return reducer.root.opcode if is_plain else ""

    def header_int(self, key: str) -> int:
        """A number in the first line, such as ``num_partitions``; 1 if absent."""
        start = self.header.find(f"{key}=")  # fast, and the header is long
        match = re.search(rf"\b{key}=(\d+)", self.header[start - 1 :]) if start > 0 else None
        return int(match[1]) if match else 1
