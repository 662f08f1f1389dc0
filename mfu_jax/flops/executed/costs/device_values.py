"""Integers that follow from the device number: the device's part of a constant table."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, Dataflow, Frame
from mfu_jax.flops.executed.hlo.module import HloInstruction
from mfu_jax.flops.executed.integers.instructions import compile_instruction
from mfu_jax.flops.executed.integers.values import Value, constant_value, is_small_integer

LARGEST = 1 << 20  # elements of a table


class DeviceValues:
    """Evaluates small integer arrays of one device.

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
        if path or depth > MAX_DEPTH or not is_small_integer(source.shape, LARGEST):
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
            largest=LARGEST,
        )
        if compute is None:
            return None
        operands = range(len(source.operands))
        values = [
            self.value(frame, frame.computation.operand(source, i), depth + 1) for i in operands
        ]
        return None if None in values else compute(values)
