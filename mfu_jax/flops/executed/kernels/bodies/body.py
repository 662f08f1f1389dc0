"""A kernel's body as plain Python objects: what Pallas and Triton kernels have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

ScalarTable = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions, and values in row-major order

# Canonical names of operations that every dialect spells differently.
POSITION, EXTENT = "grid.position", "grid.extent"
# The same for a block within its cluster.
IN_CLUSTER, CLUSTER = "cluster.position", "cluster.extent"
# Whether a block takes over the work of one that has not started, which then never starts.
TAKES_OVER = "cluster.takes_over"

LOOPS = ("scf.for", "scf.while")
# What makes an argument of a while loop's body: it is one of the values behind the condition.
PASSED = "scf.condition"


class UnknownBodyError(Exception):
    """The kernel's FLOPs depend on data, or on an unknown operation."""


@dataclass(slots=True, eq=False)
class BodyOp:
    """One operation of the body; values, including block arguments, are numbered."""

    name: str
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    attribute: int = 0  # a constant's value, a comparison's predicate, an axis
    cases: tuple[int, ...] = ()  # of a switch: the values that choose its second, third … region
    flops: int = 0
    regions: tuple[BodyBlock, ...] = ()
    has_matmul: bool = False


@dataclass(slots=True, eq=False)
class BodyBlock:
    """Operations that run in sequence, those of them with matmuls, and the block's arguments."""

    arguments: tuple[int, ...]
    ops: list[BodyOp]
    multiplying: list[BodyOp] = field(init=False)

    def __post_init__(self) -> None:
        self.multiplying = [op for op in self.ops if op.has_matmul]


@dataclass(slots=True, eq=False)
class KernelBody:
    """A kernel's grid and operations.

    Attributes:
        grid: number of steps in each dimension; negative if it depends on data.
        block: its operations.
        tables: numbers of the arguments that are scalar-prefetch operands.
        cluster: blocks of a cluster in each dimension; empty if every block is alone.
        strides: distance between positions on each axis; empty if 1 everywhere.
        matmuls: number of matmul operations in the body's text.
        dtype: left operand's dtype of the first matmul.
        makers: the operation that makes a value, by the value's number; of an argument, the loop
            that carries it, or one that stands for a position in the grid.
    """

    grid: tuple[int, ...]
    block: BodyBlock
    tables: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    matmuls: int = 0
    dtype: str = ""
    makers: dict[int, BodyOp] = field(default_factory=dict)

    def position(self, axis: int, index: int) -> int:
        """The value that a step at `index` of an axis reads as its position there."""
        return index * (self.strides[axis] if self.strides else 1)


def carried_arguments(loop: BodyOp) -> tuple[int, ...]:
    """Numbers of the block arguments that hold what a loop carries."""
    first = 1 if loop.name == "scf.for" else 0  # after the counter
    return loop.regions[0].arguments[first:]
