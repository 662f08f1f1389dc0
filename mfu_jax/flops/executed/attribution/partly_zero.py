"""Arrays that are partly zero, and how moving their elements changes that.

In each dimension, the positions that may differ from zero form a `range`; padding, slicing,
reversing and transposing ranges gives ranges again.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from mfu_jax.flops.executed.formulas.windows import common, mirrored, scaled
from mfu_jax.flops.executed.hlo.module import HloInstruction

_LAYOUT = re.compile(r"\{([\d,]+)")


class Real(NamedTuple):
    """Which elements of an array may differ from zero.

    Attributes:
        sizes: the array's dimensions.
        dims: the positions of these elements in each dimension.
        share: share of the elements at these positions that lie in their own group, if XLA writes
            a ragged or grouped operand densely.
        unpadded: share of the elements at these positions that are not padding: if a reshape has
            split a padded dimension, or as the mean of devices whose shards are uneven.
        uneven: the dimension that does not divide into the devices' shards, if that is known.
    """

    sizes: tuple[int, ...]
    dims: tuple[range, ...]
    share: Fraction = Fraction(1)
    unpadded: Fraction = Fraction(1)
    uneven: int | None = None

    @property
    def is_all(self) -> bool:
        """Whether no element is known to be zero."""
        return self == whole(self.sizes)


@functools.lru_cache(maxsize=4096)
def whole(sizes: tuple[int, ...]) -> Real:
    """An array without known zeros."""
    return Real(sizes, tuple(map(range, sizes)))


def moved(real: Real, instruction: HloInstruction, source: HloInstruction) -> Real:
    """The elements after an instruction of `MOVES`, of whose first operand they are `real`."""
    move, sizes = MOVES[instruction.opcode], instruction.shape.dims
    dims, uneven, unpadded = tuple(move(real.dims, instruction, source)), None, real.unpadded
    if len(dims) != len(sizes):  # a damaged text
        return whole(sizes)
    if move is _sliced and (d := real.uneven) is not None and sizes[d] != real.sizes[d]:
        return whole(sizes)  # each device's part beyond the end may be cut off
    if move is _reshaped:
        unpadded *= Fraction(math.prod(map(len, real.dims)) or 1, math.prod(map(len, dims)) or 1)
    if real.uneven is not None:  # the dimension that would be empty if this one were
        sides = enumerate(source.shape.dims)
        after = move([range(0 if d == real.uneven else n) for d, n in sides], instruction, source)
        uneven = next((d for d, positions in enumerate(after) if not positions), None)
    return Real(sizes, dims, real.share, unpadded, uneven)


def _padded(dims: Sequence[range], pad: HloInstruction, source: HloInstruction) -> Sequence[range]:
    """Zeros around the elements, and between them."""
    found = []
    for text, positions, size in zip(
        pad.attribute("padding").split("x"), dims, pad.shape.dims, strict=True
    ):
        low, _, *interior = map(int, text.split("_"))
        placed = scaled(positions, 1 + sum(interior), low)
        found.append(common(placed, range(size)))  # negative padding cuts some off
    return found


def _transposed(
    dims: Sequence[range], transpose: HloInstruction, source: HloInstruction
) -> Sequence[range]:
    return [dims[d] for d in transpose.integers("dimensions")]


def _reversed(
    dims: Sequence[range], reverse: HloInstruction, source: HloInstruction
) -> Sequence[range]:
    turned = reverse.integers("dimensions")
    return [
        mirrored(positions, size) if d in turned else positions
        for d, (positions, size) in enumerate(zip(dims, source.shape.dims, strict=True))
    ]


def _sliced(dims: Sequence[range], cut: HloInstruction, source: HloInstruction) -> Sequence[range]:
    kept = cut.kept_ranges()
    if any(part.step != 1 for part in kept):
        return whole(cut.shape.dims).dims
    pairs = zip(dims, kept, strict=True)
    return [scaled(common(positions, part), 1, -part.start) for positions, part in pairs]


def _reshaped(
    dims: Sequence[range], reshape: HloInstruction, source: HloInstruction
) -> Sequence[range]:
    """In logical order; for a bitcast, in the order of both layouts."""
    before = list(range(len(source.shape.dims)))
    after = list(range(len(reshape.shape.dims)))
    if reshape.opcode == "bitcast":
        before, after = _major_to_minor(source), _major_to_minor(reshape)
    old = [(source.shape.dims[d], dims[d]) for d in before]
    new = _regrouped(old, [reshape.shape.dims[d] for d in after])
    return [new[after.index(d)] for d in range(len(after))]


def _major_to_minor(instruction: HloInstruction) -> list[int]:
    match = _LAYOUT.search(instruction.shape_text)
    if match is None:
        return list(range(len(instruction.shape.dims)))
    return [int(d) for d in reversed(match[1].split(","))]


def _regrouped(old: Sequence[tuple[int, range]], sizes: Sequence[int]) -> list[range]:
    """The positions after a reshape from dimensions of `old` to `sizes`, both major first."""
    new: list[range] = []
    at = 0
    while len(new) < len(sizes) or at < len(old):
        group, wanted = list(old[at : at + 1]), list(sizes[len(new) : len(new) + 1])
        at += 1
        while (have := math.prod(s for s, _ in group)) != (want := math.prod(wanted)):
            if have < want:
                group.append(old[at])
                at += 1
            else:
                wanted.append(sizes[len(new) + len(wanted)])
        new += _group(group, wanted)
    return new


def _group(old: Sequence[tuple[int, range]], sizes: list[int]) -> list[range]:
    """Dimensions of equal product, merged or split."""
    partial = [i for i, (size, positions) in enumerate(old) if positions != range(size)]
    if not partial:
        return [range(size) for size in sizes]
    inner = math.prod(size for size, _ in old[partial[0] + 1 :])
    outer = math.prod(size for size, _ in old[: partial[0]])
    positions = old[partial[0]][1]
    matching = [i for i, size in enumerate(sizes) if size == old[partial[0]][0]]
    for i in matching:
        if len(partial) == 1 and math.prod(sizes[:i]) == outer:
            return [positions if j == i else range(size) for j, size in enumerate(sizes)]
    if len(partial) == 1 and outer == 1 and positions.step == 1:
        start, stop = positions.start * inner, positions.stop * inner
        minor = math.prod(sizes[1:])
        if start % minor == stop % minor == 0:
            return [range(start // minor, stop // minor), *map(range, sizes[1:])]
    return [range(size) for size in sizes]


Move = Callable[[Sequence[range], HloInstruction, HloInstruction], Sequence[range]]
"""Takes the positions in an instruction's first operand, the instruction, and the operand."""

MOVES: dict[str, Move] = {
    "pad": _padded,
    "transpose": _transposed,
    "reverse": _reversed,
    "slice": _sliced,
    "reshape": _reshaped,
    "bitcast": _reshaped,
}
