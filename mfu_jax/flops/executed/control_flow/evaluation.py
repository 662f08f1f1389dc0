"""What the scalar programs of one HLO program share: constants, devices, and the step limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.text import ELIDED, ELLIPSIS
from mfu_jax.flops.executed.integers.instructions import constant_text
from mfu_jax.flops.executed.integers.values import Value, constant_value

if TYPE_CHECKING:
    from mfu_jax.flops.executed.control_flow.call_graph import CallGraph

MAX_STEPS = 2_000_000  # evaluated for one program: limits the time to seconds
UNKNOWN = 0  # the register of all unknown values


class StepLimitError(Exception):
    """The program needs more steps than `MAX_STEPS`."""


@dataclass(slots=True)
class Evaluation:
    """What the scalar programs of one HLO program share.

    Attributes:
        dataflow: of the program.
        graph: makes the programs of loops and branches. It is a weak reference: it refers back to
            this, and a counted program must not wait for the garbage collector.
        devices: number of devices that run the program.
        device_opcode: opcode of the instruction that gives the number of the running device.
        steps_left: steps left of `MAX_STEPS`.
        elided: whether a constant was needed that the text elides.
        limited: whether a loop was too long to simulate.
    """

    dataflow: Dataflow
    graph: CallGraph
    devices: int = 1
    device_opcode: str = ""
    steps_left: int = field(default_factory=lambda: MAX_STEPS)
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
        """Reasons other than data why a value is unknown, as text."""
        loop = ", or on a loop that is too long to be run"
        return loop * self.limited + f", or on {ELIDED}" * self.elided

    def constant(self, computation: HloComputation, instruction: HloInstruction) -> Value:
        """The value of a constant, even if the program's text elides it."""
        text = constant_text(self.dataflow.module, computation, instruction)
        self.elided |= ELLIPSIS in text
        return constant_value(text, instruction.shape)
