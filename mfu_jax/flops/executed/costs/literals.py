"""The values of constant operands, as HLO text: tables that tell kernels which blocks to skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.value_refs import Frame, UnknownValueError
from mfu_jax.flops.executed.integers.instructions import compile_instruction
from mfu_jax.flops.executed.integers.values import (
    Value,
    constant_value,
    elements_of,
    is_small_integer,
)

_LARGEST = 1 << 20  # elements of a table


class _Evaluated(NamedTuple):
    """A value; its frame, so that no other one gets the same `id`; what it needed."""

    frame: Frame
    value: Value
    reads_device: bool
    elided: bool


class Literals:
    """Finds the values of constant operands.

    Args:
        dataflow: dataflow of the program.
        full_module: returns the same program with its large constants written out, or None.

    Attributes:
        elided: whether a constant was needed that is not in the text; the caller resets it.
        by_device: indices of operands that differ between devices, since `choose`.
    """

    def __init__(self, dataflow: Dataflow, full_module: Callable[[], HloModule | None]) -> None:
        self.dataflow = dataflow
        self.full_module = full_module
        self.elided = False
        self.by_device: set[int] = set()
        self._device = 0
        self._reads_device = False
        self._values: dict[tuple[int, str, int], _Evaluated] = {}

    def choose(self, device: int) -> None:
        """Chooses the device whose tables are read, if devices have different ones."""
        self._device = device
        self.by_device = set()

    def of(
        self, computation: HloComputation, instruction: HloInstruction, index: int
    ) -> str | None:
        """A constant operand's value as text, even if the program's text elides it.

        Other small integer arrays are evaluated, if they follow from constants and the device's
        number: XLA writes a table of equal elements as a broadcast, one of positions as an iota.
        """
        frame = self.dataflow.frame_of(computation)
        self._reads_device = False
        try:
            frame, source, path = self.dataflow.follow(
                frame, computation.operand(instruction, index)
            )
            if path:
                return None
            if text := self._constant(frame, source):
                return text
            elements = elements_of(self._value(frame, source))
        except UnknownValueError:
            return None
        if self._reads_device:
            self.by_device.add(index)
        return ", ".join(map(str, elements)) or None

    def on_each_device(self, frame: Frame, instruction: HloInstruction) -> list[int] | None:
        """A scalar's value on each device; None if it depends on data."""
        numbers: list[int] = []
        for device in range(self.dataflow.module.header_int("num_partitions")):
            self.choose(device)
            value = self._value(frame, instruction)
            if not isinstance(value, int):
                return None
            numbers.append(value)
        return numbers

    def _constant(self, frame: Frame, source: HloInstruction) -> str | None:
        if source.opcode != "constant":
            return None
        if "..." not in source.operand_text:
            return source.operand_text
        full = self.full_module()
        if full is not None and frame.computation.name in full.computations:
            written = full[frame.computation.name].instructions.get(source.name)
            if written and "..." not in written.operand_text:
                return written.operand_text
        self.elided = True
        return None

    def _value(self, frame: Frame, instruction: HloInstruction, depth: int = 0) -> Value:
        """An instruction's result on the chosen device; None if it depends on data.

        Raises:
            UnknownValueError: a fusion or call along the way cannot be followed.
        """
        key = (id(frame), instruction.name, self._device)
        if key not in self._values:
            facts = self._reads_device, self.elided
            self._reads_device = self.elided = False
            try:
                value = self._computed(frame, instruction, depth)
                self._values[key] = _Evaluated(frame, value, self._reads_device, self.elided)
            finally:
                self._reads_device |= facts[0]
                self.elided |= facts[1]
        known = self._values[key]
        self._reads_device |= known.reads_device
        self.elided |= known.elided
        return known.value

    def _computed(self, frame: Frame, instruction: HloInstruction, depth: int) -> Value:
        frame, source, path = self.dataflow.follow(frame, instruction)
        if path or depth > MAX_DEPTH or not is_small_integer(source.shape, _LARGEST):
            return None
        if source.opcode == "partition-id":
            self._reads_device = True
            return self._device
        if source.opcode == "constant":
            text = self._constant(frame, source)
            return constant_value(text, source.shape) if text else None
        if source.opcode == "iota":  # its error comes before that of a damaged text's operands
            source.one_integer("iota_dimension", below=len(source.shape.dims))
        compute = compile_instruction(
            self.dataflow.module,
            frame.computation,
            source,
            source.opcode,
            source.shape,
            largest=_LARGEST,
        )
        if compute is None:
            return None
        operands = [frame.computation[name] for name in source.operands]
        values = [self._value(frame, operand, depth + 1) for operand in operands]
        return None if None in values else compute(values)
