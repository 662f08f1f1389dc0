"""Follows a value to the instruction that makes it: through tuples, copies, fusions and loops."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule

MAX_DEPTH = 100

TuplePath = tuple[int, ...]


class UnknownValueError(Exception):
    """The value depends on data, or on an instruction that is not evaluated."""


@dataclass(slots=True, eq=False)
class Frame:
    """One computation and the values of its parameters.

    Attributes:
        computation: the computation.
        arguments: the caller's operands, each in the caller's frame.
        loop: of a computation inside a loop: the ``while``, and the frame that it is in.
    """

    computation: HloComputation
    arguments: tuple[tuple[Frame, HloInstruction], ...] | None = None
    loop: tuple[Frame, HloInstruction] | None = None

    def argument(self, parameter: HloInstruction) -> tuple[Frame, HloInstruction]:
        """The caller's operand for a parameter.

        Raises:
            UnknownValueError: the caller passes no such operand.
        """
        text = parameter.operand_text
        if self.arguments is None or not text.isdecimal() or int(text) >= len(self.arguments):
            raise UnknownValueError
        return self.arguments[int(text)]


SAME_VALUE = {
    "copy",
    "bitcast",
    "reshape",
    "convert",
    "copy-start",
    "copy-done",
    "opt-barrier",
    "optimization-barrier",
}
# Instructions that run one computation once, on their operands.
_CALLS = frozenset({"fusion", "call"})


class Dataflow:
    """Follows values through one program; remembers which parts of a loop's state never change."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self._unchanged: dict[tuple[str, int], bool] = {}  # by loop body and index of its state

    def frame_of(self, computation: HloComputation) -> Frame:
        """The frame of a computation, with those of the computations that enclose it."""
        return self._enclosing(computation, {"while", *_CALLS})

    def frame_in_fusions(self, computation: HloComputation) -> Frame:
        """The frame of a fused computation, up to the first computation that is not fused."""
        return self._enclosing(computation, {"fusion"})

    def _enclosing(self, computation: HloComputation, opcodes: Set[str]) -> Frame:
        chain: list[tuple[HloComputation, HloInstruction, HloComputation]] = []
        inner = computation
        while (caller := self.module.caller(inner.name)) is not None and len(chain) < MAX_DEPTH:
            outer, instruction = caller
            if instruction.opcode not in opcodes:
                break
            chain.append((outer, instruction, inner))
            inner = outer
        frame = Frame(inner)
        for outer, instruction, callee in reversed(chain):
            if instruction.opcode == "while":
                frame = Frame(callee, loop=(frame, instruction))
            else:
                operands = (outer[name] for name in instruction.operands)
                frame = Frame(callee, tuple((frame, operand) for operand in operands))
        return frame

    def enter(self, frame: Frame, call: HloInstruction) -> Frame:
        """The frame of the computation that a fusion or call runs.

        Raises:
            UnknownValueError: it does not run exactly one computation.
        """
        names = call.callees
        if len(names) != 1:
            raise UnknownValueError
        operands = (frame.computation[name] for name in call.operands)
        return Frame(self.module[names[0]], tuple((frame, operand) for operand in operands))

    def follow(
        self, frame: Frame, instruction: HloInstruction, path: TuplePath = ()
    ) -> tuple[Frame, HloInstruction, TuplePath]:
        """Follows a value, or the element at `path` of a tuple, to the instruction that makes it.

        Stops at a parameter whose value is unknown; for a loop's state, the remaining path says
        which element it is.
        """
        for _ in range(10 * MAX_DEPTH):
            opcode = instruction.opcode
            computation = frame.computation
            if opcode == "get-tuple-element":
                path = (*instruction.integers("index"), *path)
                instruction = computation.operand(instruction, 0)
            elif opcode == "tuple" and path:
                instruction, path = computation.operand(instruction, path[0]), path[1:]
            elif opcode in SAME_VALUE:
                instruction = computation.operand(instruction, 0)
            elif opcode in _CALLS:
                frame = self.enter(frame, instruction)
                instruction = frame.computation.root
            elif opcode == "parameter" and frame.arguments is not None:
                frame, instruction = frame.argument(instruction)
            elif opcode == "parameter" and frame.loop is not None and len(path) == 1:
                if not self._is_unchanged(computation, path[0]):
                    break
                frame, loop = frame.loop
                instruction = frame.computation.operand(loop, 0)
            elif opcode == "while" and len(path) == 1:
                bodies = instruction.computations("body")
                if len(bodies) != 1 or not self._is_unchanged(self.module[bodies[0]], path[0]):
                    break
                instruction = computation.operand(instruction, 0)
            else:
                break
        return frame, instruction, path

    def _is_unchanged(self, body: HloComputation, index: int) -> bool:
        """Whether a loop's body passes element `index` of its state on unchanged."""
        key = (body.name, index)
        if key not in self._unchanged:
            self._unchanged[key] = False  # ends the recursion if a loop contains itself
            try:
                frame, source, path = self.follow(Frame(body), body.root, (index,))
            except UnknownValueError:
                return False
            is_state = source.opcode == "parameter" and frame.computation is body
            self._unchanged[key] = is_state and path == (index,)
        return self._unchanged[key]
