"""Matmul FLOPs of Pallas TPU kernels, from the kernel's own body.

A ``tpu_custom_call`` carries its kernel as MLIR (Mosaic). Branches that depend on tables in scalar
memory (splash attention's block mask) are decided from the tables if these are constants of the
program.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, UnknownBodyError
from mfu_jax.flops.executed.kernels.bodies.reader import BodyReader, integer, integers, read_body
from mfu_jax.flops.executed.kernels.body_cost import body_cost
from mfu_jax.flops.executed.kernels.registry import (
    MOSAIC_TPU,
    KernelCall,
    KernelCost,
    UnknownCost,
    register_kernel,
)

_Read = TypeVar("_Read")


@register_kernel(MOSAIC_TPU)
def _pallas_tpu(call: KernelCall) -> KernelCost | UnknownCost:
    """From the kernel's body, or its author's `cost_estimate` if the body depends on data."""
    config = call.config.get("custom_call_config")
    if not isinstance(config, dict):
        return UnknownCost(reason="tpu_custom_call without custom_call_config")
    text = str(config.get("body", ""))
    return body_cost(call, lambda: kernel_body(text), _estimate(config))


@functools.lru_cache(maxsize=256)
def kernel_body(text: str) -> KernelBody:
    """Decodes the ``body`` of a ``tpu_custom_call``: MLIR, in bytecode or text, in base64.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    return read_kernel(text, _read_module)


def read_kernel(text: str, read: Callable[[Any], _Read]) -> _Read:
    """What `read` makes of a kernel's parsed body.

    Raises:
        UnknownBodyError: as for `kernel_body`.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise UnknownBodyError(f"its body cannot be read ({error})") from None
    # Bodies are stored in a version-stable form; the pass restores the plain dialects.
    return read_body(raw, "tpu", "mosaic-serde{serialize=false}", read)


def kernel_function(module: Any) -> Any:
    """The kernel's function: the one with a grid, or the only one."""
    return _functions(module)[0]


def _functions(module: Any) -> list[Any]:
    """A module's functions with bodies, the one with a grid first."""
    operations = (op.operation for op in module.body.operations)
    functions = [f for f in operations if f.name == "func.func" and len(f.regions[0].blocks)]
    if not functions:
        raise UnknownBodyError("its body has no function")
    return sorted(functions, key=lambda function: "iteration_bounds" not in function.attributes)


def _read_module(module: Any) -> KernelBody:
    functions = _functions(module)
    reader = BodyReader(_matmul)
    blocks = [reader.block(function.regions[0].blocks[0]) for function in functions]
    if any(op.has_matmul for block in blocks[1:] for op in block.ops):
        raise UnknownBodyError("it multiplies in several functions")
    # A kernel without a grid runs once, and its arguments begin with the operands.
    attributes = functions[0].attributes
    has_grid = "iteration_bounds" in attributes
    grid = integers(attributes["iteration_bounds"]) if has_grid else ()
    arguments = blocks[0].arguments
    types = [str(argument.type) for argument in functions[0].regions[0].blocks[0].arguments]
    prefetched = integer(functions[0], "scalar_prefetch") if has_grid else _first_scalars(types)
    return reader.body(
        blocks[0],
        positions=arguments[: len(grid)],
        grid=grid,
        tables=arguments[len(grid) : len(grid) + prefetched],
    )


def _first_scalars(types: Sequence[str]) -> int:
    """How many of a kernel's first arguments are in scalar memory."""
    return len(list(itertools.takewhile(lambda text: "memory_space<smem>" in text, types)))


def _matmul(operation: Any) -> tuple[int, str] | None:
    """2 · result elements · contracted elements of a ``tpu.matmul``."""
    name = str(operation.name)
    if "matmul" not in name and name != "vector.contract":
        return None
    if name != "tpu.matmul":
        raise UnknownBodyError(f"it multiplies by {name}")
    lhs, result = operation.operands[0].type, operation.results[0].type
    match = re.search(r"<\[([\d, ]*)\]", str(operation.attributes["dimension_numbers"]))
    if not match:
        raise UnknownBodyError("a tpu.matmul without dimension_numbers")
    dims = [int(d) for d in match[1].split(",") if d.strip()]
    contracted = math.prod(lhs.get_dim_size(d) for d in dims)
    elements = math.prod(result.get_dim_size(i) for i in range(result.rank))
    return 2 * elements * contracted, str(lhs.element_type).lower()


def _estimate(config: Mapping[str, Any]) -> int | None:
    estimate = config.get("cost_estimate")
    flops = str(estimate.get("flops")) if isinstance(estimate, dict) else ""
    return int(flops) if flops.isdecimal() else None
