"""The values of constant operands, as HLO text: tables that tell kernels which blocks to skip."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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

    def choose(self, device: int) -> None:
        """Chooses the device whose tables are read, if devices have different ones."""
        self._device = device
        self.by_device = set()

    def of(
        self, computation: HloComputation, instruction: HloInstruction, index: int
    ) -> str | None:
        """The text of a constant operand's value, even if the program's text elides it.

        XLA writes a table of equal elements as a broadcast, and a table of positions as an iota.
        """
        frame, operand = (
            self.dataflow.frame_of(computation),
            computation.operand(instruction, index),
        )
        try:
            frame, source, path = self.dataflow.follow(frame, operand)
            if path:
                return None
            if source.opcode != "broadcast":
                return self._text(frame, source) or self._computed(frame, source, index)
            frame, element, path = self.dataflow.follow(frame, frame.computation.operand(source, 0))
        except UnknownValueError:
            return None
        times = source.shape.size
        if path or element.shape.size != 1 or times > _LARGEST:
            return None
        text = self._text(frame, element)
        return text and ", ".join([text] * times)

    def _text(self, frame: Frame, source: HloInstruction) -> str | None:
        is_iota = source.opcode == "iota" and source.shape.size <= _LARGEST
        return _positions(source) if is_iota else self._constant(frame, source)

    def _computed(self, frame: Frame, source: HloInstruction, index: int) -> str | None:
        """A table that the device computes from constants and its own number."""
        values = _DeviceValues(self.dataflow, self._constant, self._device)
        elements = elements_of(values.value(frame, source))
        if values.by_device:
            self.by_device.add(index)
        return ", ".join(map(str, elements)) or None

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


def _positions(iota: HloInstruction) -> str:
    """The elements of an ``iota``, in row-major order."""
    dimension = iota.one_integer("iota_dimension", below=len(iota.shape.dims))
    places = itertools.product(*(range(size) for size in iota.shape.dims))
    return ", ".join(str(place[dimension]) for place in places)


class _DeviceValues:
    """Evaluates small integer arrays that follow from the number of one device.

    Args:
        dataflow: dataflow of the program.
        text: returns the text of a constant's value, or None.
        device: its number among the program's partitions.

    Attributes:
        by_device: whether a requested value depends on the device.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        text: Callable[[Frame, HloInstruction], str | None],
        device: int,
    ) -> None:
        self.dataflow = dataflow
        self.text = text
        self.device = device
        self.by_device = False

    def value(self, frame: Frame, instruction: HloInstruction, depth: int = 0) -> Value:
        """An instruction's result; None if it depends on data.

        Raises:
            UnknownValueError: a fusion or call along the way cannot be followed.
        """
        frame, source, path = self.dataflow.follow(frame, instruction)
        if path or depth > MAX_DEPTH or not is_small_integer(source.shape, _LARGEST):
            return None
        if source.opcode == "partition-id":
            self.by_device = True
            return self.device
        if source.opcode == "constant":
            text = self.text(frame, source)
            return constant_value(text, source.shape) if text else None
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
        operands = range(len(source.operands))
        values = [
            self.value(frame, frame.computation.operand(source, i), depth + 1) for i in operands
        ]
        return None if None in values else compute(values)
