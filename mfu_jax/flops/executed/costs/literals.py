"""The values of constant operands, as HLO text: tables that tell kernels which blocks to skip."""

from __future__ import annotations

from typing import NamedTuple

from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.text import ELLIPSIS
from mfu_jax.flops.executed.hlo.value_refs import Frame, UnknownValueError
from mfu_jax.flops.executed.integers.instructions import compile_instruction, constant_text
from mfu_jax.flops.executed.integers.values import (
    Value,
    constant_value,
    elements_of,
    is_small_integer,
)

_LARGEST = 1 << 20  # elements of a table


class _Evaluated(NamedTuple):
    """A value, whether it depends on the device, and whether on a constant that is not written."""

    value: Value = None
    reads_device: bool = False
    elided: bool = False


class Literals:
    """Finds the values of constant operands.

    Args:
        dataflow: dataflow of the program.
        elided: whether to have the text printed again for constants that it elides.

    Attributes:
        elided: whether a constant was needed that is not in the text; the caller resets it.
        by_device: indices of operands that differ between devices, since `choose`.
    """

    def __init__(self, dataflow: Dataflow, *, elided: bool = False) -> None:
        self.dataflow = dataflow
        self.reads_elided = elided
        self.elided = False
        self.by_device: set[int] = set()
        self._device = 0
        # With the frame, so that no other one gets the same `id`.
        self._values: dict[tuple[int, str, int], tuple[Frame, _Evaluated]] = {}

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
        try:
            operand = computation.operand(instruction, index)
            frame, source, path = self.dataflow.follow(frame, operand)
            if path:
                return None
            if source.opcode == "constant":
                text = self._text(frame.computation, source)
                self.elided |= ELLIPSIS in text
                return text if text and ELLIPSIS not in text else None
            found = self._value(frame, source)
        except UnknownValueError:
            return None
        self.elided |= found.elided
        if found.reads_device:
            self.by_device.add(index)
        return ", ".join(map(str, elements_of(found.value))) or None

    def _text(self, computation: HloComputation, constant: HloInstruction) -> str:
        if not self.reads_elided:
            return constant.operand_text
        return constant_text(self.dataflow.module, computation, constant)

    def on_each_device(self, frame: Frame, instruction: HloInstruction) -> list[int] | None:
        """A scalar's value on each device; None if it depends on data."""
        numbers: list[int] = []
        for device in range(self.dataflow.module.header_int("num_partitions")):
            self.choose(device)
            value = self._value(frame, instruction).value
            if not isinstance(value, int):
                return None
            numbers.append(value)
        return numbers

    def numbers(
        self, computation: HloComputation, instruction: HloInstruction
    ) -> tuple[int, ...] | None:
        """The integer that each device computes from its own number; None if it is not known."""
        try:
            found = self.on_each_device(self.dataflow.frame_of(computation), instruction)
        except (UnknownValueError, ValueError, IndexError):
            return None
        return None if found is None else tuple(found)

    def _value(self, frame: Frame, instruction: HloInstruction, depth: int = 0) -> _Evaluated:
        """An instruction's result on the chosen device; None if it depends on data.

        Raises:
            UnknownValueError: a fusion or call along the way cannot be followed.
        """
        key = (id(frame), instruction.name, self._device)
        if key not in self._values:
            self._values[key] = frame, self._computed(frame, instruction, depth)
        return self._values[key][1]

    def _computed(self, frame: Frame, instruction: HloInstruction, depth: int) -> _Evaluated:
        frame, source, path = self.dataflow.follow(frame, instruction)
        if path or depth > MAX_DEPTH or not is_small_integer(source.shape, _LARGEST):
            return _Evaluated()
        if source.opcode == "partition-id":
            return _Evaluated(self._device, reads_device=True)
        if source.opcode == "constant":
            text = self._text(frame.computation, source)
            return _Evaluated(constant_value(text, source.shape), elided=ELLIPSIS in text)
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
            return _Evaluated()
        operands = [
            self._value(frame, frame.computation[name], depth + 1) for name in source.operands
        ]
        values = [operand.value for operand in operands]
        return _Evaluated(
            None if None in values else compute(values),
            reads_device=any(operand.reads_device for operand in operands),
            elided=any(operand.elided for operand in operands),
        )
