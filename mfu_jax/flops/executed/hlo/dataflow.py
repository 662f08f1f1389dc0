"""Follows a value to the instruction that makes it: through tuples, copies, fusions and loops."""

from __future__ import annotations

from collections.abc import Set

from mfu_jax.flops.executed.hlo.module import INSIDE, HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.text import ELLIPSIS
from mfu_jax.flops.executed.hlo.value_refs import Frame, TuplePath, UnknownValueError, ValueRef

MAX_DEPTH = 100

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
_ENCLOSE = frozenset((*INSIDE, "while"))


class Dataflow:
    """Follows values through one program; remembers which parts of a loop's state never change."""

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self._unchanged: dict[tuple[str, int], bool] = {}  # by loop body and index of its state
        self._frames: dict[str, Frame] = {}
        self._fused_frames: dict[str, Frame] = {}
        self._entered: dict[tuple[int, str], Frame] = {}  # by the caller's frame, and the call

    def frame_of(self, computation: HloComputation) -> Frame:
        """The frame of a computation, with those of its enclosing computations; cached."""
        return self._enclosed(computation, self._frames, _ENCLOSE)

    def frame_in_fusions(self, computation: HloComputation) -> Frame:
        """The frame of a fused computation, up to the first one that is not fused; cached."""
        return self._enclosed(computation, self._fused_frames, {"fusion", "fusion-start"})

    def _enclosed(
        self, computation: HloComputation, frames: dict[str, Frame], opcodes: Set[str]
    ) -> Frame:
        name = computation.name
        if name not in frames:
            caller = self.module.caller(name)
            if caller is None or caller[1].opcode not in opcodes:
                frames[name] = Frame(computation)
            else:
                outer = self._enclosed(caller[0], frames, opcodes)
                is_loop = caller[1].opcode == "while"
                frames[name] = (
                    Frame(computation, loop=(outer, caller[1]))
                    if is_loop
                    else self.enter(outer, caller[1])
                )
        return frames[name]

    def enter(self, frame: Frame, call: HloInstruction) -> Frame:
        """The frame of the computation that a fusion or call runs; cached.

        Raises:
            UnknownValueError: it does not run exactly one computation.
        """
        key = (id(frame), call.name)
        if key not in self._entered:
            names = call.callees
            if len(names) != 1:
                raise UnknownValueError
            self._entered[key] = Frame(self.module[names[0]], frame, call)
        return self._entered[key]

    def follow(
        self,
        frame: Frame,
        instruction: HloInstruction,
        path: TuplePath = (),
        through: Set[str] = SAME_VALUE,
    ) -> ValueRef:
        """Follows a value, or the element at `path` of a tuple, to the instruction that makes it.

        Goes on behind opcodes of `through`. Stops at a parameter whose value is unknown; for a
        loop's state, the remaining path tells which element it is.
        """
        for _ in range(10 * MAX_DEPTH):
            opcode = instruction.opcode
            computation = frame.computation
            if opcode == "get-tuple-element":
                path = (*instruction.integers("index"), *path)
                instruction = computation.operand(instruction, 0)
            elif opcode == "tuple" and path:
                instruction, path = computation.operand(instruction, path[0]), path[1:]
            elif opcode in through:
                instruction = computation.operand(instruction, 0)
            elif opcode in _CALLS:
                frame = self.enter(frame, instruction)
                instruction = frame.computation.root
            elif opcode == "parameter" and frame.call is not None:
                frame, instruction = frame.argument(instruction)
            elif opcode == "parameter" and frame.loop is not None and len(path) == 1:
                before = self._before(*frame.loop, computation, path)
                if before is None:
                    break
                frame, instruction, path = before
            elif opcode == "while" and len(path) == 1:
                bodies = instruction.computations("body")
                if len(bodies) != 1:
                    break
                before = self._before(frame, instruction, self.module[bodies[0]], path)
                if before is None:
                    break
                frame, instruction, path = before
            else:
                break
        return ValueRef(frame, instruction, path)

    def _before(
        self, frame: Frame, loop: HloInstruction, body: HloComputation, path: TuplePath
    ) -> ValueRef | None:
        """The source of a loop-state element in all iterations, as from `follow`; None if unknown.

        A TPU copies a constant into fast memory before a loop, and again at the end of the body.
        """
        start = frame.computation.operand(loop, 0)
        if self._is_unchanged(body, path[0]):
            return ValueRef(frame, start, path)
        try:
            inside, source, from_path = self.follow(Frame(body), body.root, path)
        except UnknownValueError:
            return None
        is_state = source.opcode == "parameter" and inside.computation is body
        if not is_state or len(from_path) != 1 or not self._is_unchanged(body, from_path[0]):
            return None
        first, later = self.follow(frame, start, path), self.follow(frame, start, from_path)
        return first if _is_same(first, later) else None

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


def _is_same(one: ValueRef, other: ValueRef) -> bool:
    """Whether two references have one value: the same instruction, or equal constants."""
    if one.instruction is other.instruction:
        return one.frame is other.frame and one.path == other.path
    constants = [source for _, source, _ in (one, other) if source.opcode == "constant"]
    if len(constants) < 2 or ELLIPSIS in constants[0].operand_text:
        return False
    first, second = constants
    return first.shape == second.shape and first.operand_text == second.operand_text
