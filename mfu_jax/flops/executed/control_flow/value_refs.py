"""Where the values of a program are."""

from __future__ import annotations

from typing import NamedTuple

from mfu_jax.flops.executed.hlo.dataflow import Frame, TuplePath
from mfu_jax.flops.executed.hlo.module import HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape

DEVICE: TuplePath = (-1,)  # for any value: the number of the device that runs the program
NUMBER = Shape("u32")  # the shape of a device's number


class Leaf(NamedTuple):
    """An array among a computation's arguments: a parameter, or the one at `path` of its tuple."""

    number: int
    path: TuplePath = ()


Key = tuple[int, str, TuplePath]


class Place(NamedTuple):
    """Where a value is: an instruction's result, or the array at `path` of its tuple."""

    frame: Frame
    instruction: HloInstruction
    path: TuplePath = ()

    def key(self) -> Key:
        """Equal for the same place."""
        return (id(self.frame), self.instruction.name, self.path)

    def operand(self, index: int, path: TuplePath = ()) -> Place:
        """The place of one of the instruction's operands."""
        computation = self.frame.computation
        return Place(self.frame, computation.operand(self.instruction, index), path)

    def shape(self) -> Shape | None:
        """The array's shape; None if the tuple has no such element."""
        if self.path == DEVICE:
            return NUMBER
        shape = self.instruction.shape
        for index in self.path:
            if index >= len(shape.elements):
                return None
            shape = shape.elements[index]
        return shape
