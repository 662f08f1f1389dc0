"""Triton kernels (from Pallas for GPUs or jax-triton): the program has their body as Triton IR."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

from mfu_jax.flops.executed.kernels.bodies.attributes import (
    mlir_integer,
    mlir_string,
    opaque_string,
)
from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, UnknownBodyError
from mfu_jax.flops.executed.kernels.bodies.reader import BodyReader, read_body
from mfu_jax.flops.executed.kernels.body_cost import body_cost
from mfu_jax.flops.executed.kernels.registry import (
    TRITON,
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)
from mfu_jax.util.protobuf import WireError, fields, part

Grid = tuple[int, int, int]


@register_kernel(TRITON)
def _triton(call: KernelCall) -> KernelCost | UnknownCost:
    """Every ``tt.dot`` of the body, for each program of the grid."""
    return body_cost(call, lambda: _body(call))


@register_kernel("triton_kernel_call", "triton_kernel_call_ffi")
def _jax_triton(call: KernelCall) -> KernelCost | UnknownCost:
    """A kernel of jax-triton: the same, inside a compressed message."""
    return body_cost(call, lambda: _body_in_message(call))


def _body_in_message(call: KernelCall) -> KernelBody:
    """The body that jax-triton stores: ``kernel_call {kernel {… ttir = 5} grid = 2, 3, 4} = 1``."""
    tail = call.instruction.attribute_text
    packed = mlir_string(tail, "opaque") or opaque_string(tail) or b""
    try:
        kernel_call = part(zlib.decompress(packed), 1)
        if not kernel_call:
            raise UnknownBodyError("Triton chooses one of several kernels when it runs")
        found = {field.number: field.value for field in fields(kernel_call, 0, len(kernel_call))}
        x, y, z = (found.get(number, 1) for number in (2, 3, 4))
        return kernel_body(part(part(kernel_call, 1), 5), (x, y, z))
    except (zlib.error, WireError) as error:
        raise UnknownBodyError(f"a Triton kernel whose message cannot be read ({error})") from None


def _body(call: KernelCall) -> KernelBody:
    tail = call.instruction.attribute_text
    ir = mlir_string(tail, "ir")
    x, y, z = (mlir_integer(tail, f"grid_{axis}") for axis in "xyz")
    if ir is None or x is None or y is None or z is None:
        raise UnknownBodyError("a Triton kernel without its IR or its grid")
    return kernel_body(ir, (x, y, z))


@functools.lru_cache(maxsize=256)
def kernel_body(ir: bytes, grid: Grid) -> KernelBody:
    """Decodes a Triton kernel: MLIR, in bytecode or text, run by `grid` programs.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    return read_body(ir, "triton", "", functools.partial(_read_module, grid))


def _read_module(grid: Grid, module: Any) -> KernelBody:
    functions = [op for op in module.body.operations if op.operation.name == "tt.func"]
    if len(functions) != 1:
        raise UnknownBodyError("a Triton kernel of several functions")
    reader = BodyReader(_matmul)
    block = reader.block(functions[0].operation.regions[0].blocks[0])
    return reader.body(block, (), grid=grid, tables=block.arguments)


def _matmul(operation: Any) -> tuple[int, str] | None:
    """2 · result elements · contracted elements of a ``tt.dot``."""
    name = str(operation.name)
    if not name.startswith("tt.dot"):
        return None
    if name != "tt.dot":
        raise UnknownBodyError(f"it multiplies by {name}")
    lhs, result = operation.operands[0].type, operation.results[0].type
    elements = math.prod(result.get_dim_size(i) for i in range(result.rank))
    return 2 * elements * lhs.get_dim_size(lhs.rank - 1), str(lhs.element_type).lower()
