"""Where the dimensions of an instruction's result come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.flops.executed.hlo.module import HloInstruction


class DotIndex(NamedTuple):
    """One of the indices that a dot runs over: its dimension in each array, None where it is not.

    A batch dimension is in all three, a contracted one not in the result.
    """

    lhs: int | None
    rhs: int | None
    result: int | None


def dot_indices(dot: HloInstruction, ranks: Sequence[int]) -> list[DotIndex]:
    """The indices of a dot or a library's matmul, those of the result's dimensions first.

    Args:
        dot: the instruction.
        ranks: how many dimensions the left and the right operand have.
    """
    batch, contracted = (
        [dot_dims(dot, f"{side}_{kind}") or () for side in ("lhs", "rhs")]
        for kind in ("batch", "contracting")
    )
    left, right = (
        [d for d in range(rank) if d not in (*batch[side], *contracted[side])]
        for side, rank in enumerate(ranks)
    )
    made = [*zip(*batch, strict=False), *((d, None) for d in left), *((None, d) for d in right)]
    found = [DotIndex(lhs, rhs, number) for number, (lhs, rhs) in enumerate(made)]
    return found + [DotIndex(lhs, rhs, None) for lhs, rhs in zip(*contracted, strict=False)]


def dot_dims(dot: HloInstruction, name: str) -> tuple[int, ...] | None:
    """Dimensions of an operand, such as ``lhs_contracting``; None if the text lacks them.

    A library call has them in its config, which older XLA writes with escaped quotes.
    """
    if dot.opcode.startswith("custom-call"):
        config = dot.attribute("backend_config")
        listed = re.search(rf'{name}_dimensions\\?":\[([^]]*)\]', config)
        return tuple(map(int, re.findall(r"\d+", listed[1]))) if listed else None
    return dot.integers(f"{name}_dims") if dot.attribute(f"{name}_dims") else None


def origins(
    instruction: HloInstruction, shapes: Sequence[Sequence[int]]
) -> Sequence[tuple[int, int] | None]:
    """The operand and its dimension that each dimension of a result comes from."""
    opcode, named = instruction.opcode, instruction.integers("dimensions")
    rank = len(shapes[0]) if shapes else 0
    if opcode == "transpose":
        return [(0, dim) for dim in named]
    if opcode == "broadcast":
        found = dict(zip(named, range(rank), strict=False))
        size = len(instruction.shape.dims)
        return [(0, found[dim]) if dim in found else None for dim in range(size)]
    if opcode == "reduce":
        return [(0, dim) for dim in range(rank) if dim not in named]
    if opcode == "dot":
        indices = dot_indices(instruction, [len(shape) for shape in shapes])
        made = [(i.lhs, i.rhs or 0) for i in indices if i.result is not None]
        return [(1, right) if left is None else (0, left) for left, right in made]
    if opcode == "convolution":  # a matmul as TPUs write it: batch, positions, features
        labels = instruction.attribute("dim_labels").replace("->", "_").split("_")
        places = [
            (1, labels[1].find("o")) if label == "f" else (0, labels[0].find(label))
            for label in (labels[2] if len(labels) == 3 else "")
        ]
        sizes = next(instruction.shape.leaves()).dims
        return [
            (side, dim) if dim >= 0 and shapes[side][dim] == size else None
            for (side, dim), size in zip(places, sizes, strict=False)
        ]
    return [(0, dim) for dim in range(rank)]
