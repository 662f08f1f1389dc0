"""Triton kernels (Pallas for GPUs): their body is in the program as Triton's IR."""

from __future__ import annotations

import functools
import math
from typing import Any

from mfu_jax.flops.executed.kernels.bodies.attributes import mlir_integer, mlir_string
from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, UnknownBodyError
from mfu_jax.flops.executed.kernels.bodies.reader import Reader, read_body
from mfu_jax.flops.executed.kernels.body_cost import body_cost
from mfu_jax.flops.executed.kernels.registry import (
    TRITON,
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)

Grid = tuple[int, int, int]


@register_kernel(TRITON)
def _triton(call: KernelCall) -> KernelCost | UnknownCost:
    """Every ``tt.dot`` of the body, for each program of the grid."""
    return body_cost(call, lambda: _body(call))


def _body(call: KernelCall) -> KernelBody:
    tail = call.instruction.tail
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
    reader = Reader(_matmul)
    return reader.body(reader.block(functions[0].operation.regions[0].blocks[0]), grid=grid)


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
