"""Where a value is known to be zero: explicit padding, and the dense form of ragged operands.

Of each dimension, the positions that may differ from zero are a `range`; padding, slices, reversals
and transpositions of ranges are ranges. What is not followed counts as real.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from mfu_jax.flops.executed.dataflow import MAX_DEPTH, Dataflow, Frame, UnknownValueError
from mfu_jax.flops.executed.hlo import HloInstruction, Shape

_LAYOUT = re.compile(r"\{([\d,]+)")
_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
# Primitives whose pads and slices the user wrote; the gradient of a pad is one with less than 0.
_USERS = frozenset({"concatenate", "dynamic_slice", "pad", "slice", "split"})
_SAME_PLACES = frozenset({"copy", "convert", "negate", "reduce-precision", "all-reduce"})


class Real(NamedTuple):
    """Which elements of an array may differ from zero.

    Attributes:
        shape: the array's.
        dims: of each dimension, the positions.
        share: of the elements at these positions, those of the group that each belongs to, where
            XLA writes a ragged or grouped operand densely.
        unpadded: of the elements at these positions, those that are no padding, where a reshape
            has split a padded dimension.
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


def whole(shape: Shape) -> Real:
    """An array without known zeros."""
    return Real(shape, tuple(map(range, shape.dims)))


def real_elements(dataflow: Dataflow, frame: Frame, instruction: HloInstruction) -> Real:
    """Which elements of an instruction's result may differ from zero."""
    try:
        real = _real(dataflow, frame, instruction, 0)
    except (UnknownValueError, ValueError, IndexError):
        return whole(instruction.shape)
    return real if len(real.dims) == len(instruction.shape.dims) else whole(instruction.shape)


def _real(dataflow: Dataflow, frame: Frame, instruction: HloInstruction, depth: int) -> Real:
    opcode, computation = instruction.opcode, frame.computation
    if depth > MAX_DEPTH:
        return whole(instruction.shape)
    if opcode == "parameter" and frame.arguments is not None:
        frame, argument = frame.argument(instruction)
        return _real(dataflow, frame, argument, depth + 1)
    if opcode in ("fusion", "call") and instruction.shape.dtype != "tuple":
        inner = dataflow.enter(frame, instruction)
        return _real(dataflow, inner, inner.computation.root, depth + 1)
    if opcode == "get-tuple-element":
        return _element(dataflow, frame, instruction, depth)
    if opcode == "select":
        return _selected(dataflow, frame, instruction, depth)
    if opcode == "broadcast" or not instruction.operands:
        return whole(instruction.shape)
    source = computation.operand(instruction, 0)
    if opcode in _SAME_PLACES:
        return _real(dataflow, frame, source, depth + 1)
    if opcode == "multiply":
        first, second = (
            _real(dataflow, frame, computation.operand(instruction, i), depth + 1) for i in (0, 1)
        )
        return second if first.is_all else first
    if opcode in _MOVES:
        return _MOVES[opcode](dataflow, frame, instruction, source, depth)
    return whole(instruction.shape)


def _element(dataflow: Dataflow, frame: Frame, instruction: HloInstruction, depth: int) -> Real:
    """One result of a fusion that has several."""
    source = frame.computation.operand(instruction, 0)
    if source.opcode != "fusion":
        return whole(instruction.shape)
    inner = dataflow.enter(frame, source)
    (index,) = instruction.integers("index")
    made = inner.computation.operand(inner.computation.root, index)
    return _real(dataflow, inner, made, depth + 1)


def _padded(
    dataflow: Dataflow,
    frame: Frame,
    instruction: HloInstruction,
    source: HloInstruction,
    depth: int,
) -> Real:
    is_zeros = is_zero(dataflow, frame, frame.computation.operand(instruction, 1))
    if not is_zeros or is_written_by_user(instruction):
        return whole(instruction.shape)
    real = _real(dataflow, frame, source, depth + 1)
    dims = []
    for text, positions, size in zip(
        instruction.attribute("padding").split("x"), real.dims, instruction.shape.dims, strict=True
    ):
        low, _, *interior = map(int, text.split("_"))
        apart = 1 + (interior[0] if interior else 0)
        start, stop = (low + apart * p for p in (positions.start, positions.stop - 1))
        dims.append(_within(range(start, stop + 1, apart * positions.step), size))
    return real.at(instruction.shape, dims)


def _within(positions: range, size: int) -> range:
    """The positions from 0 to `size`; negative padding cuts some off."""
    first = max(0, -(positions.start // positions.step))
    last = max(first, -((positions.start - size) // positions.step))
    return positions[first:last]


def _transposed(
    dataflow: Dataflow,
    frame: Frame,
    instruction: HloInstruction,
    source: HloInstruction,
    depth: int,
) -> Real:
    real = _real(dataflow, frame, source, depth + 1)
    order = instruction.integers("dimensions")
    return real.at(instruction.shape, [real.dims[d] for d in order])


def _reversed(
    dataflow: Dataflow,
    frame: Frame,
    instruction: HloInstruction,
    source: HloInstruction,
    depth: int,
) -> Real:
    real = _real(dataflow, frame, source, depth + 1)
    turned = instruction.integers("dimensions")
    dims = [
        range(size - 1 - r[-1], size - r[0], r.step) if i in turned and r else r
        for i, (r, size) in enumerate(zip(real.dims, source.shape.dims, strict=True))
    ]
    return real.at(instruction.shape, dims)


def is_written_by_user(instruction: HloInstruction) -> bool:
    """Whether a pad or slice is JAX's own: the model counts what it adds or drops.

    XLA's have the matmul's op_name, or none.
    """
    return any(name.rpartition("/")[2] in _USERS for name in instruction.op_name.split(";"))


def slice_ranges(instruction: HloInstruction) -> tuple[range, ...]:
    """The positions that a ``slice`` keeps."""
    found = _SLICE.findall(instruction.attribute("slice") or instruction.attributes["slice"])
    return tuple(range(int(start), int(end), int(step or 1)) for start, end, step in found)


def _sliced(
    dataflow: Dataflow,
    frame: Frame,
    instruction: HloInstruction,
    source: HloInstruction,
    depth: int,
) -> Real:
    real = _real(dataflow, frame, source, depth + 1)
    dims = []
    for positions, kept in zip(real.dims, slice_ranges(instruction), strict=True):
        if kept.step != 1:
            return whole(instruction.shape)
        start = range(positions.start - kept.start, positions.stop - kept.start, positions.step)
        dims.append(_within(start, len(kept)))
    return real.at(instruction.shape, dims)


def _reshaped(
    dataflow: Dataflow,
    frame: Frame,
    instruction: HloInstruction,
    source: HloInstruction,
    depth: int,
) -> Real:
    """A reshape in logical order, a bitcast in the order of both layouts."""
    real = _real(dataflow, frame, source, depth + 1)
    before = list(range(len(source.shape.dims)))
    after = list(range(len(instruction.shape.dims)))
    if instruction.opcode == "bitcast":
        before, after = _major_to_minor(source), _major_to_minor(instruction)
    old = [(source.shape.dims[d], real.dims[d]) for d in before]
    new = _regrouped(old, [instruction.shape.dims[d] for d in after])
    dims = [new[after.index(d)] for d in range(len(after))]
    moved = real.at(instruction.shape, dims)
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


def _selected(dataflow: Dataflow, frame: Frame, select: HloInstruction, depth: int) -> Real:
    """Zeros but for one group: how a ragged or grouped operand is written densely."""
    computation = frame.computation
    mask, chosen, other = (computation.operand(select, i) for i in range(3))
    if not is_zero(dataflow, frame, other) or depth > MAX_DEPTH:
        return whole(select.shape)
    share = group_share(dataflow, frame, select)
    copies = _copies(dataflow, frame, chosen) if share is None else 1
    if copies > 1 and _has_bounds(dataflow, frame, mask):
        share = Fraction(1, copies)  # each row is in one group
    return whole(select.shape)._replace(share=share or Fraction(1))


def group_share(dataflow: Dataflow, frame: Frame, select: HloInstruction) -> Fraction | None:
    """1/n if XLA keeps one of n positions of a dimension: those that equal the group's number.

    The user's own masks have op_names; their products are the model's.
    """
    mask = frame.computation.operand(select, 0)
    if select.op_name or mask.opcode != "compare" or mask.attribute("direction") != "EQ":
        return None
    sides = [frame.computation.operand(mask, i) for i in (0, 1)]
    for side, other in (sides, sides[::-1]):
        if side.opcode != "iota" or other.opcode not in ("iota", "broadcast"):
            continue
        (number,) = side.integers("iota_dimension")
        if number not in (*other.integers("iota_dimension"), *other.integers("dimensions")):
            return Fraction(1, mask.shape.dims[number])
    return None


def _copies(dataflow: Dataflow, frame: Frame, instruction: HloInstruction) -> int:
    """How often a broadcast repeats its operand; 1 for anything else."""
    _, made = _origin(dataflow, frame, instruction)
    if made.opcode != "broadcast":
        return 1
    repeated = set(range(len(made.shape.dims))) - set(made.integers("dimensions"))
    return math.prod(made.shape.dims[d] for d in repeated)


def _origin(
    dataflow: Dataflow, frame: Frame, instruction: HloInstruction
) -> tuple[Frame, HloInstruction]:
    """The instruction that makes a value, through fusions, copies and broadcasts of masks."""
    made, source, path = dataflow.follow(frame, instruction)
    if path:
        raise UnknownValueError
    return made, source


def _has_bounds(dataflow: Dataflow, frame: Frame, mask: HloInstruction) -> bool:
    """Whether a mask is ``start ≤ row`` and ``row < end``, the rows of one group."""
    frame, mask = _origin(dataflow, frame, mask)
    while mask.opcode == "broadcast":
        frame, mask = _origin(dataflow, frame, frame.computation.operand(mask, 0))
    if mask.opcode != "and":
        return False
    bounds = [_origin(dataflow, frame, frame.computation.operand(mask, i)) for i in (0, 1)]
    return all(
        bound.opcode == "compare"
        and "iota"
        in {_origin(dataflow, f, f.computation.operand(bound, i))[1].opcode for i in (0, 1)}
        for f, bound in bounds
    )


def is_zero(dataflow: Dataflow, frame: Frame, instruction: HloInstruction) -> bool:
    """Whether a value is a constant 0, broadcast or not."""
    frame, source, path = dataflow.follow(frame, instruction)
    while source.opcode == "broadcast" and not path:
        operand = frame.computation.operand(source, 0)
        frame, source, path = dataflow.follow(frame, operand)
    text = source.operand_text.strip()
    return (
        source.opcode == "constant" and not path and re.fullmatch(r"-?0(\.0*)?", text) is not None
    )


_Move = Callable[[Dataflow, Frame, HloInstruction, HloInstruction, int], Real]
_MOVES: dict[str, _Move] = {
    "pad": _padded,
    "transpose": _transposed,
    "reverse": _reversed,
    "slice": _sliced,
    "reshape": _reshaped,
    "bitcast": _reshaped,
}
