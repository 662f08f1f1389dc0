"""FLOPs of the HLO instructions that multiply matrices: 2 per necessary multiply-add.

Adding one: a row of `MATMULS`; a collective is a row of `KINDS` in `costs.collectives`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

from mfu_jax.flops.executed.formulas.windows import common, read_window
from mfu_jax.flops.executed.hlo.dimensions import dot_dims
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape, dtype_bits

Positions = tuple[range, ...]
"""Positions in each dimension of an array."""


def result_shape(instruction: HloInstruction) -> Shape:
    """The result's array; for an asynchronous start, ``((operands), result, …)``, the result."""
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and len(shape.elements) >= 2:
        shape = shape.elements[1]
    while shape.dtype == "tuple" and shape.elements:
        shape = shape.elements[0]
    return shape


def _sizes(instruction: HloInstruction, shape: Shape, dims: tuple[int, ...]) -> int:
    if any(d >= len(shape.dims) for d in dims):
        raise instruction.error(f"dimension out of range of the operand {shape}")
    return math.prod(shape.dims[d] for d in dims)


def flops_per_multiply_add(dtype: str) -> int:
    """2; 8 for complex numbers, which take four real products and four sums.

    >>> flops_per_multiply_add("bf16"), flops_per_multiply_add("c64")
    (2, 8)
    """
    return 8 if dtype in ("c64", "c128") else 2


def dot_flops(computation: HloComputation, instruction: HloInstruction) -> int:
    """2 · result elements · contracted elements (8 instead of 2 if complex)."""
    dims = dot_dims(instruction, "lhs_contracting")  # empty if nothing is contracted
    if dims is None:
        raise instruction.error(f"{instruction.opcode} without lhs_contracting_dims")
    contracted = _sizes(instruction, computation.operand(instruction, 0).shape, dims)
    result = result_shape(instruction)
    return flops_per_multiply_add(result.dtype) * result.size * contracted


def convolution_flops(computation: HloComputation, instruction: HloInstruction) -> int:
    """``convolution``: counts positions that read elements, not padding or holes.

    TPU programs write matmuls this way, with batch dimensions as dilated windows.
    """
    base, kernel = (computation.operand(instruction, i).shape for i in (0, 1))
    return convolution_flops_of(instruction, (base, kernel, result_shape(instruction)))


def convolution_flops_of(
    instruction: HloInstruction,
    shapes: Sequence[Shape],
    real: Sequence[Positions] | None = None,
) -> int:
    """2 · batch · output features · input features per group · real positions.

    Positions are counted one dimension at a time, as in XLA's HloCostAnalysis. The three passes of
    a convolution (forward, by input, by kernel) multiply the same pairs, so one formula serves all.

    Args:
        instruction: has `window` and `dim_labels` of the forward convolution.
        shapes: of the input, the kernel and the result.
        real: the positions of each that count; all if not given.
    """
    window, labels = instruction.attribute("window"), instruction.attribute("dim_labels")
    groups = [instruction.integers(f"{kind}_group_count") for kind in ("feature", "batch")]
    is_grouped = any(count and count[0] > 1 for count in groups)
    real = tuple(real or (tuple(map(range, shape.dims)) for shape in shapes))
    try:
        return _convolution_flops(window, labels, tuple(shapes), real, is_grouped)
    except ValueError as error:
        raise instruction.error(str(error)) from None


@functools.lru_cache(maxsize=4096)  # layers repeat their convolutions
def _convolution_flops(
    window_text: str,
    labels: str,
    shapes: tuple[Shape, ...],
    real: tuple[Positions, ...],
    is_grouped: bool,
) -> int:
    match = re.fullmatch(r"([\w?]+)_([\w?]+)->([\w?]+)", labels)
    if not match:
        raise ValueError("convolution without dim_labels")
    for text, shape in zip(match.groups(), shapes, strict=True):
        if len(text) != len(shape.dims):
            raise ValueError(f"dim_labels do not fit the shape {shape}")
    base, kernel, output = (
        dict(zip(text, dims, strict=True)) for text, dims in zip(match.groups(), real, strict=True)
    )
    positions = 1
    for i, window in enumerate(read_window(window_text)):
        label = str(i)
        if not all(label in dims for dims in (base, kernel, output)):
            raise ValueError(f"dim_labels without spatial dimension {label}")
        if window.stride <= 0 or window.base_dilation <= 0 or window.window_dilation <= 0:
            raise ValueError("window stride or dilation below 1")
        if window.size > max(1, shapes[1].size):
            raise ValueError("window larger than the kernel")
        positions *= window.real_positions(base[label], output[label], kernel[label])
    if not ({"b", "f"} <= base.keys() & output.keys() and {"i", "o"} <= kernel.keys()):
        raise ValueError("dim_labels without batch or feature dimension")
    batch, features, inputs = output["b"], common(output["f"], kernel["o"]), kernel["i"]
    if not is_grouped:  # else it is a group's part of the input's batch, or of its features
        batch, inputs = common(batch, base["b"]), common(inputs, base["f"])
    pairs = len(batch) * len(features) * len(inputs) * positions
    return flops_per_multiply_add(shapes[2].dtype) * pairs


LIBRARY_DOTS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
"""Targets of custom calls that are a dot; its dimensions are in their backend_config."""

CUDNN_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}
"""Which array is the input, the kernel and the output: operand 0 or 1, or 2 for the result."""

MATMULS: dict[str, Callable[[HloComputation, HloInstruction], int]] = {
    "dot": dot_flops,
    "scaled-dot": dot_flops,
    "convolution": convolution_flops,
}


_PASSES = re.compile(r"dot_(bf16|tf32)_\w+_(x\d)$")
_FULL_CALL = re.compile(r'"operand_precision":\["HIGHEST"')
_TPU_PASSES = {"{highest,highest}": "bf16_x6", "{high,high}": "bf16_x3"}


def hardware_passes(computation: HloComputation, instruction: HloInstruction) -> str:
    """The lower-precision passes that a matmul runs as: ``bf16_x6``; empty for one pass.

    Read from its dot algorithm. TPUs multiply float32 in one, three or six passes of bf16 by its
    precision; other hardware has float32 units. Only TPU programs have tiled layouts.
    """
    if match := _PASSES.match(instruction.attribute("algorithm")):
        return f"{match[1]}_{match[2]}"
    if instruction.opcode != "convolution" or ":T(" not in instruction.shape_text:
        return ""
    passes = _TPU_PASSES.get(instruction.attribute("operand_precision"), "")
    return passes if passes and operand_dtype(computation, instruction) == "f32" else ""


def is_full_float32(instruction: HloInstruction) -> bool:
    """Whether a matmul of float32 keeps all bits on a GPU, which multiplies in TF32 otherwise."""
    if (algorithm := instruction.attribute("algorithm")) and algorithm != "dot_unset":
        return algorithm == "dot_f32_f32_f32"
    if "highest" in instruction.attribute("operand_precision"):
        return True
    return _FULL_CALL.search(instruction.attribute("backend_config")) is not None


def is_masked_sum(computation: HloComputation, instruction: HloInstruction) -> bool:
    """Whether a matmul only adds up the integers that a mask selects.

    libtpu 0.0.52 writes sums over windows so: s32 numbers times a triangle of truth values. A mask
    times bfloat16 numbers, such as an embedding looked up by a one-hot product, is a matmul.
    """
    dtypes = sorted(computation.operand(instruction, i).shape.dtype for i in (0, 1))
    return dtypes[0] == "pred" and dtypes[1] in ("s32", "u32", "s64", "u64")


def operand_dtype(computation: HloComputation, instruction: HloInstruction) -> str:
    """The wider dtype of the two operands."""
    first, second = (computation.operand(instruction, i).shape.dtype for i in (0, 1))
    return first if first == second else max(first, second, key=dtype_bits)
