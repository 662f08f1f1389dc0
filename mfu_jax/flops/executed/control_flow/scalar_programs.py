"""Scalar programs: the few instructions that compute the integers deciding what runs.

A `ScalarProgram` is a backward slice of a computation, as a straight-line program over registers:
through tuples, copies, fusions, calls, loops and conditionals. What it cannot evaluate is unknown:
floats, large arrays, the arguments of the entry. The device number is an input like any other. If
devices exchange integers, the values of all devices are computed together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mfu_jax.flops.executed.control_flow.evaluation import UNKNOWN, Evaluation, StepLimitError
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.value_refs import (
    DEVICE_ID,
    DEVICE_ID_SHAPE,
    Frame,
    ParameterRef,
    RefKey,
    TuplePath,
    UnknownValueError,
    ValueRef,
)
from mfu_jax.flops.executed.integers.arithmetic import LAZY
from mfu_jax.flops.executed.integers.arrays import keeps_order
from mfu_jax.flops.executed.integers.by_device import on_each, on_each_choice
from mfu_jax.flops.executed.integers.collective_eval import COLLECTIVES, compile_collective
from mfu_jax.flops.executed.integers.instructions import branch_index, compile_instruction
from mfu_jax.flops.executed.integers.values import (
    ByDevice,
    Compute,
    IntegerTable,
    Value,
    is_small_integer,
)

_MAX_NESTING = 30  # of loops and conditionals
_SAME_VALUE = frozenset(
    "copy reshape opt-barrier optimization-barrier domain add-dependency".split()
)
_LAZY = LAZY | {"while", "conditional"}  # not all operands needed


class RegisterStep(NamedTuple):
    """Computes one register from others.

    Attributes:
        register: the register that it sets.
        instruction: the instruction that it evaluates.
        compute: takes the values of one device; if `is_joint`, of all devices together.
        operands: registers.
        given: picks the values of `operands` from those of all registers.
        is_joint: whether devices exchange integers in it.
    """

    register: int
    instruction: HloInstruction
    compute: Compute
    operands: tuple[int, ...]
    given: Callable[[list[Value]], Sequence[Value]]
    is_joint: bool


_MakeRegister = Callable[[list[int]], int]
_Sources = tuple[_MakeRegister, list[ValueRef]]
_NOT_KNOWN: _Sources = (lambda registers: UNKNOWN, [])


class ScalarProgram:
    """The steps that compute the wanted values of one computation.

    Attributes:
        frame: frame of the computation.
        inputs: the arguments that the steps need, in the order in which `run` takes them.
        steps: in the order in which they run.
        shapes: shape of each register's value.
        initial: the value of each register before any step: that of a constant, else None.
        is_joint: whether devices exchange integers in it.
    """

    def __init__(
        self, evaluation: Evaluation, computation: HloComputation, *, is_entry: bool = False
    ) -> None:
        self.evaluation = evaluation
        self.frame = Frame(computation)
        self.is_entry = is_entry  # its arguments are data
        self.inputs: dict[ParameterRef, int] = {}
        self.steps: list[RegisterStep] = []
        self.sizes: list[tuple[int, int]] = []  # the register and size of each input
        self.shapes: list[Shape] = [Shape("opaque")]
        self.initial: list[Value] = [None]
        self.is_joint = False
        self._joint_runs: dict[tuple[Value, ...], list[Value]] = {}
        self._registers: dict[RefKey, int] = {}

    def run(self, inputs: Sequence[Value]) -> list[Value]:
        """The values of all registers, given values of `inputs`.

        Raises:
            StepLimitError: the program needs too many steps.
        """
        if self.is_joint or ByDevice in map(type, inputs):
            return self._run_jointly(tuple(inputs))
        self.evaluation.spend(1 + len(self.steps))
        values = self._start(inputs)
        for register, _, compute, _, given, _ in self.steps:
            values[register] = compute(given(values))
        return values

    def _start(self, inputs: Sequence[Value]) -> list[Value]:
        """The values of all registers before any step."""
        values = self.initial.copy()
        for (register, size), value in zip(self.sizes, inputs, strict=True):
            if type(value) is int:
                fits = size == 1
            else:
                alone = value.values if isinstance(value, ByDevice) else (value,)
                fits = all(
                    len(v.elements) == size if isinstance(v, IntegerTable) else size == 1
                    for v in alone
                )
            if fits:
                values[register] = value
        return values

    def _run_jointly(self, inputs: tuple[Value, ...]) -> list[Value]:
        """The same for all devices; cached, because each device asks for it."""
        if inputs not in self._joint_runs:
            self.evaluation.spend(self.evaluation.devices * (1 + len(self.steps)))
            values = self._start(inputs)
            for register, _, compute, _, given, is_joint in self.steps:
                operands = given(values)
                values[register] = compute(operands) if is_joint else on_each(compute, operands)
            self._joint_runs[inputs] = values
        return self._joint_runs[inputs]

    def root(self, path: TuplePath = ()) -> int:
        """The register of the computation's result, or of the array at `path` of its tuple."""
        return self.register(self.frame.computation.root, path)

    def register(self, instruction: HloInstruction, path: TuplePath = ()) -> int:
        """The register of an instruction of the computation; adds the steps that compute it."""
        wanted = ValueRef(self.frame, instruction, path)
        first = wanted.key()
        registers = self._registers
        stack = [(first, wanted)]
        pending: dict[
            RefKey, tuple[Shape | None, _MakeRegister, list[tuple[RefKey, ValueRef]]]
        ] = {}
        while stack:
            key, ref = stack[-1]
            if key in registers:
                stack.pop()
                continue
            if key not in pending:
                shape = ref.shape()
                make, found = self._sources(ref, shape)
                pending[key] = shape, make, [(source.key(), source) for source in found]
            shape, make, sources = pending[key]
            missing = [pair for pair in sources if pair[0] not in registers]
            if not missing:
                register = make([registers[source] for source, _ in sources])
                registers[key] = register if self._holds(register, shape) else UNKNOWN
                stack.pop()
            elif any(source in pending for source, _ in missing):
                raise ref.instruction.error("an instruction that depends on itself")
            stack += missing
        return registers[first]

    def _holds(self, register: int, shape: Shape | None) -> bool:
        """Whether a register's value has the dtype and size of a shape."""
        held = self.shapes[register]
        return shape is held or (
            shape is not None and (shape.dtype, shape.size) == (held.dtype, held.size)
        )

    def _add(self, shape: Shape, value: Value = None) -> int:
        """A new register."""
        self.shapes.append(shape)
        self.initial.append(value)
        return len(self.shapes) - 1

    def _add_step(
        self,
        instruction: HloInstruction,
        shape: Shape,
        compute: Compute,
        operands: list[int],
        *,
        is_joint: bool = False,
    ) -> int:
        """A register that a step computes: immediately if all its operands are known."""
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
        given = _given(operands)
        self.steps.append(
            RegisterStep(register, instruction, compute, tuple(operands), given, is_joint)
        )
        self.is_joint |= is_joint
        return register

    def _sources(self, ref: ValueRef, shape: Shape | None) -> _Sources:
        """The values that a ref's value comes from, and how to make its register from theirs."""
        frame, instruction, path = ref
        if shape is None or not is_small_integer(shape):
            return _NOT_KNOWN
        opcode = instruction.opcode
        if path == DEVICE_ID or opcode == self.evaluation.device_opcode:
            return lambda _: self._input(ParameterRef(0, DEVICE_ID), DEVICE_ID_SHAPE), []
        if opcode == "get-tuple-element":
            return _same(ref.operand(0, (*instruction.integers("index"), *path)))
        if opcode == "tuple" and path:
            return _same(ref.operand(path[0], path[1:]))
        if opcode == "parameter":
            return self._parameter(ref, shape)
        if opcode in _SAME_VALUE:
            return _same(ref.operand(0, path))
        if opcode == "copy-start" and path[:1] in ((0,), (1,)):  # (result, operand, context)
            return _same(ref.operand(0, path[1:]))
        if opcode == "bitcast" and keeps_order(ref.operand(0).shape(), shape):
            return _same(ref.operand(0))
        if opcode in ("fusion", "call"):
            return _same(self._inside(frame, instruction, path))
        if opcode == "while":
            return self._loop(ref, shape)
        if opcode == "conditional":
            return self._conditional(ref, shape)
        if opcode.endswith("-done"):
            return self._done(ref, shape)
        if opcode in COLLECTIVES:
            return self._received(ref, path, opcode, shape)
        if opcode == "constant":
            return lambda _: self._constant(frame.computation, instruction), []
        return _NOT_KNOWN if path else self._computed(ref, opcode, shape)

    def _constant(self, computation: HloComputation, instruction: HloInstruction) -> int:
        value = self.evaluation.constant(computation, instruction)
        return UNKNOWN if value is None else self._add(instruction.shape, value)

    def _parameter(self, ref: ValueRef, shape: Shape) -> _Sources:
        text = ref.instruction.operand_text
        number = int(text) if text.isdecimal() else -1
        if ref.frame.call is not None:
            try:
                return _same(ValueRef(*ref.frame.argument(ref.instruction), ref.path))
            except UnknownValueError:
                raise ref.instruction.error("parameter without an argument") from None
        if self.is_entry or number < 0:
            return _NOT_KNOWN
        return lambda _: self._input(ParameterRef(number, ref.path), shape), []

    def _input(self, parameter: ParameterRef, shape: Shape) -> int:
        if parameter not in self.inputs:
            self.inputs[parameter] = register = self._add(shape)
            self.sizes.append((register, shape.size))
        return self.inputs[parameter]

    def _inside(self, frame: Frame, call: HloInstruction, path: TuplePath) -> ValueRef:
        """The result of the computation that a fusion or call runs."""
        try:
            inner = self.evaluation.dataflow.enter(frame, call)
        except UnknownValueError:
            raise call.error(f"{call.opcode} without its computation") from None
        return ValueRef(inner, inner.computation.root, path)

    def _done(self, ref: ValueRef, shape: Shape) -> _Sources:
        """The result of asynchronous work, as if it were done at its start."""
        started = ref.operand(0)
        while started.instruction.opcode.endswith("-update"):
            started = started.operand(0)
        opcode = started.instruction.opcode.removesuffix("-start")
        if opcode == "copy":
            return _same(started.operand(0, ref.path))
        if opcode in ("async", "call", "fusion"):
            return _same(self._inside(ref.frame, started.instruction, ref.path))
        if opcode in COLLECTIVES:
            return self._received(started, ref.path, opcode, shape)
        return _NOT_KNOWN if ref.path else self._computed(started, opcode, shape)

    def _received(self, ref: ValueRef, path: TuplePath, opcode: str, shape: Shape) -> _Sources:
        """What a device receives, computed from the values of all devices."""
        evaluation, instruction = self.evaluation, ref.instruction
        index = path[0] if path else 0  # of several that are sent at once
        is_one_of = len(instruction.operands) == 1 or (path and index < len(instruction.operands))
        if not evaluation.device_opcode or len(path) > 1 or not is_one_of:
            return _NOT_KNOWN
        sent = ref.operand(index)
        sent_shape = sent.shape()
        if sent_shape is None or not is_small_integer(sent_shape):
            return _NOT_KNOWN
        compute = compile_collective(
            evaluation.dataflow.module, instruction, opcode, sent_shape, shape
        )
        if compute is None:
            return _NOT_KNOWN
        number = ValueRef(ref.frame, instruction, DEVICE_ID)
        return self._joint(instruction, shape, compute), [number, sent]

    def _joint(self, instruction: HloInstruction, shape: Shape, compute: Compute) -> _MakeRegister:
        """Makes a step that takes the values of all devices together."""
        return lambda sources: self._add_step(instruction, shape, compute, sources, is_joint=True)

    def _computed(self, ref: ValueRef, opcode: str, shape: Shape) -> _Sources:
        instruction, computation = ref.instruction, ref.frame.computation
        compute = compile_instruction(
            self.evaluation.dataflow.module, computation, instruction, opcode, shape
        )
        if compute is None:
            return _NOT_KNOWN
        operands = [ref.operand(i) for i in range(len(instruction.operands))]
        return lambda registers: self._add_step(instruction, shape, compute, registers), operands

    def _loop(self, ref: ValueRef, shape: Shape) -> _Sources:
        """A value after a ``while``."""
        evaluation, instruction, path = self.evaluation, ref.instruction, ref.path
        if evaluation.nesting > _MAX_NESTING:
            return _NOT_KNOWN
        evaluation.nesting += 1
        loop = evaluation.graph.loop(instruction, (path,))
        evaluation.nesting -= 1
        if loop.is_invariant(path):
            return _same(ref.operand(0, path))

        def compute(values: Sequence[Value]) -> Value:
            return loop.final(values, path)

        starts = [ref.operand(0, start) for start in loop.paths]
        if loop.is_joint:
            return self._joint(instruction, shape, compute), starts
        return lambda registers: self._add_step(instruction, shape, compute, registers), starts

    def _conditional(self, ref: ValueRef, shape: Shape) -> _Sources:
        """A result of the branch that runs."""
        evaluation, instruction = self.evaluation, ref.instruction
        if evaluation.nesting > _MAX_NESTING:
            return _NOT_KNOWN
        evaluation.nesting += 1
        branches = [evaluation.graph.branch(name, ref.path) for name in instruction.callees]
        evaluation.nesting -= 1
        chosen_by = ref.operand(0)
        sources = [chosen_by]
        starts = []  # where each branch's inputs start among the sources
        for number, (branch, _) in enumerate(branches):
            starts.append(len(sources))
            sources += [ref.operand(1 + number, parameter.path) for parameter in branch.inputs]

        def branch_of(value: Value) -> int | None:
            return branch_index(chosen_by.instruction, len(branches), value)

        def compute(values: Sequence[Value]) -> Value:
            choices, *rest = values
            if isinstance(choices, ByDevice):
                return on_each_choice(choices, branch_of, compute, rest)
            chosen = branch_of(choices)
            if chosen is None:
                return None
            branch, register = branches[chosen]
            start = starts[chosen]
            return branch.run(values[start : start + len(branch.inputs)])[register]

        if any(branch.is_joint for branch, _ in branches):
            return self._joint(instruction, shape, compute), sources
        return lambda registers: self._add_step(instruction, shape, compute, registers), sources


def _given(registers: list[int]) -> Callable[[list[Value]], Sequence[Value]]:
    """Picks the values of some registers; a long loop spends most of its time here."""
    if len(registers) == 1:  # a single index would give no sequence
        return operator.itemgetter(slice(registers[0], registers[0] + 1))
    return operator.itemgetter(*registers)


def _same(source: ValueRef) -> _Sources:
    return (lambda registers: registers[0]), [source]
