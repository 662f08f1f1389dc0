"""Slices: the few instructions of a computation that make the integers which decide what runs.

A `Slice` is a straight line of steps over registers, through tuples, copies, fusions, calls, loops
and conditionals. What it cannot evaluate is unknown: floats, large arrays, the program's arguments.
The number of the device is an input like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mfu_jax.flops.executed.dataflow import Frame, TuplePath, UnknownValueError
from mfu_jax.flops.executed.exchanges import EXCHANGES, received
from mfu_jax.flops.executed.hlo import (
    ELIDED,
    HloComputation,
    HloInstruction,
    HloModule,
    Shape,
)
from mfu_jax.flops.executed.integers.arrays import keeps_order
from mfu_jax.flops.executed.integers.instructions import branch_index, compile_instruction
from mfu_jax.flops.executed.integers.values import (
    Compute,
    Table,
    Value,
    constant_value,
    is_small_integer,
)
from mfu_jax.flops.executed.places import DEVICE, NUMBER, Key, Leaf, Place

UNKNOWN = 0  # the register of what is not known
MAX_STEPS = 2_000_000  # evaluated for one program: bounds the time to seconds
_MAX_NESTING = 30  # of loops and conditionals
_SAME_VALUE = frozenset(
    "copy reshape opt-barrier optimization-barrier domain add-dependency".split()
)
_LAZY = frozenset("and or multiply select while conditional".split())  # not all operands needed


class Step(NamedTuple):
    """Computes one register from others."""

    register: int
    instruction: HloInstruction
    compute: Compute
    operands: tuple[int, ...]


class StepLimitError(Exception):
    """The program needs more steps than `MAX_STEPS`."""


class LoopSlice(Protocol):
    """The part of a ``while`` that some values of its state depend on."""

    paths: list[TuplePath]

    def is_invariant(self, path: TuplePath) -> bool:
        """Whether the body passes a value on unchanged."""

    def final(self, initial: Sequence[Value], path: TuplePath) -> Value:
        """A value after the loop, for values of `paths` before it."""


class Parts(Protocol):
    """The slices of loops and branches, each made once.

    Attributes:
        branches: by a conditional's computation and the path of a result, with its register.
    """

    branches: dict[tuple[str, TuplePath], tuple[Slice, int]]

    def loop(
        self, evaluation: Evaluation, instruction: HloInstruction, wanted: tuple[TuplePath, ...]
    ) -> LoopSlice:
        """The slice of a ``while``, for the wanted paths of its state."""


@dataclass(slots=True)
class Evaluation:
    """What all slices of one program share.

    Attributes:
        module: the program.
        full_module: returns the program with its large constants written out, or None.
        parts: keeps the slices. It is a weak reference: they hold this, and a counted program
            must not wait for the garbage collector.
        devices: that run the program.
        device_opcode: of the instruction that says which device runs the program.
        steps_left: of `MAX_STEPS`.
        elided: whether a constant was needed that the text elides.
        limited: whether a loop was too long to be run.
    """

    module: HloModule
    full_module: Callable[[], HloModule | None]
    parts: Parts
    devices: int = 1
    device_opcode: str = ""
    steps_left: int = MAX_STEPS
    elided: bool = False
    limited: bool = False
    nesting: int = 0

    def spend(self, steps: int) -> None:
        """Accounts for evaluated steps.

        Raises:
            StepLimitError: there were too many.
        """
        self.steps_left -= steps
        if self.steps_left < 0:
            raise StepLimitError

    def doubts(self) -> str:
        """Other reasons than data for a value that is not known."""
        loop = ", or on a loop that is too long to be run"
        return loop * self.limited + f", or on {ELIDED}" * self.elided

    def constant(self, computation: HloComputation, instruction: HloInstruction) -> Value:
        """The value of a constant, even if the program's text elides it."""
        text = instruction.operand_text
        if "..." in text:
            full = self.full_module()
            if full and computation.name in full.computations:
                written = full[computation.name].instructions.get(instruction.name)
                text = written.operand_text if written else text
            self.elided |= "..." in text
        return constant_value(text, instruction.shape)

    def branch(self, name: str, path: TuplePath) -> tuple[Slice, int]:
        """The slice of a conditional's branch that makes its result at `path`; and its register."""
        made = self.parts.branches
        if (name, path) not in made:
            branch = Slice(self, self.module[name])
            made[name, path] = (branch, branch.root(path))
        return made[name, path]


_Make = Callable[[list[int]], int]
_Sources = tuple[_Make, list[Place]]
_NOT_KNOWN: _Sources = (lambda registers: UNKNOWN, [])


class Slice:
    """The steps that make the wanted values of one computation.

    Attributes:
        frame: of the computation.
        inputs: the arguments that the steps need, in the order in which `run` takes them.
        steps: in the order in which they run.
        shapes: of what each register holds.
        initial: the value of each register before any step: that of a constant, else None.
    """

    def __init__(
        self, evaluation: Evaluation, computation: HloComputation, *, is_entry: bool = False
    ) -> None:
        self.evaluation = evaluation
        self.frame = Frame(computation)
        self.is_entry = is_entry  # its arguments are data
        self.inputs: dict[Leaf, int] = {}
        self.steps: list[Step] = []
        self.shapes: list[Shape] = [Shape("opaque")]
        self.initial: list[Value] = [None]
        self._registers: dict[Key, int] = {}
        self._frames: dict[tuple[int, str], Frame] = {}

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """The values of all registers, for values of `inputs`.

        Raises:
            StepLimitError: the program needs too many steps.
        """
        self.evaluation.spend(1 + len(self.steps))
        values = self.initial.copy()
        for register, value in zip(self.inputs.values(), inputs, strict=True):
            elements = len(value.elements) if isinstance(value, Table) else 1
            values[register] = value if elements == self.shapes[register].size else None
        for register, _, compute, operands in self.steps:
            values[register] = compute([values[i] for i in operands])
        return values

    def root(self, path: TuplePath = ()) -> int:
        """The register of the computation's result, or of the array at `path` of its tuple."""
        return self.register(self.frame.computation.root, path)

    def register(self, instruction: HloInstruction, path: TuplePath = ()) -> int:
        """The register of an instruction of the computation; adds the steps that make it."""
        wanted = Place(self.frame, instruction, path)
        stack = [wanted]
        pending: dict[Key, _Sources] = {}
        while stack:
            place = stack[-1]
            key = place.key()
            if key in self._registers:
                stack.pop()
                continue
            if key not in pending:
                pending[key] = self._sources(place)
            make, sources = pending[key]
            missing = [source for source in sources if source.key() not in self._registers]
            if any(source.key() in pending for source in missing):
                raise place.instruction.error("an instruction that depends on itself")
            stack += missing
            if not missing:
                register = make([self._registers[source.key()] for source in sources])
                self._registers[key] = self._checked(place, register)
        return self._registers[wanted.key()]

    def _checked(self, place: Place, register: int) -> int:
        """The register, if it holds what the place's shape says."""
        shape, held = place.shape(), self.shapes[register]
        is_same = shape is not None and (shape.dtype, shape.size) == (held.dtype, held.size)
        return register if is_same else UNKNOWN

    def _add(self, shape: Shape, value: Value = None) -> int:
        """A new register."""
        self.shapes.append(shape)
        self.initial.append(value)
        return len(self.shapes) - 1

    def _add_step(
        self, instruction: HloInstruction, shape: Shape, compute: Compute, operands: list[int]
    ) -> int:
        """A register that a step computes: now if all of its operands are known."""
        is_lazy = instruction.opcode in _LAZY
        if operands and (all if is_lazy else any)(i == UNKNOWN for i in operands):
            return UNKNOWN
        values = [self.initial[i] for i in operands]
        if None not in values:
            try:
                value = compute(values)
            except StepLimitError:
                return UNKNOWN
            return UNKNOWN if value is None else self._add(shape, value)
        register = self._add(shape)
        self.steps.append(Step(register, instruction, compute, tuple(operands)))
        return register

    def _sources(self, place: Place) -> _Sources:
        """The places that a place is made of, and how to make its register from theirs."""
        frame, instruction, path = place
        shape = place.shape()
        if shape is None or not is_small_integer(shape):
            return _NOT_KNOWN
        opcode = instruction.opcode
        if path == DEVICE or opcode == self.evaluation.device_opcode:
            return lambda _: self._input(Leaf(0, DEVICE), NUMBER), []
        if opcode == "get-tuple-element":
            return _same(place.operand(0, (*instruction.integers("index"), *path)))
        if opcode == "tuple" and path:
            return _same(place.operand(path[0], path[1:]))
        if opcode == "parameter":
            return self._parameter(place, shape)
        if opcode in _SAME_VALUE:
            return _same(place.operand(0, path))
        if opcode == "copy-start" and path[:1] in ((0,), (1,)):  # (result, operand, context)
            return _same(place.operand(0, path[1:]))
        if opcode == "bitcast" and keeps_order(place.operand(0).shape(), shape):
            return _same(place.operand(0))
        if opcode in ("fusion", "call"):
            return _same(self._inside(frame, instruction, path))
        if opcode == "while":
            return self._loop(place, shape)
        if opcode == "conditional":
            return self._conditional(place, shape)
        if opcode.endswith("-done"):
            return self._done(place, shape)
        if opcode in EXCHANGES:
            return self._received(place, opcode, shape)
        if opcode == "constant":
            return lambda _: self._constant(frame.computation, instruction), []
        return _NOT_KNOWN if path else self._computed(place, opcode, shape)

    def _constant(self, computation: HloComputation, instruction: HloInstruction) -> int:
        value = self.evaluation.constant(computation, instruction)
        return UNKNOWN if value is None else self._add(instruction.shape, value)

    def _parameter(self, place: Place, shape: Shape) -> _Sources:
        text = place.instruction.operand_text
        number = int(text) if text.isdecimal() else -1
        if place.frame.call is not None:
            try:
                return _same(Place(*place.frame.argument(place.instruction), place.path))
            except UnknownValueError:
                raise place.instruction.error("parameter without an argument") from None
        if self.is_entry or number < 0:
            return _NOT_KNOWN
        return lambda _: self._input(Leaf(number, place.path), shape), []

    def _input(self, leaf: Leaf, shape: Shape) -> int:
        if leaf not in self.inputs:
            self.inputs[leaf] = self._add(shape)
        return self.inputs[leaf]

    def _inside(self, frame: Frame, call: HloInstruction, path: TuplePath) -> Place:
        """The result of the computation that a fusion or call runs."""
        key = (id(frame), call.name)
        if key not in self._frames:
            if len(call.callees) != 1:
                raise call.error(f"{call.opcode} without its computation")
            self._frames[key] = Frame(self.evaluation.module[call.callees[0]], frame, call)
        inner = self._frames[key]
        return Place(inner, inner.computation.root, path)

    def _done(self, place: Place, shape: Shape) -> _Sources:
        """The result of asynchronous work, as if it were done where it is started."""
        started = place.operand(0)
        while started.instruction.opcode.endswith("-update"):
            started = started.operand(0)
        opcode = started.instruction.opcode.removesuffix("-start")
        if opcode == "copy":
            return _same(started.operand(0, place.path))
        if opcode in ("async", "call", "fusion"):
            return _same(self._inside(place.frame, started.instruction, place.path))
        if opcode in EXCHANGES:
            return self._received(started, opcode, shape)
        return _NOT_KNOWN if place.path else self._computed(started, opcode, shape)

    def _received(self, place: Place, opcode: str, shape: Shape) -> _Sources:
        """What a device receives, where the devices' numbers alone say what they send."""
        evaluation, frame, instruction, _ = self.evaluation, *place
        if frame.call is not None or not evaluation.device_opcode or shape.size > 1:
            return _NOT_KNOWN
        part = Slice(evaluation, frame.computation, is_entry=self.is_entry)
        sent = part.register(frame.computation.operand(instruction, 0))
        if any(leaf.path != DEVICE for leaf in part.inputs):
            return _NOT_KNOWN

        def compute(values: list[Value]) -> Value:
            runs = (part.run([d] * len(part.inputs)) for d in range(evaluation.devices))
            return received(evaluation.module, instruction, opcode, values, [r[sent] for r in runs])

        number = Place(frame, instruction, DEVICE)
        return lambda registers: self._add_step(instruction, shape, compute, registers), [number]

    def _computed(self, place: Place, opcode: str, shape: Shape) -> _Sources:
        instruction, computation = place.instruction, place.frame.computation
        compute = compile_instruction(
            self.evaluation.module, computation, instruction, opcode, shape
        )
        if compute is None:
            return _NOT_KNOWN
        operands = [place.operand(i) for i in range(len(instruction.operands))]
        return lambda registers: self._add_step(instruction, shape, compute, registers), operands

    def _loop(self, place: Place, shape: Shape) -> _Sources:
        """A value after a ``while``."""
        evaluation, instruction, path = self.evaluation, place.instruction, place.path
        if evaluation.nesting > _MAX_NESTING:
            return _NOT_KNOWN
        evaluation.nesting += 1
        loop = evaluation.parts.loop(evaluation, instruction, (path,))
        evaluation.nesting -= 1
        if loop.is_invariant(path):
            return _same(place.operand(0, path))

        def compute(values: list[Value]) -> Value:
            return loop.final(values, path)

        starts = [place.operand(0, start) for start in loop.paths]
        return lambda registers: self._add_step(instruction, shape, compute, registers), starts

    def _conditional(self, place: Place, shape: Shape) -> _Sources:
        """A result of the branch that runs."""
        evaluation, instruction = self.evaluation, place.instruction
        if evaluation.nesting > _MAX_NESTING:
            return _NOT_KNOWN
        evaluation.nesting += 1
        branches = [evaluation.branch(name, place.path) for name in instruction.callees]
        evaluation.nesting -= 1
        chosen_by = place.operand(0)
        sources = [chosen_by]
        starts = []  # of each branch's inputs among the sources
        for number, (branch, _) in enumerate(branches):
            starts.append(len(sources))
            sources += [place.operand(1 + number, leaf.path) for leaf in branch.inputs]

        def compute(values: list[Value]) -> Value:
            chosen = branch_index(chosen_by.instruction, len(branches), values[0])
            if chosen is None:
                return None
            branch, register = branches[chosen]
            start = starts[chosen]
            return branch.run(values[start : start + len(branch.inputs)])[register]

        return lambda registers: self._add_step(instruction, shape, compute, registers), sources


def _same(source: Place) -> _Sources:
    return (lambda registers: registers[0]), [source]
