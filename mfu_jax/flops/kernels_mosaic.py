"""Matmul FLOPs inside of Pallas TPU kernels, from the kernel's own body.

A ``tpu_custom_call`` carries its kernel as MLIR (Mosaic). The body is walked as it runs: for every
step of the grid, with the branches that the step's indices choose, so that blocks that a causal or
sparse mask skips cost nothing. Branches that depend on tables in scalar memory (splash attention's
block mask) are decided from the tables where the program holds them as constants.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_jax.flops.kernels import KernelCall, KernelCost, UnknownCost, register_kernel

_MAX_GRID_STEPS = 1 << 20


class UnknownBodyError(Exception):
    """The kernel's FLOPs depend on data, or on an operation that is not known here."""


@register_kernel("tpu_custom_call")
def _pallas_tpu(call: KernelCall) -> KernelCost | UnknownCost:
    """By the kernel's body; by its author's `cost_estimate` where the body depends on data."""
    config = call.config.get("custom_call_config")
    if not isinstance(config, dict):
        return UnknownCost(reason="tpu_custom_call without custom_call_config")
    estimate = _estimate(config)
    try:
        body = kernel_body(str(config.get("body", "")))
        flops = body.flops(functools.partial(_scalar_table, call))
    except UnknownBodyError as error:
        if estimate is None:
            return UnknownCost(reason=f"{error}; give its cost with @register_kernel")
        note = f"{call.name}: {error}; counted by its author's cost_estimate"
        return KernelCost(flops=estimate, seen_by_xla=estimate, note=note)
    return KernelCost(
        flops=flops,
        rematerialized=flops * body.recomputed_matmuls(call.name) // max(1, body.matmuls),
        dtype=body.dtype,
        seen_by_xla=estimate or 0,
    )


def _estimate(config: Mapping[str, Any]) -> int | None:
    estimate = config.get("cost_estimate")
    flops = str(estimate.get("flops")) if isinstance(estimate, dict) else ""
    return int(flops) if flops.isdecimal() else None


def _scalar_table(call: KernelCall, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions and values, in row-major order, of an operand that is a constant."""
    text = call.literal(index)
    if text is None:
        raise UnknownBodyError("it skips blocks by a table that is not a constant of the program")
    values = tuple(int(v) for v in re.findall(r"-?\d+", text.replace("true", "1")))
    dims = call.operand(index).dims
    if len(values) != math.prod(dims):
        raise UnknownBodyError("it skips blocks by a table that the text leaves out")
    return dims, values


@dataclass(slots=True, eq=False)
class _Op:
    """One operation of the body; values are numbered, negative numbers are block arguments."""

    name: str
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    attribute: int = 0  # a constant's value, a comparison's predicate, an axis
    flops: int = 0
    regions: tuple[_Block, ...] = ()
    has_matmul: bool = False


@dataclass(slots=True, eq=False)
class _Block:
    arguments: tuple[int, ...]
    ops: list[_Op]


@dataclass(slots=True, eq=False)
class KernelBody:
    """A kernel's grid and operations.

    Attributes:
        grid: number of steps in each dimension.
        matmuls: matmul operations in the body, as they are written.
        dtype: left operand's dtype of the first of them.
    """

    grid: tuple[int, ...]
    block: _Block
    prefetched: int
    matmuls: int = 0
    dtype: str = ""
    makers: dict[int, _Op] = field(default_factory=dict)

    def flops(self, table: Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
        """Matmul FLOPs of the whole grid.

        Args:
            table: dimensions and values of a scalar-prefetch operand, by its index.
        """
        if not self.matmuls:
            return 0
        if any(steps < 0 for steps in self.grid):
            raise UnknownBodyError("its grid depends on data")
        deciding = self._deciding_axes()
        steps = [range(n) if i in deciding else range(min(n, 1)) for i, n in enumerate(self.grid)]
        if math.prod(map(len, steps)) > _MAX_GRID_STEPS:
            raise UnknownBodyError("its grid is too large to be walked")
        same = math.prod(n for i, n in enumerate(self.grid) if i not in deciding)
        walk = _Walk(self, table)
        return same * sum(walk.step(indices) for indices in itertools.product(*steps))

    def recomputed_matmuls(self, name: str) -> int:
        """How many of the body's matmuls a flash attention's backward pass computes again.

        With the scores S = Q·Kᵀ and dP = dO·Vᵀ, a kernel for dK and dV computes S, dP, dV, dK
        (and dQ where it is fused), one for dQ computes S, dP, dQ: S is always known from the
        forward pass, dP from the other kernel.
        """
        if re.search(r"(flash|splash)_m[hq]a_(bwd_)?dkv", name):
            return self.matmuls // (5 if self.matmuls % 5 == 0 else 4)
        if re.search(r"(flash|splash)_m[hq]a_(bwd_)?dq", name):
            return self.matmuls * 2 // 3
        return 0

    def _deciding_axes(self) -> set[int]:
        """Grid axes on which a branch or bound around a matmul depends."""
        seen: set[int] = set()
        stack = [v for op in _walk_ops(self.block) if op.has_matmul for v in op.operands]
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if maker := self.makers.get(value):
                stack += maker.operands
                stack += [v for op in _ops_inside(maker) for v in op.operands]
        axes = {i for i in range(len(self.grid)) if self.block.arguments[i] in seen}
        ids = {self.makers[v].attribute for v in seen if self._is_program_id(v)}
        return axes | ids

    def _is_program_id(self, value: int) -> bool:
        maker = self.makers.get(value)
        return maker is not None and maker.name == "tpu.program_id"


def _walk_ops(block: _Block) -> Iterator[_Op]:
    """Operations with regions, which decide what runs, however deep they nest."""
    for op in block.ops:
        if op.regions:
            yield op
            for region in op.regions:
                yield from _walk_ops(region)


def _ops_inside(op: _Op) -> Iterator[_Op]:
    for region in op.regions:
        for inner in region.ops:
            yield inner
            yield from _ops_inside(inner)


def _truncated(a: int, b: int) -> int:
    """Division that rounds towards 0."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.divsi": lambda a, b: _truncated(a, b),
    "arith.divui": lambda a, b: a // b,
    "arith.floordivsi": lambda a, b: a // b,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.remsi": lambda a, b: a - b * _truncated(a, b),
    "arith.remui": lambda a, b: a % b,
    "arith.shli": lambda a, b: a << min(b, 64),
    "arith.shrsi": lambda a, b: a >> b,
}
_PREDICATES: list[Callable[[int, int], bool]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
]
_SAME = {
    "arith.extui",
    "arith.extsi",
    "arith.trunci",
    "arith.index_cast",
    "arith.index_castui",
    "tpu.assume_multiple",
}


class _Walk:
    """Runs the scalar part of a body, one step of the grid at a time."""

    def __init__(
        self, body: KernelBody, table: Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        self.body = body
        self.table = functools.lru_cache(maxsize=None)(table)
        self.values: dict[int, int] = {}
        self.indices: tuple[int, ...] = ()

    def step(self, indices: tuple[int, ...]) -> int:
        self.indices = indices
        self.values = dict(zip(self.body.block.arguments, indices, strict=False))
        return self.block(self.body.block)

    def block(self, block: _Block) -> int:
        total = 0
        for op in block.ops:
            if not op.has_matmul:
                continue
            if op.name == "scf.if":
                taken = 0 if self.value(op.operands[0]) else 1
                total += self.block(op.regions[taken]) if taken < len(op.regions) else 0
            elif op.name == "scf.for":
                total += self.loop(op)
            elif op.regions:
                if op.name not in ("tpu.region", "scf.execute_region"):
                    raise UnknownBodyError(f"it multiplies inside of {op.name}")
                total += sum(self.block(region) for region in op.regions)
            else:
                total += op.flops
        return total

    def loop(self, op: _Op) -> int:
        start, end, by = (self.value(v) for v in op.operands[:3])
        inner = op.regions[0]
        steps = range(start, end, max(1, by))
        if not any(o.regions and o.has_matmul for o in inner.ops):
            return len(steps) * self.block(inner)
        total = 0
        for index in steps:
            outside = dict(self.values)
            self.values[inner.arguments[0]] = index
            total += self.block(inner)
            self.values = outside
        return total

    def value(self, number: int) -> int:
        if number not in self.values:
            maker = self.body.makers.get(number)
            if maker is None:
                raise UnknownBodyError("it skips blocks by values that are not known")
            self.values[number] = self.evaluate(maker, number)
        return self.values[number]

    def evaluate(self, op: _Op, number: int) -> int:
        if op.name == "arith.constant":
            return op.attribute
        if op.name in _BINARY:
            a, b = (self.value(v) for v in op.operands)
            try:
                return _BINARY[op.name](a, b)
            except (ZeroDivisionError, ValueError):
                raise UnknownBodyError(f"{op.name} of {a} and {b}") from None
        if op.name == "arith.cmpi" and 0 <= op.attribute < len(_PREDICATES):
            return int(_PREDICATES[op.attribute](*(self.value(v) for v in op.operands)))
        if op.name in _SAME:
            return self.value(op.operands[0])
        if op.name == "arith.select":
            return self.value(op.operands[1 if self.value(op.operands[0]) else 2])
        if op.name == "tpu.program_id" and op.attribute < len(self.indices):
            return self.indices[op.attribute]
        if op.name == "tpu.iteration_bound" and op.attribute < len(self.body.grid):
            return self.body.grid[op.attribute]
        if op.name == "memref.load":
            return self.load(op)
        if op.name == "scf.if":
            region = op.regions[0 if self.value(op.operands[0]) else 1]
            return self.value(region.ops[-1].operands[op.results.index(number)])
        raise UnknownBodyError(f"it skips blocks by {op.name}")

    def load(self, op: _Op) -> int:
        arguments = self.body.block.arguments
        first = len(self.body.grid)
        tables = arguments[first : first + self.body.prefetched]
        if op.operands[0] not in tables:
            raise UnknownBodyError("it skips blocks by values in memory")
        dims, values = self.table(tables.index(op.operands[0]))
        position = 0
        for size, index in zip(dims, op.operands[1:], strict=False):
            position = position * size + self.value(index)
        if not 0 <= position < len(values):
            raise UnknownBodyError("it reads outside of its table")
        return values[position]


@functools.lru_cache(maxsize=256)
def kernel_body(text: str) -> KernelBody:
    """Decodes the ``body`` of a ``tpu_custom_call``: MLIR, in bytecode or text, in base64.

    Raises:
        UnknownBodyError: where jaxlib is not installed, or the body is of another version.
    """
    try:
        from jax._src.lib import tpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.passmanager import PassManager
    except ImportError as error:
        raise UnknownBodyError(f"its body cannot be read without jaxlib ({error})") from None
    try:
        raw = base64.b64decode(text, validate=True)
        with ir.Context() as context, ir.Location.unknown():
            context.allow_unregistered_dialects = True
            tpu.register_dialect(context)
            module = ir.Module.parse(raw)
            # Bodies are stored in a version-stable form; this takes them back to plain dialects.
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
            return _read_module(module)
    except (binascii.Error, ValueError, RuntimeError, ir.MLIRError) as error:
        first = str(error).strip().splitlines()[:1]
        raise UnknownBodyError(f"its body cannot be read ({' '.join(first)[:80]})") from None


def _read_module(module: Any) -> KernelBody:
    for function in module.body.operations:
        if "iteration_bounds" in function.attributes:
            return _Reader(function).body
    raise UnknownBodyError("its body has no grid")


class _Reader:
    """Copies a function's operations into plain Python objects."""

    def __init__(self, function: Any) -> None:
        self.numbers: dict[Any, int] = {}
        self.makers: dict[int, _Op] = {}
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

    def block(self, block: Any) -> _Block:
        arguments = tuple(self.number(argument) for argument in block.arguments)
        return _Block(arguments, [self.op(op.operation) for op in block.operations])

    def op(self, operation: Any) -> _Op:
        name = operation.name
        op = _Op(
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
    """An integer (or boolean) attribute, 0 where it is absent or of another kind."""
    if key not in operation.attributes:
        return 0
    text = str(operation.attributes[key])
    if text in ("true", "false"):
        return int(text == "true")
    match = re.match(r"(-?\d+)( :|$)", text)
    return int(match[1]) if match else 0
