"""Follows a value to the instruction that makes it: through tuples, copies, fusions and loops."""

from __future__ import annotations

from dataclasses import dataclass

from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule

MAX_DEPTH = 100

Path = tuple[int, ...]


class UnknownValueError(Exception):
    """The value depends on data, or on an instruction that is not evaluated here."""


@dataclass(slots=True, eq=False)
class Frame:
    """One computation with the meaning of its parameters.

    `arguments` are the operands of the caller, in the caller's frame. A loop's body and condition
    have one parameter, the loop's state: known integers by index (`state`), or, of an enclosing
    loop, what it does not change (`loop`: the frame in which the `while` stands, and the `while`).
    """

    computation: HloComputation
    arguments: tuple[tuple[Frame, HloInstruction], ...] | None = None
    state: dict[int, int] | None = None
    loop: tuple[Frame, HloInstruction] | None = None


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
CALLEE = {"fusion": "calls", "call": "to_apply"}


def frame_of(module: HloModule, computation: HloComputation) -> Frame:
    """The frame of a computation, with the enclosing loops' states as far as they are constant."""
    chain: list[tuple[HloComputation, HloInstruction, HloComputation]] = []
    inner = computation
    while (caller := module.caller(inner.name)) is not None and len(chain) < MAX_DEPTH:
        outer, instruction = caller
        if instruction.opcode != "while" and instruction.opcode not in CALLEE:
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


def enter(module: HloModule, frame: Frame, call: HloInstruction) -> Frame:
    """The frame of the computation that a fusion or call runs."""
    names = call.computations(CALLEE[call.opcode])
    if len(names) != 1:
        raise UnknownValueError
    operands = (frame.computation[name] for name in call.operands)
    return Frame(module[names[0]], tuple((frame, operand) for operand in operands))


def follow(
    module: HloModule, frame: Frame, instruction: HloInstruction, path: Path = ()
) -> tuple[Frame, HloInstruction, Path]:
    """Follows a value, or the element at `path` of a tuple, to the instruction that makes it.

    Stops at a parameter whose meaning is not known; of a loop's state, the remaining path says
    which element.
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
        elif opcode in CALLEE:
            frame = enter(module, frame, instruction)
            instruction = frame.computation.root
        elif opcode == "parameter" and frame.arguments is not None:
            text = instruction.operand_text
            if not text.isdecimal() or int(text) >= len(frame.arguments):
                raise UnknownValueError
            frame, instruction = frame.arguments[int(text)]
        elif opcode == "parameter" and frame.loop is not None and len(path) == 1:
            if not _unchanged(module, computation, path[0]):
                break
            frame, loop = frame.loop
            instruction = frame.computation.operand(loop, 0)
        elif opcode == "while" and len(path) == 1:
            bodies = instruction.computations("body")
            if len(bodies) != 1 or not _unchanged(module, module[bodies[0]], path[0]):
                break
            instruction = computation.operand(instruction, 0)
        else:
            break
    return frame, instruction, path


def _unchanged(module: HloModule, body: HloComputation, index: int) -> bool:
    """Whether a loop's body hands element `index` of its state on as it was."""
    key = (body.name, index)
    if key not in module.unchanged:
        module.unchanged[key] = False  # of a loop that contains itself, which is an error elsewhere
        try:
            frame, source, path = follow(module, Frame(body), body.root, (index,))
        except UnknownValueError:
            return False
        is_state = source.opcode == "parameter" and frame.computation is body
        module.unchanged[key] = is_state and path == (index,)
    return module.unchanged[key]
