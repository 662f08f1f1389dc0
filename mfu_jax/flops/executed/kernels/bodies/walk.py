"""Runs the scalar part of a kernel's body and adds up the matmuls that it reaches.

Every step of the grid takes the branches that its indices choose, so that blocks skipped by a
causal or sparse mask cost nothing. Most axes of a grid, and most values that a loop carries, decide
nothing. Which ones do is found by running: the grid, or the loop, starts again with one of them as
soon as its value is asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence

from mfu_jax.flops.executed.kernels.bodies.body import (
    CLUSTER,
    EXTENT,
    IN_CLUSTER,
    LOOPS,
    PASSED,
    POSITION,
    TAKES_OVER,
    BodyBlock,
    BodyOp,
    KernelBody,
    ScalarTable,
    UnknownBodyError,
    carried_arguments,
)

TableOf = Callable[[int], ScalarTable]

_MAX_GRID_STEPS = 1 << 20
_MAX_ITERATIONS = 1 << 22  # over all loops that have to be run


class _NeededError(Exception):
    """The position on an axis of the grid is needed, or a value that a loop carries.

    Attributes:
        index: the axis, or the value's place among those that the loop carries.
        loop: the loop; None for an axis.
    """

    def __init__(self, index: int, loop: BodyOp | None = None) -> None:
        super().__init__()
        self.index, self.loop = index, loop


def grid_flops(body: KernelBody, table: TableOf) -> int:
    """Matmul FLOPs of all steps of a kernel's grid.

    Args:
        body: the kernel.
        table: dimensions and values of a scalar-prefetch operand, by its index.

    Raises:
        UnknownBodyError: the matmuls that run depend on data, or on an unknown operation.
    """
    if not body.matmuls:
        return 0
    walked = _walked(body)
    for tables, flops in walked:
        if all(table(index) == values for index, values in tables.items()):
            return flops
    if any(steps < 0 for steps in body.grid):
        raise UnknownBodyError("its grid depends on data")
    walk = _BodyWalk(body, table)
    try:
        flops = walk.grid()
    except RecursionError:  # a damaged body, in which a value depends on itself
        raise UnknownBodyError("it skips blocks by values that are too far to follow") from None
    walked.append((walk.tables, flops))
    return flops


@functools.lru_cache(maxsize=256)
def _walked(body: KernelBody) -> list[tuple[dict[int, ScalarTable], int]]:
    """Walks of a kernel so far, as (tables that it read, FLOPs): layers share their kernels."""
    return []


def _truncated(a: int, b: int) -> int:
    """Division that rounds towards 0."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _unsigned(a: int) -> int:
    if a < 0:
        raise ValueError("a negative number in unsigned arithmetic")
    return a


_BINARY: dict[str, Callable[[int, int], int]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.divsi": _truncated,
    "arith.divui": operator.floordiv,
    "arith.floordivsi": operator.floordiv,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.remsi": lambda a, b: a - b * _truncated(a, b),
    "arith.remui": operator.mod,
    "arith.shli": lambda a, b: a << min(b, 64),
    "arith.shrsi": operator.rshift,
    "arith.shrui": lambda a, b: _unsigned(a) >> b,
    "arith.minui": lambda a, b: min(_unsigned(a), _unsigned(b)),
    "arith.maxui": lambda a, b: max(_unsigned(a), _unsigned(b)),
    "arith.ceildivui": lambda a, b: -(-_unsigned(a) // b),
}
_ORDER = (operator.lt, operator.le, operator.gt, operator.ge)
_PREDICATES = (operator.eq, operator.ne, *_ORDER, *_ORDER)  # signed, then unsigned
_SAME = {
    "arith.extui",
    "arith.extsi",
    "arith.trunci",
    "arith.index_cast",
    "arith.index_castui",
    "tpu.assume_multiple",
    PASSED,
}
# One thread stands for its warp: the first, which is the one that `elect` chooses and whose value
# the other threads read.
_ELECT, _SHUFFLE = "nvvm.elect.sync", "nvvm.shfl.sync"


class _BodyWalk:
    """Runs the scalar part of a body, one step of the grid at a time."""

    def __init__(self, body: KernelBody, table: TableOf) -> None:
        self.body = body
        self.table = table
        self.tables: dict[int, ScalarTable] = {}
        self.values: dict[int, int] = {}
        self.indices: tuple[int, ...] = ()
        self.axes: set[int] = set()  # those whose positions decide something
        self.carried: dict[int, set[int]] = defaultdict(set)  # by loop: the values that do
        self.iterations = 0  # of all loops together

    def grid(self) -> int:
        """FLOPs of all steps."""
        grid, axes = self.body.grid, self.axes
        while True:
            steps = [range(n if axis in axes else min(n, 1)) for axis, n in enumerate(grid)]
            if math.prod(map(len, steps)) > _MAX_GRID_STEPS:
                raise UnknownBodyError("its grid is too large to be walked")
            same = math.prod(n for axis, n in enumerate(grid) if axis not in axes)
            try:
                return same * sum(map(self.step, itertools.product(*steps)))
            except _NeededError as needed:
                if needed.loop is not None:
                    raise UnknownBodyError("it reads what a loop carries outside of it") from None
                axes.add(needed.index)

    def step(self, indices: tuple[int, ...]) -> int:
        self.indices, self.values = indices, {}
        return self.block(self.body.block)

    def index(self, axis: int) -> int:
        """Where the step is along an axis of the grid."""
        if axis not in self.axes:
            raise _NeededError(axis)
        return self.indices[axis]

    def block(self, block: BodyBlock) -> int:
        total = 0
        for op in block.multiplying:
            if op.name == "scf.if":
                taken = 0 if self.value(op.operands[0]) else 1
                total += self.block(op.regions[taken]) if taken < len(op.regions) else 0
            elif op.name == "scf.index_switch":
                total += self.block(self.case(op))
            elif op.name in LOOPS:
                total += self.loop(op)
            elif op.regions:
                if op.name not in ("tpu.region", "scf.execute_region"):
                    raise UnknownBodyError(f"it multiplies inside {op.name}")
                total += sum(self.block(region) for region in op.regions)
            else:
                total += op.flops
        return total

    def case(self, op: BodyOp) -> BodyBlock:
        """The region that a switch takes; the first one is its default."""
        value = self.value(op.operands[0])
        return op.regions[1 + op.cases.index(value) if value in op.cases else 0]

    def loop(self, op: BodyOp, wanted: int | None = None) -> int:
        """FLOPs of all iterations of a loop; if one of its results is wanted, that instead."""
        run = self.for_loop if op.name == "scf.for" else self.while_loop
        carried, outside = self.carried[id(op)], self.values
        while True:
            try:
                return run(op, carried, wanted)
            except _NeededError as needed:
                if needed.loop is not op or needed.index in carried:
                    raise
                carried.add(needed.index)
            finally:
                self.values = outside

    def iterate(
        self, outside: dict[int, int], arguments: Sequence[int], carry: dict[int, int]
    ) -> None:
        """Begins an iteration, with the values from outside and those that the loop carries."""
        self.iterations += 1
        if self.iterations > _MAX_ITERATIONS:
            raise UnknownBodyError(f"its loops run more than {_MAX_ITERATIONS:,} times")
        self.values = outside | {arguments[i]: value for i, value in carry.items()}

    def for_loop(self, op: BodyOp, carried: set[int], wanted: int | None) -> int:
        start, end, by = (self.value(v) for v in op.operands[:3])
        (inner,) = op.regions
        counter, *arguments = inner.arguments
        steps = range(start, end, max(1, by))
        if wanted is not None:
            carried.add(wanted)
        elif not any(o.regions for o in inner.multiplying):
            return len(steps) * self.block(inner)
        carry = {i: self.value(op.operands[3 + i]) for i in carried}
        outside, total = self.values, 0
        for index in steps:
            self.iterate(outside, arguments, carry)
            self.values[counter] = index
            total += self.block(inner) if wanted is None else 0
            carry = {i: self.value(inner.ops[-1].operands[i]) for i in carried}
        return total if wanted is None else carry[wanted]

    def while_loop(self, op: BodyOp, carried: set[int], wanted: int | None) -> int:
        before, after = op.regions
        goes_on, *passed = before.ops[-1].operands
        carry = {i: self.value(op.operands[i]) for i in carried}
        outside, total = self.values, 0
        while True:
            self.iterate(outside, before.arguments, carry)
            total += self.block(before) if wanted is None else 0
            if not self.value(goes_on):
                return total if wanted is None else self.value(passed[wanted])
            total += self.block(after) if wanted is None else 0
            carry = {i: self.value(after.ops[-1].operands[i]) for i in carried}

    def value(self, number: int) -> int:
        if number not in self.values:
            maker = self.body.makers.get(number)
            if maker is None:
                raise UnknownBodyError("it skips blocks by values that are not known")
            self.values[number] = self.evaluate(maker, number)
        return self.values[number]

    def evaluate(self, op: BodyOp, number: int) -> int:
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
        if op.name == POSITION and op.attribute < len(self.indices):
            return self.body.position(op.attribute, self.index(op.attribute))
        if op.name == EXTENT and op.attribute < len(self.body.grid):
            return self.body.position(op.attribute, self.body.grid[op.attribute])
        if op.name == IN_CLUSTER and op.attribute < len(self.indices):
            return self.index(op.attribute) % self.cluster(op.attribute)
        if op.name == CLUSTER:
            return self.cluster(op.attribute)
        if op.name == "llvm.extractvalue" and self.takes_over(op):
            return 0  # every block does its own work: the total is the same
        if op.name == _ELECT:
            return 1
        if op.name == _SHUFFLE:
            return self.value(op.operands[1])
        if op.name == "memref.load":
            return self.load(op)
        if op.name == "tt.load":
            return self.load_at(op.operands[0])
        if op.name == "scf.if":
            region = op.regions[0 if self.value(op.operands[0]) else 1]
            return self.value(region.ops[-1].operands[op.results.index(number)])
        if op.name in LOOPS:
            if number in op.results:
                return self.loop(op, op.results.index(number))
            raise _NeededError(carried_arguments(op).index(number), op)
        raise UnknownBodyError(f"it skips blocks by {op.name}")

    def cluster(self, axis: int) -> int:
        """Blocks of a cluster along an axis."""
        return self.body.cluster[axis] if axis < len(self.body.cluster) else 1

    def takes_over(self, op: BodyOp) -> bool:
        """Whether an operation reads the reply to a block's query for another one's work."""
        maker = self.body.makers.get(op.operands[0])
        return maker is not None and maker.name == TAKES_OVER

    def load_at(self, pointer: int) -> int:
        """An element of a table: a pointer is one of the kernel's arguments and an offset."""
        position = 0
        while (maker := self.body.makers.get(pointer)) and maker.name == "tt.addptr":
            pointer, offset = maker.operands
            position += self.value(offset)
        return self.element(pointer, lambda dims: position)

    def load(self, op: BodyOp) -> int:
        source, *indices = op.operands
        maker = self.body.makers.get(source)
        if maker and maker.name == "memref.subview" and not indices:  # of one element
            source, *indices = maker.operands
        if not indices:
            raise UnknownBodyError("it skips blocks by values in memory")

        def place(dims: Sequence[int]) -> int:
            position = 0
            for size, index in zip(dims, indices, strict=False):
                position = position * size + self.value(index)
            return position

        return self.element(source, place)

    def element(self, source: int, place: Callable[[Sequence[int]], int]) -> int:
        """The element of a table at a place, which may depend on its dimensions."""
        if source not in self.body.tables:
            raise UnknownBodyError("it skips blocks by values in memory")
        number = self.body.tables.index(source)
        if number not in self.tables:
            self.tables[number] = self.table(number)
        dims, values = self.tables[number]
        position = place(dims)
        if not 0 <= position < len(values):
            raise UnknownBodyError("it reads outside of its table")
        return values[position]
