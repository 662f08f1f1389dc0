"""Parses the body of a ``tpu_custom_call``, a Pallas kernel as MLIR (Mosaic)."""

from __future__ import annotations

import base64
import binascii
import functools
import io
import math
import re
from dataclasses import dataclass, field
from typing import Any

Table = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions, and values in row-major order


class UnknownBodyError(Exception):
    """The kernel's FLOPs depend on data, or on an unknown operation."""


@dataclass(slots=True, eq=False)
class Op:
    """One operation of the body; values, including block arguments, are numbered."""

    name: str
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    attribute: int = 0  # a constant's value, a comparison's predicate, an axis
    flops: int = 0
    regions: tuple[Block, ...] = ()
    has_matmul: bool = False


@dataclass(slots=True, eq=False)
class Block:
    """Operations that run in sequence, and the block's arguments."""

    arguments: tuple[int, ...]
    ops: list[Op]


@dataclass(slots=True, eq=False)
class KernelBody:
    """A kernel's grid and operations.

    Attributes:
        grid: number of steps in each dimension; negative if it depends on data.
        block: its operations.
        prefetched: number of scalar-prefetch operands.
        matmuls: number of matmul operations in the body's text.
        dtype: left operand's dtype of the first matmul.
        makers: the operation that makes a value, by the value's number.
    """

    grid: tuple[int, ...]
    block: Block
    prefetched: int
    matmuls: int = 0
    dtype: str = ""
    makers: dict[int, Op] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)
def kernel_body(text: str) -> KernelBody:
    """Decodes the ``body`` of a ``tpu_custom_call``: MLIR, in bytecode or text, in base64.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    try:
        from mfu_jax.jax_internals import mosaic_bindings

        tpu, ir, PassManager = mosaic_bindings()
    except ImportError as error:
        raise UnknownBodyError(f"its body cannot be read without jaxlib ({error})") from None
    try:
        raw = base64.b64decode(text, validate=True)
        with ir.Context() as context, ir.Location.unknown():
            context.allow_unregistered_dialects = True
            # A damaged body's messages may not be UTF-8, on which the bindings abort.
            context.emit_error_diagnostics = True
            context.attach_diagnostic_handler(lambda diagnostic: True)
            tpu.register_dialect(context)
            module = ir.Module.parse(raw)
            # Bodies are stored in a version-stable form; this restores the plain dialects.
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
            _check_names(module)
            return _read_module(module)
    except (binascii.Error, KeyError, ValueError, RuntimeError, ir.MLIRError) as error:
        first = str(error).strip().splitlines()[:1]
        raise UnknownBodyError(f"its body cannot be read ({' '.join(first)[:80]})") from None


def _check_names(module: Any) -> None:
    """Raises `ValueError` for a damaged name that is not UTF-8: the bindings abort on it."""
    printed = io.BytesIO()
    module.operation.print(file=printed, binary=True)
    unescaped = re.sub(
        rb"\\([0-9A-F]{2})", lambda match: bytes.fromhex(match[1].decode()), printed.getvalue()
    )
    unescaped.decode()


def _read_module(module: Any) -> KernelBody:
    for function in module.body.operations:
        if "iteration_bounds" in function.attributes:
            return _Reader(function).body
    raise UnknownBodyError("its body has no grid")


class _Reader:
    """Copies a function's operations into plain Python objects."""

    def __init__(self, function: Any) -> None:
        self.numbers: dict[Any, int] = {}
        self.makers: dict[int, Op] = {}
        self.matmuls = 0
        self.dtype = ""
        operation = function.operation
        block = self.block(operation.regions[0].blocks[0])
        self.body = KernelBody(
            grid=_integers(operation.attributes["iteration_bounds"]),
            block=block,
            prefetched=_integer(operation, "scalar_prefetch"),
            matmuls=self.matmuls,
            dtype=self.dtype,
            makers=self.makers,
        )

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def block(self, block: Any) -> Block:
        arguments = tuple(self.number(argument) for argument in block.arguments)
        return Block(arguments, [self.op(op.operation) for op in block.operations])

    def op(self, operation: Any) -> Op:
        name = operation.name
        op = Op(
            name,
            tuple(self.number(operand) for operand in operation.operands),
            tuple(self.number(result) for result in operation.results),
            self.attribute(operation),
        )
        if "matmul" in name or name == "vector.contract":
            op.flops = self.matmul(operation)
            op.has_matmul = True
        op.regions = tuple(self.block(block) for region in operation.regions for block in region)
        op.has_matmul = op.has_matmul or any(o.has_matmul for r in op.regions for o in r.ops)
        for number in op.results:
            self.makers[number] = op
        return op

    def attribute(self, operation: Any) -> int:
        if operation.name == "arith.constant":
            return _integer(operation, "value")
        if operation.name == "arith.cmpi":
            return _integer(operation, "predicate")
        if operation.name in ("tpu.program_id", "tpu.iteration_bound"):
            return _integer(operation, "dimension")
        return 0

    def matmul(self, operation: Any) -> int:
        """2 · result elements · contracted elements of a ``tpu.matmul``."""
        if operation.name != "tpu.matmul":
            raise UnknownBodyError(f"it multiplies by {operation.name}")
        lhs, result = operation.operands[0].type, operation.results[0].type
        match = re.search(r"<\[([\d, ]*)\]", str(operation.attributes["dimension_numbers"]))
        if not match:
            raise UnknownBodyError("a tpu.matmul without dimension_numbers")
        dims = [int(d) for d in match[1].split(",") if d.strip()]
        self.matmuls += 1
        self.dtype = self.dtype or str(lhs.element_type).lower()
        contracted = math.prod(lhs.get_dim_size(d) for d in dims)
        return 2 * math.prod(result.get_dim_size(i) for i in range(result.rank)) * contracted


def _integers(attribute: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in re.findall(r"-?\d+", str(attribute).partition(":")[2]))


def _integer(operation: Any, key: str) -> int:
    """An integer or boolean attribute; 0 if absent or of another kind."""
    if key not in operation.attributes:
        return 0
    text = str(operation.attributes[key])
    if text in ("true", "false"):
        return int(text == "true")
    match = re.match(r"(-?\d+)( :|$)", text)
    return int(match[1]) if match else 0
