"""What a launched instruction looks like: its arrays, its largest matmul, and what it reads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from mfu_jax.flops.executed.cost_types import MatmulCost
from mfu_jax.flops.executed.formulas.matmuls import (
    flops_per_multiply_add,
    is_full_float32,
    result_shape,
)
from mfu_jax.flops.executed.formulas.windows import parse_window
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, FREE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.records import HOST_TRANSFER, ArrayShape, InstructionShape, MatmulShape

# One result element for each operand element, so that a chain of them could be one loop.
_ELEMENTWISE = ELEMENTWISE | TRANSCENDENTAL | {"bitcast-convert"}
_SAME = frozenset({"bitcast", "opt-barrier", "optimization-barrier"})
_COPIES = _SAME | {"copy", "copy-start", "copy-done"}
_BESIDE = FREE | {"broadcast", "iota", "slice", "dynamic-slice"}


def shape_of(
    computation: HloComputation,
    instruction: HloInstruction,
    inside: Sequence[HloInstruction],
    matmuls: Iterable[MatmulCost],
) -> InstructionShape:
    """The form of an instruction.

    Args:
        computation: the computation that it is in.
        instruction: the launched one.
        inside: it, and the instructions of the computations that it consists of.
        matmuls: the matmuls of `inside`.
    """
    largest = max(matmuls, key=lambda matmul: matmul.flops, default=None)
    operands = list(computation.operand_shapes(instruction))
    arrays = (a for shape in operands for a in _arrays(shape))
    return InstructionShape(
        results=tuple(_arrays(instruction.shape)),
        result_bytes=instruction.shape.bytes,
        operands=tuple(_source(computation, name) for name in instruction.operands),
        operand_arrays=tuple(arrays),
        matmul=_matmul_shape(computation, inside, largest) if largest else None,
        is_transposed=largest is not None and _is_transposed(result_shape(largest.instruction)),
        passes=int(largest.passes.rpartition("_x")[2]) if largest and largest.passes else 1,
        is_full_float32=largest is not None and is_full_float32(largest.instruction),
        is_elementwise=_is_elementwise(instruction, inside),
        keeps_tiles=instruction.opcode == "copy"
        and _order_in_tiles(instruction.shape) == _order_in_tiles(operands[0]),
        sorted=_sorted(instruction, operands) if instruction.opcode == "sort" else 0,
        target=_target(instruction),
    )


def state_of(entry: HloComputation) -> frozenset[ArrayShape]:
    """The arrays that a program takes and returns in the same form: weights, moments."""
    taken = {array for p in entry.parameters.values() for array in _arrays(p.shape)}
    return frozenset(array for array in _arrays(entry.root.shape) if array in taken)


def results_of(entry: HloComputation) -> tuple[ArrayShape, ...]:
    """The arrays that a program computes and returns, without arguments that it passes on."""
    root = entry.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    computed = [entry[name] for name in names if not _is_passed_on(entry, name)]
    return tuple(array for instruction in computed for array in _arrays(instruction.shape))


def _is_passed_on(entry: HloComputation, name: str) -> bool:
    instruction = entry[name]
    while instruction.opcode in _COPIES and instruction.operands:
        instruction = entry.operand(instruction, 0)
    return instruction.opcode == "parameter"


def _source(computation: HloComputation, name: str) -> str:
    """The instruction that makes an operand's elements."""
    instruction = computation[name]
    while instruction.opcode in _SAME and len(instruction.operands) == 1:
        instruction = computation.operand(instruction, 0)
    return instruction.name


def _target(instruction: HloInstruction) -> str:
    if instruction.opcode.startswith("custom-call"):
        return instruction.attribute_string("custom_call_target")
    is_message = instruction.opcode.startswith(("send", "recv"))
    is_host = is_message and instruction.attributes.get("is_host_transfer") == "true"
    return HOST_TRANSFER if is_host else ""


def _arrays(shape: Shape) -> list[ArrayShape]:
    return [ArrayShape(leaf.dtype, leaf.dims) for leaf in shape.leaves()]


def _is_elementwise(instruction: HloInstruction, inside: Sequence[HloInstruction]) -> bool:
    if instruction.opcode in ("fusion", "fusion-start"):
        body = [i for i in inside if i is not instruction]
        return all(i.opcode in _ELEMENTWISE or i.opcode in _BESIDE for i in body)
    return instruction.opcode in _ELEMENTWISE


def _sorted(instruction: HloInstruction, operands: Sequence[Shape]) -> int:
    dims = operands[0].dims
    return dims[instruction.one_integer("dimensions", below=len(dims))]


def _order_in_tiles(array: Shape) -> tuple[list[str], str]:
    """The two minor dimensions, which tiles are cut from, and the tiles: ``T(8,128)(2,1)``."""
    order, _, rest = array.layout.strip("{}").partition(":")
    return order.split(",")[:2], rest.partition("S(")[0]


def _is_transposed(result: Shape) -> bool:
    """Whether the last dimension of a layout such as ``0,1`` is not its minor one."""
    minor = re.match(r"\{?(\d+)", result.layout)
    return minor is not None and int(minor[1]) != len(result.dims) - 1


def _matmul_shape(
    computation: HloComputation, inside: Sequence[HloInstruction], matmul: MatmulCost
) -> MatmulShape | None:
    """Taken from the result's dimensions; the contracted one follows from the FLOPs."""
    result = result_shape(matmul.instruction)
    if matmul.kernel or matmul.is_vector or len(result.dims) < 2 or not matmul.flops:
        return None
    k = matmul.flops // (flops_per_multiply_add(result.dtype) * result.size)
    if matmul.instruction.opcode.startswith("convolution"):
        return _convolution_shape(matmul.instruction, result, max(k, 1))
    # A dot's result has the batch dimensions, then those of the left operand, then of the right.
    dims, batch, left = result.dims, len(matmul.instruction.integers("lhs_batch_dims")), 0
    if matmul.instruction.attribute("lhs_contracting_dims"):
        name = matmul.instruction.operand(0)
        lhs = next((i for i in inside if i.name == name), None) or computation[name]
        left = len(lhs.shape.dims) - len(matmul.instruction.integers("lhs_contracting_dims"))
    if matmul.instruction.opcode.startswith("custom-call") or left < batch:
        batch, left = len(dims) - 2, len(dims) - 1  # a library call's result is a matrix
    return MatmulShape(
        math.prod(dims[:batch]), math.prod(dims[batch:left]), math.prod(dims[left:]), max(k, 1)
    )


def _convolution_shape(instruction: HloInstruction, result: Shape, k: int) -> MatmulShape | None:
    _, arrow, labels = instruction.attribute("dim_labels").partition("->")
    if not arrow or len(labels) != len(result.dims) or "f" not in labels:
        return None
    n = result.dims[labels.index("f")]
    batch = _folded_batch(instruction, labels, result)
    return MatmulShape(batch, result.size // n // batch, n, k)


def _folded_batch(instruction: HloInstruction, labels: str, result: Shape) -> int:
    """Batch dimensions of a matmul that a TPU runs as windows over a dilated input."""
    batch = 1
    for number, window in enumerate(parse_window(instruction)):
        size = result.dims[labels.index(str(number))]
        if window.base_dilation > 1 and window.stride > 1 and window.size == size:
            batch *= size
    return batch
