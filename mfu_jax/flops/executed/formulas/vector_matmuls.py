"""Matmuls that XLA writes as a multiplication and a sum, which run on vector units.

A matrix unit gains nothing if m, n or k is 1. XLA then broadcasts both operands to all m·n·k
pairs, multiplies them, and sums over k (DotStrengthReduction); an outer product sums nothing. The
sum may be in another fusion, or in two stages; if it is broadcast again immediately, a TPU sums a
window as wide as k at every position. Either the multiplication or the sum keeps the op_name of
JAX's matmul, which a user's own ``(a * b).sum()`` lacks. What XLA adds has no name, one without a
path (``multiply.1291``), or, if it inlines a call afterwards, that of the call: a name that the
matmul's own name continues is nobody's. XLA moves a scale factor of the result to the smaller
operand: that multiplication also has the matmul's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from mfu_jax.flops.attention_kernels import BESIDE_KERNELS
from mfu_jax.flops.executed.cost_types import NOTHING, InstructionCost, MatmulCost
from mfu_jax.flops.executed.formulas.matmuls import flops_per_multiply_add
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import MATMUL_NAME
from mfu_jax.flops.executed.hlo.shapes import dtype_bits
from mfu_jax.flops.executed.hlo.value_refs import Frame, FramedInstruction, UnknownValueError

_PARTS = ("multiply", "reduce", "reduce-window")
# Between a product and its sum, with the operands that lead there: bf16_x3 adds three products.
_SAME_ELEMENTS = {
    **dict.fromkeys("convert bitcast reshape transpose copy pad".split(), (0,)),
    "add": (0, 1),
    "select": (1, 2),
}
# A long sum in stages: CPUs sum windows of 32 first.
_STAGES = frozenset({"reduce", "reduce-window"})
# Between an operand as the program stores it and the multiplication.
_SAME_OPERAND = frozenset("convert bitcast reshape transpose copy broadcast parameter".split())
# Between an operand that is multiplied by a factor and the matmul.
_TO_THE_MATMUL = frozenset("convert bitcast reshape transpose copy broadcast".split())
_MATMULS = frozenset({"multiply", "dot", "convolution"})
_MAX_STEPS = 32


class VectorMatmuls:
    """Finds the multiplications and sums of a program that are matmuls."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._parts: dict[str, Mapping[int, InstructionCost]] = {}

    def cost(
        self, computation: HloComputation, instruction: HloInstruction
    ) -> InstructionCost | None:
        """What an instruction costs that does a part of a matmul; None if it belongs to none."""
        if instruction.opcode not in _PARTS:
            return None
        return self.parts(computation).get(id(instruction))

    def parts(self, computation: HloComputation) -> Mapping[int, InstructionCost]:
        """The costs of the parts of matmuls in a computation, by ``id`` of the instruction.

        The one that has the matmul's name has all of it, 2·m·n·k.
        """
        if computation.name not in self._parts:
            self._parts[computation.name] = self._find(computation)
        return self._parts[computation.name]

    def _find(self, computation: HloComputation) -> Mapping[int, InstructionCost]:
        parts: dict[int, InstructionCost] = {}
        named = [
            i
            for i in computation.instructions.values()
            if i.opcode in _PARTS and MATMUL_NAME in i.attribute_text
        ]
        for instruction in named:
            if not _is_named(instruction):
                continue
            frame = self.dataflow.frame_in_fusions(computation)
            if instruction.opcode == "multiply":
                if not (_is_address(instruction) or _is_factor(computation, instruction)):
                    parts[id(instruction)] = self._matmul(instruction, [(frame, instruction)])
            elif found := self._summed(frame, instruction):
                parts[id(instruction)] = NOTHING
                unnamed = [place for place in found if not _is_named(place[1])]
                if unnamed and all(id(product) not in parts for _, product in found):
                    parts[id(instruction)] = self._matmul(instruction, unnamed)
                    parts |= {id(product): NOTHING for _, product in unnamed}
        for product, factor in _misnamed_outer_products(computation):
            if id(product) not in parts:
                frame = self.dataflow.frame_in_fusions(computation)
                parts[id(product)] = self._matmul(product, [(frame, product)], factor)
        return parts

    def _matmul(
        self,
        at: HloInstruction,
        products: Sequence[FramedInstruction],
        named: HloInstruction | None = None,
    ) -> InstructionCost:
        """The matmul that multiplications do, several in passes such as ``bf16_x3``.

        Args:
            at: the instruction that it is counted at.
            products: the multiplications.
            named: the instruction that has the matmul's name; by default `at`.
        """
        (frame, multiply), *others = products
        operands = [frame.computation.operand(multiply, i) for i in (0, 1)]
        # XLA may keep an operand wide if it is computed in the same fusion.
        dtype = min((self._dtype(frame, o, named or at) for o in operands), key=dtype_bits)
        matmul = MatmulCost(
            at,
            flops_per_multiply_add(multiply.shape.dtype) * multiply.shape.size,
            dtype,
            is_attention=BESIDE_KERNELS in at.op_name,
            is_vector=True,
            passes=f"{dtype}_x{len(products)}" if others else "",
        )
        return InstructionCost(matmul if matmul.flops else None)

    def _summed(self, frame: Frame, reduce: HloInstruction) -> list[FramedInstruction]:
        """The multiplications whose results a reduce adds up: several if it runs in passes."""
        if not self._adds(reduce):
            return []
        found: list[FramedInstruction] = []
        stack = [(frame, frame.computation.operand(reduce, 0))]
        for _ in range(_MAX_STEPS):
            if not stack:
                break
            try:
                frame, instruction, path = self.dataflow.follow(*stack.pop())
            except UnknownValueError:
                return []
            if path or _is_users(instruction, reduce):
                return []
            if instruction.opcode == "multiply":
                found.append((frame, instruction))
            elif instruction.opcode in _STAGES and self._adds(instruction):
                stack.append((frame, frame.computation.operand(instruction, 0)))
            elif operands := _SAME_ELEMENTS.get(instruction.opcode):
                stack += [(frame, frame.computation.operand(instruction, i)) for i in operands]
            elif instruction.opcode != "broadcast":  # of 0, where a pass overflowed
                return []
        return found

    def _adds(self, reduce: HloInstruction) -> bool:
        names = reduce.computations("to_apply")
        if len(reduce.operands) != 2 or len(names) != 1:
            return False
        return self.dataflow.module[names[0]].root.opcode == "add"

    def _dtype(self, frame: Frame, instruction: HloInstruction, named: HloInstruction) -> str:
        """An operand's dtype before XLA's own conversions; a user's conversion ends the search."""
        for _ in range(_MAX_STEPS):
            if instruction.opcode not in _SAME_OPERAND:
                break
            if instruction.opcode == "convert" and _is_users(instruction, named):
                break
            try:
                if instruction.opcode != "parameter":
                    instruction = frame.computation.operand(instruction, 0)
                elif frame.call is not None:
                    frame, instruction = frame.argument(instruction)
            except UnknownValueError:
                break
        return next(instruction.shape.leaves()).dtype


def _is_named(instruction: HloInstruction) -> bool:
    """Whether the op_name, or one of those that XLA merged into it, is a matmul's."""
    if MATMUL_NAME not in instruction.attribute_text:
        return False
    names = instruction.op_name.split(";")
    return any(name.rpartition("/")[2] == MATMUL_NAME for name in names)


def _misnamed_outer_products(
    computation: HloComputation,
) -> Iterator[tuple[HloInstruction, HloInstruction]]:
    """Outer products with the name of a call, or of what XLA merged them with.

    Each with the operand that has the matmul's name: only a matmul's expansion broadcasts under
    it. Every dimension is one of an operand's alone, so that there is nothing to sum.
    """
    for broadcast in computation.instructions.values():
        if broadcast.opcode != "broadcast" or not _is_named(broadcast):
            continue
        for product in computation.users.get(broadcast.name, ()):
            if product.opcode != "multiply" or _is_named(product) or _is_users_product(product):
                continue
            operands = (computation.operand(product, i) for i in (0, 1))
            spread = frozenset[int]().union(*map(_spread_over, operands))
            sizes = enumerate(product.shape.dims)
            if all(size == 1 or dimension in spread for dimension, size in sizes):
                yield product, broadcast


def _is_users_product(multiply: HloInstruction) -> bool:
    return any(name.endswith("/mul") for name in multiply.op_name.split(";"))


def _spread_over(operand: HloInstruction) -> Set[int]:
    """The dimensions over which a broadcast repeats its operand.

    None for other instructions, nor for a scalar of the user's: that is a factor.
    """
    if operand.opcode != "broadcast":
        return frozenset()
    dimensions = operand.integers("dimensions")
    if not (dimensions or _is_named(operand)):
        return frozenset()
    return frozenset(range(len(operand.shape.dims))).difference(dimensions)


def _is_address(multiply: HloInstruction) -> bool:
    """Whether it is a device's offset into a sharded operand: one integer."""
    return multiply.shape.size == 1 and multiply.shape.dtype[0] in "su"


def _is_factor(computation: HloComputation, multiply: HloInstruction) -> bool:
    """Whether it multiplies a matmul's operand by a scalar that was a factor of the result."""
    operands = (computation.operand(multiply, i) for i in (0, 1))
    if not any(o.opcode == "broadcast" and not o.integers("dimensions") for o in operands):
        return False
    users = list(computation.users.get(multiply.name, ()))
    for user in users:  # grows
        if user.opcode in _MATMULS and user.op_name == multiply.op_name:
            return True
        if user.opcode in _TO_THE_MATMUL and len(users) < _MAX_STEPS:
            users += computation.users.get(user.name, ())
    return False


def _is_users(instruction: HloInstruction, named: HloInstruction) -> bool:
    """Whether it is work of the user's own beside the matmul whose name `named` has."""
    if _is_named(instruction):
        return False
    matmuls = named.op_name.split(";")
    return any(
        "/" in name and not any(matmul.startswith(f"{name}/") for matmul in matmuls)
        for name in instruction.op_name.split(";")
    )
