"""What an integer HLO instruction computes."""

from __future__ import annotations

from functools import partial

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.text import ELLIPSIS
from mfu_jax.flops.executed.integers.arithmetic import (
    ARITHMETIC,
    BITWISE,
    LAZY,
    RELATIONS,
    elementwise,
    lazy,
)
from mfu_jax.flops.executed.integers.arrays import LAYOUTS, reduction
from mfu_jax.flops.executed.integers.values import (
    MAX_ELEMENTS,
    Compute,
    Value,
    bits_of,
    elements_of,
    is_small_integer,
    make_value,
    wrap_of,
)


def compile_instruction(
    module: HloModule,
    computation: HloComputation,
    instruction: HloInstruction,
    opcode: str,
    shape: Shape,
    *,
    largest: int = MAX_ELEMENTS,
) -> Compute | None:
    """A function from the values of the operands to the instruction's value.

    Args:
        module: the program, for a ``reduce``'s computation.
        computation: the computation that the instruction is in.
        instruction: one whose result is a small integer array.
        opcode: its opcode; for an asynchronous one, that of the work it does.
        shape: shape of the result.
        largest: most elements that an operand may have.

    Returns:
        The function; None if such an instruction is not evaluated.

    Raises:
        HloParseError: operands or attributes do not fit the instruction.
    """
    operands = computation.operand_shapes(instruction)
    if not all(is_small_integer(operand, largest) for operand in operands):
        return None
    try:
        compute = _compile(module, computation, instruction, opcode, shape)
        if compute:  # tried on zeros: no other values of these shapes can make it fail
            tried = compute([make_value([0] * operand.size) for operand in operands])
            if tried is not None and len(elements_of(tried)) != shape.size:
                raise ValueError
    except (ValueError, IndexError, TypeError):
        raise instruction.error("operands or attributes that do not fit") from None
    return compute


def _compile(
    module: HloModule,
    computation: HloComputation,
    instruction: HloInstruction,
    opcode: str,
    shape: Shape,
) -> Compute | None:
    if opcode in ARITHMETIC:
        return elementwise(ARITHMETIC[opcode], wrap_of(shape.dtype))
    if opcode == "bitcast-convert":
        source = computation.operand(instruction, 0).shape
        is_same_size = bits_of(source.dtype) == bits_of(shape.dtype)
        return elementwise(int, wrap_of(shape.dtype)) if is_same_size else None
    if opcode in BITWISE:
        return elementwise(partial(BITWISE[opcode], bits_of(shape.dtype)), wrap_of(shape.dtype))
    if opcode in LAZY:
        return lazy(opcode, shape)
    if opcode == "compare":
        relation = RELATIONS.get(instruction.attribute("direction"))
        return relation and elementwise(relation, int)
    if opcode in LAYOUTS:
        return LAYOUTS[opcode](computation, instruction, shape)
    if opcode == "reduce":
        return reduction(module, computation, instruction, shape)
    return None


def constant_text(module: HloModule, computation: HloComputation, constant: HloInstruction) -> str:
    """The text of a constant's value; with an `ELLIPSIS` if it is written nowhere.

    Args:
        module: the program.
        computation: the computation that the constant is in.
        constant: the constant.
    """
    text = constant.operand_text
    if ELLIPSIS in text and (full := module.full()) and computation.name in full.computations:
        written = full[computation.name].instructions.get(constant.name)
        text = written.operand_text if written else text
    return text


def branch_index(chosen_by: HloInstruction, branches: int, value: Value) -> int | None:
    """The branch of a conditional that runs, or None if the value is unknown.

    Args:
        chosen_by: the conditional's first operand: a boolean, or an index.
        branches: how many there are.
        value: the operand's value.
    """
    if not isinstance(value, int):
        return None
    if chosen_by.shape.dtype == "pred":  # the first branch is for true
        return 0 if value else branches - 1
    return value if 0 <= value < branches else branches - 1
