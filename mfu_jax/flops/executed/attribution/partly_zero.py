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

from mfu_jax.flops.executed.hlo.module import HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape

_LAYOUT = re.compile(r"\{([\d,]+)")


class Real(NamedTuple):
    """Which elements of an array may differ from zero.

    Attributes:
        shape: shape of the array.
        dims: their positions in each dimension.
        share: share of the elements at these positions that lie in their own group, if XLA writes
            a ragged or grouped operand densely.
        unpadded: share of the elements at these positions that are not padding, if a reshape has
            split a padded dimension.
    """

    shape: Shape
    dims: tuple[range, ...]
    share: Fraction = Fraction(1)
    unpadded: Fraction = Fraction(1)

    def at(self, shape: Shape, dims: Sequence[range]) -> Real:
        """The same elements in another array."""
        return self._replace(shape=shape, dims=tuple(dims))

    @property
    def is_all(self) -> bool:
        """Whether no element is known to be zero."""
        return self == whole(self.shape)


@functools.lru_cache(maxsize=4096)
def whole(shape: Shape) -> Real:
    """An array without known zeros."""
    return Real(shape, tuple(map(range, shape.dims)))


def padded(real: Real, pad: HloInstruction, source: HloInstruction) -> Real:
    """An array with zeros around it, and between its elements."""
    dims = []
    for text, positions, size in zip(
        pad.attribute("padding").split("x"), real.dims, pad.shape.dims, strict=True
    ):
        low, _, *interior = map(int, text.split("_"))
        apart = 1 + (interior[0] if interior else 0)
        start, stop = (low + apart * p for p in (positions.start, positions.stop - 1))
        dims.append(_within(range(start, stop + 1, apart * positions.step), size))
    return real.at(pad.shape, dims)


def _within(positions: range, size: int) -> range:
    """The positions from 0 to `size`; negative padding cuts some off."""
    first = max(0, -(positions.start // positions.step))
    last = max(first, -((positions.start - size) // positions.step))
    return positions[first:last]


def transposed(real: Real, transpose: HloInstruction, source: HloInstruction) -> Real:
    order = transpose.integers("dimensions")
    return real.at(transpose.shape, [real.dims[d] for d in order])


def reversed_(real: Real, reverse: HloInstruction, source: HloInstruction) -> Real:
    turned = reverse.integers("dimensions")
    dims = [
        range(size - 1 - r[-1], size - r[0], r.step) if i in turned and r else r
        for i, (r, size) in enumerate(zip(real.dims, source.shape.dims, strict=True))
    ]
    return real.at(reverse.shape, dims)


def sliced(real: Real, cut: HloInstruction, source: HloInstruction) -> Real:
    dims = []
    for positions, kept in zip(real.dims, cut.kept_ranges(), strict=True):
        if kept.step != 1:
            return whole(cut.shape)
        start = range(positions.start - kept.start, positions.stop - kept.start, positions.step)
        dims.append(_within(start, len(kept)))
    return real.at(cut.shape, dims)


def reshaped(real: Real, reshape: HloInstruction, source: HloInstruction) -> Real:
    """Reshapes in logical order; for a bitcast, in the order of both layouts."""
    before = list(range(len(source.shape.dims)))
    after = list(range(len(reshape.shape.dims)))
    if reshape.opcode == "bitcast":
        before, after = _major_to_minor(source), _major_to_minor(reshape)
    old = [(source.shape.dims[d], real.dims[d]) for d in before]
    new = _regrouped(old, [reshape.shape.dims[d] for d in after])
    dims = [new[after.index(d)] for d in range(len(after))]
    moved = real.at(reshape.shape, dims)
    kept = math.prod(map(len, real.dims)) or 1
    hidden = Fraction(kept, math.prod(map(len, dims)) or 1)
    return moved._replace(unpadded=moved.unpadded * hidden)


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


Move = Callable[[Real, HloInstruction, HloInstruction], Real]
"""Takes the real elements of an instruction's first operand, the instruction, and the operand."""

MOVES: dict[str, Move] = {
    "pad": padded,
    "transpose": transposed,
    "reverse": reversed_,
    "slice": sliced,
    "reshape": reshaped,
    "bitcast": reshaped,
}
