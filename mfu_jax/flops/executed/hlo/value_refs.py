"""References to the values of a program: an instruction's result, or an array of its tuple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape

TuplePath = tuple[int, ...]
"""Indices from a tuple to one of its arrays; empty for an array."""

DEVICE_ID: TuplePath = (-1,)  # for any value: the number of the device that runs the program
DEVICE_ID_SHAPE = Shape("u32")


class UnknownValueError(Exception):
    """The value depends on data, or on an instruction that is not evaluated."""


@dataclass(slots=True, eq=False)
class Frame:
    """One computation and the values of its parameters.

    Attributes:
        computation: the computation.
        outer: the frame of the call.
        call: the instruction that runs it on its operands.
        loop: for a computation inside a loop: the frame of the ``while``, and the ``while``.
    """

    computation: HloComputation
    outer: Frame | None = None
    call: HloInstruction | None = None
    loop: tuple[Frame, HloInstruction] | None = None

    def argument(self, parameter: HloInstruction) -> tuple[Frame, HloInstruction]:
        """The caller's operand for a parameter.

        Raises:
            UnknownValueError: the caller passes no such operand.
        """
        text, outer, call = parameter.operand_text, self.outer, self.call
        if outer is None or call is None or not text.isdecimal() or int(text) >= len(call.operands):
            raise UnknownValueError
        return outer, outer.computation[call.operands[int(text)]]


FramedInstruction = tuple[Frame, HloInstruction]
"""An instruction, and the frame of its computation."""


class ParameterRef(NamedTuple):
    """An array among a computation's arguments: a parameter, or the one at `path` of its tuple."""

    number: int
    path: TuplePath = ()


RefKey = tuple[int, str, TuplePath]


class ValueRef(NamedTuple):
    """A value: an instruction's result, or the array at `path` of its tuple."""

    frame: Frame
    instruction: HloInstruction
    path: TuplePath = ()

    def key(self) -> RefKey:
        """Equal for the same value."""
        return (id(self.frame), self.instruction.name, self.path)

    def operand(self, index: int, path: TuplePath = ()) -> ValueRef:
        """One of the instruction's operands."""
        computation = self.frame.computation
        return ValueRef(self.frame, computation.operand(self.instruction, index), path)

    def shape(self) -> Shape | None:
        """The array's shape; None if the tuple has no such element."""
        if self.path == DEVICE_ID:
            return DEVICE_ID_SHAPE
        shape = self.instruction.shape
        for index in self.path:
            if index >= len(shape.elements):
                return None
            shape = shape.elements[index]
        return shape
