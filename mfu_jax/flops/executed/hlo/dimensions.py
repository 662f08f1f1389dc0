"""Where the dimensions of an instruction's result come from."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.flops.executed.hlo.module import HloInstruction


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
        batch = [instruction.integers(f"{side}_batch_dims") for side in ("lhs", "rhs")]
        summed = [instruction.integers(f"{side}_contracting_dims") for side in ("lhs", "rhs")]
        return [(0, dim) for dim in batch[0]] + [
            (side, dim)
            for side, shape in enumerate(shapes)
            for dim in range(len(shape))
            if dim not in (*batch[side], *summed[side])
        ]
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
