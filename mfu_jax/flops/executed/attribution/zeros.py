"""Where a value is known to be zero: explicit padding, and the dense form of ragged operands.

If a dimension does not divide into the devices' shards, XLA pads it, or masks what lies beyond it:
on the last devices only, so that shares are means over all.

What cannot be followed counts as real, that is, nonzero.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

from mfu_jax.flops.executed.attribution.partly_zero import MOVES, Real, whole
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.value_refs import Frame, UnknownValueError
from mfu_jax.flops.lengths import Lengths

# Primitives whose pads and slices the user wrote; a pad's gradient is a negative pad.
_USERS = frozenset({"concatenate", "dynamic_slice", "pad", "slice", "split"})
# The scope in which a model pads for the hardware: such zeros are not the model's.
_PADDING_SCOPE = "zero_padding"
_USERS_CHOICE = ("select_n", "where")  # whose masked products belong to the model
_BY_ELEMENT = ELEMENTWISE | TRANSCENDENTAL | {"convert", "copy", "select"}
_OTHER_AXES = ("slice", "pad", "concatenate")  # where they leave an axis as it is
_SAME_PLACES = frozenset({"copy", "convert", "negate", "reduce-precision", "all-reduce"})
_ZERO = re.compile(r"-?0(\.0*)?")


def is_written_by_user(instruction: HloInstruction) -> bool:
    """Whether a pad or slice comes from JAX code: the model counts what it adds or drops.

    XLA's have the matmul's op_name, or none.
    """
    names = instruction.op_name.split(";")
    return any(n.rpartition("/")[2] in _USERS and _PADDING_SCOPE not in n for n in names)


class UnevenAxis(NamedTuple):
    """A dimension that does not divide into the devices' shards, and how much of it is real."""

    dim: int
    share: Fraction


class Zeros:
    """Where a program's values are known to be zero."""

    def __init__(self, dataflow: Dataflow, lengths: Lengths) -> None:
        self.dataflow = dataflow
        self.lengths = lengths
        self.literals = Literals(dataflow, lambda: None)
        self._known: dict[tuple[int, str], Real] = {}  # by frame and instruction
        self._shards: dict[tuple[int, str], UnevenAxis | None] = {}

    def real_elements(self, frame: Frame, instruction: HloInstruction) -> Real:
        """Which elements of an instruction's result may differ from zero.

        Args:
            frame: one that the dataflow keeps.
            instruction: an instruction of its computation.
        """
        try:
            real = self._real(frame, instruction, 0)
        except (UnknownValueError, ValueError, IndexError):
            return whole(instruction.shape)
        if len(real.dims) != len(instruction.shape.dims):
            return whole(instruction.shape)
        if real.is_all and self.dataflow.module.header_int("num_partitions") > 1:
            try:
                shard = self._shard_of(frame, instruction, 0)
            except (UnknownValueError, ValueError, IndexError):
                shard = None
            return real._replace(unpadded=shard.share) if shard else real
        return real

    def _real(self, frame: Frame, instruction: HloInstruction, depth: int) -> Real:
        key = (id(frame), instruction.name)
        known = self._known.get(key)
        if known is None:
            if depth > MAX_DEPTH:
                return whole(instruction.shape)
            known = self._known[key] = self._followed(frame, instruction, depth + 1)
        return known

    def _followed(self, frame: Frame, instruction: HloInstruction, depth: int) -> Real:
        opcode, computation = instruction.opcode, frame.computation
        if opcode == "parameter" and frame.call is not None:
            return self._real(*frame.argument(instruction), depth)
        if opcode in ("fusion", "call") and instruction.shape.dtype != "tuple":
            inner = self.dataflow.enter(frame, instruction)
            return self._real(inner, inner.computation.root, depth)
        if opcode == "get-tuple-element":
            return self._element(frame, instruction, depth)
        if opcode == "select":
            return self._selected(frame, instruction)
        if opcode == "broadcast" or not instruction.operands:
            return whole(instruction.shape)
        source = computation.operand(instruction, 0)
        if opcode in _SAME_PLACES:
            return self._real(frame, source, depth)
        if opcode == "dynamic-slice":
            return self._shard(frame, instruction, self._real(frame, source, depth))
        if opcode == "multiply":
            first = self._real(frame, source, depth)
            second = computation.operand(instruction, 1)
            return self._real(frame, second, depth) if first.is_all else first
        if opcode in MOVES and (opcode != "pad" or self._is_padding(frame, instruction)):
            real = self._real(frame, source, depth)
            if not real.is_all or opcode == "pad":
                return MOVES[opcode](real, instruction, source)
        return whole(instruction.shape)

    def _element(self, frame: Frame, instruction: HloInstruction, depth: int) -> Real:
        """One result of a fusion that has several."""
        source = frame.computation.operand(instruction, 0)
        if source.opcode != "fusion":
            return whole(instruction.shape)
        inner = self.dataflow.enter(frame, source)
        results = len(inner.computation.root.operands)
        index = instruction.one_integer("index", below=results)
        made = inner.computation.operand(inner.computation.root, index)
        return self._real(inner, made, depth)

    def _is_padding(self, frame: Frame, pad: HloInstruction) -> bool:
        is_zeros = self.is_zero(frame, frame.computation.operand(pad, 1))
        return is_zeros and not is_written_by_user(pad)

    def _selected(self, frame: Frame, select: HloInstruction) -> Real:
        """Zeros except in one group: the dense form of a ragged or grouped operand."""
        computation = frame.computation
        mask, chosen, other = (computation.operand(select, i) for i in range(3))
        if not self.is_zero(frame, other):
            return whole(select.shape)
        if shard := self._masked_shard(frame, select, mask):
            return whole(select.shape)._replace(unpadded=shard.share)
        share = group_share(computation, select)
        copies = self._copies(frame, chosen) if share is None else 1
        if copies > 1 and (found := self._rows(frame, mask)):
            rows, groups = found
            is_scalar = copies == select.shape.size  # of a sum's gradient
            share = self._share_in_groups(rows, groups if is_scalar else copies)
        return whole(select.shape)._replace(share=share or Fraction(1))

    def _shard(self, frame: Frame, cut: HloInstruction, padded: Real) -> Real:
        """Each device's part of a padded array."""
        partial = [d for d, p in enumerate(padded.dims) if len(p) != padded.shape.dims[d]]
        devices: list[list[range]] = []  # by padded dimension: the positions of each device
        for d in partial:
            size = cut.shape.dims[d]
            operand = frame.computation.operand(cut, 1 + d)
            starts = self.literals.on_each_device(frame, operand)
            if starts is None:
                return whole(cut.shape)
            last = padded.shape.dims[d] - size
            devices.append([range(s, s + size) for s in (max(0, min(s, last)) for s in starts)])
        if not devices:
            return whole(cut.shape)
        kept = Fraction(0)
        real = [padded.dims[d] for d in partial]
        for shards in zip(*devices, strict=True):
            inside = [sum(p in of for p in s) for of, s in zip(real, shards, strict=True)]
            kept += Fraction(math.prod(inside), math.prod(map(len, shards)) * len(devices[0]))
        return whole(cut.shape)._replace(unpadded=kept)

    def _shard_of(self, frame: Frame, instruction: HloInstruction, depth: int) -> UnevenAxis | None:
        """How much of a value follows from what lies beyond the array; None if unknown or nothing.

        What is computed from the rows beyond the end stays beyond it.
        """
        key = (id(frame), instruction.name)
        if key not in self._shards:
            self._shards[key] = None
            if depth <= MAX_DEPTH:
                self._shards[key] = self._shard_followed(frame, instruction, depth + 1)
        return self._shards[key]

    def _shard_followed(
        self, frame: Frame, instruction: HloInstruction, depth: int
    ) -> UnevenAxis | None:
        opcode, computation = instruction.opcode, frame.computation
        made, source, path = self.dataflow.follow(frame, instruction)
        if path:
            return None
        if source is not instruction:
            return self._shard_of(made, source, depth)
        operands = [computation[name] for name in instruction.operands]
        if opcode == "dynamic-slice":
            kept = self._real(frame, instruction, 0).unpadded
            partial = self._real(frame, operands[0], 0).dims
            uneven = [d for d, p in enumerate(partial) if len(p) != operands[0].shape.dims[d]]
            return UnevenAxis(uneven[0], kept) if kept < 1 and len(uneven) == 1 else None
        if opcode == "select" and (masked := self._masked_shard(frame, instruction, operands[0])):
            return masked
        if opcode in _BY_ELEMENT:
            same = (o for o in operands if o.shape.dims == instruction.shape.dims)
            return next(filter(None, (self._shard_of(frame, o, depth) for o in same)), None)
        if opcode in _OTHER_AXES:
            shard = self._shard_of(frame, operands[0], depth)
            sizes = (instruction.shape.dims, operands[0].shape.dims)
            return shard if shard and len({dims[shard.dim] for dims in sizes}) == 1 else None
        if opcode == "dot":
            sides = (self._shard_of(frame, operand, depth) for operand in operands)
            found = (_through_dot(computation, instruction, i, s) for i, s in enumerate(sides))
            return next(filter(None, found), None)
        if opcode in ("transpose", "reshape", "bitcast") and (
            shard := self._shard_of(frame, operands[0], depth)
        ):
            size = operands[0].shape.dims[shard.dim]
            marked = whole(operands[0].shape).dims
            marked = (*marked[: shard.dim], range(size - 1), *marked[shard.dim + 1 :])
            moved = MOVES[opcode](Real(operands[0].shape, marked), instruction, operands[0])
            where = [d for d, p in enumerate(moved.dims) if p == range(size - 1)]
            return shard._replace(dim=where[0]) if len(where) == 1 else None
        return None

    def _masked_shard(
        self, frame: Frame, select: HloInstruction, mask: HloInstruction
    ) -> UnevenAxis | None:
        """The part of a shard before the array's end: ``start + iota < size``; None if no such."""
        if select.op_name.endswith(_USERS_CHOICE):
            return None
        frame, mask = self._origin(frame, mask)
        if mask.opcode != "compare" or mask.attribute("direction") != "LT":
            return None
        (made, place), (bound, limit) = (
            self._origin(frame, frame.computation.operand(mask, i)) for i in (0, 1)
        )
        if place.opcode != "add" or limit.opcode != "broadcast":
            return None
        sides = [self._origin(made, made.computation.operand(place, i)) for i in (0, 1)]
        numbers = [side for _, side in sides if side.opcode == "iota"]
        starts = [(f, side) for f, side in sides if side.opcode == "broadcast"]
        if len(numbers) != 1 or len(starts) != 1:
            return None
        first = self.literals.on_each_device(
            starts[0][0], starts[0][0].computation.operand(starts[0][1], 0)
        )
        end = self.literals.on_each_device(bound, bound.computation.operand(limit, 0))
        if not first or not end:
            return None
        dims = numbers[0].shape.dims
        dim = numbers[0].one_integer("iota_dimension", below=len(dims))
        kept = [max(0, min(dims[dim], e - f)) for f, e in zip(first, end, strict=True)]
        share = Fraction(sum(kept), dims[dim] * len(kept))
        return UnevenAxis(dim, share) if 0 < share < 1 else None

    def _copies(self, frame: Frame, instruction: HloInstruction) -> int:
        """How often a broadcast repeats its operand; 1 for anything else."""
        _, made = self._origin(frame, instruction)
        if made.opcode != "broadcast":
            return 1
        repeated = set(range(len(made.shape.dims))) - set(made.integers("dimensions"))
        return math.prod(made.shape.dims[d] for d in repeated)

    def _origin(self, frame: Frame, instruction: HloInstruction) -> tuple[Frame, HloInstruction]:
        """The instruction that makes a value, through fusions, copies and broadcasts of masks."""
        made, source, path = self.dataflow.follow(frame, instruction)
        if path:
            raise UnknownValueError
        return made, source

    def _share_in_groups(self, rows: int, groups: int) -> Fraction:
        """Each row is in one group, or in none if the user's group sizes leave some out."""
        sizes = self.lengths.group_sizes
        if len(sizes) != groups or sum(sizes) > rows:
            return Fraction(1, groups)
        return Fraction(sum(sizes), rows * groups)

    def share_of_rows(self, frame: Frame, select: HloInstruction) -> Fraction | None:
        """The share of a ragged product that XLA keeps: of each group's result, its own rows."""
        try:
            found = self._rows(frame, frame.computation.operand(select, 0))
        except (UnknownValueError, ValueError, IndexError):
            return None
        return self._share_in_groups(*found) if found and not select.op_name else None

    def _rows(self, frame: Frame, mask: HloInstruction) -> tuple[int, int] | None:
        """Rows and groups of a mask ``start ≤ row`` and ``row < end`` per group; else None."""
        frame, mask = self._origin(frame, mask)
        while mask.opcode == "broadcast":
            frame, mask = self._origin(frame, frame.computation.operand(mask, 0))
        if mask.opcode != "and":
            return None
        rows, groups = set(), set()
        for operand in (frame.computation.operand(mask, i) for i in (0, 1)):
            made, bound = self._origin(frame, operand)
            if bound.opcode != "compare":
                return None
            sides = [self._origin(made, made.computation.operand(bound, i)) for i in (0, 1)]
            numbers = [side for _, side in sides if side.opcode == "iota"]
            bounds = [side for side in sides if side[1].opcode != "iota"]
            if len(numbers) != 1:
                return None
            dims = numbers[0].shape.dims
            rows.add(dims[numbers[0].one_integer("iota_dimension", below=len(dims))])
            groups.add(self._unrepeated(*bounds[0]))
        return (rows.pop(), min(groups)) if len(rows) == 1 else None

    def _unrepeated(self, frame: Frame, instruction: HloInstruction) -> int:
        """Elements of a value before it was broadcast."""
        while instruction.opcode == "broadcast":
            frame, instruction = self._origin(frame, frame.computation.operand(instruction, 0))
        return instruction.shape.size

    def is_zero(self, frame: Frame, instruction: HloInstruction) -> bool:
        """Whether a value is a constant 0, broadcast or not."""
        frame, source, path = self.dataflow.follow(frame, instruction)
        while source.opcode == "broadcast" and not path:
            operand = frame.computation.operand(source, 0)
            frame, source, path = self.dataflow.follow(frame, operand)
        is_constant = source.opcode == "constant" and not path
        return is_constant and _ZERO.fullmatch(source.operand_text.strip()) is not None


def _through_dot(
    computation: HloComputation, dot: HloInstruction, side: int, shard: UnevenAxis | None
) -> UnevenAxis | None:
    """The dimension of a product that is one of an operand's; None if that is summed."""
    if shard is None:
        return None
    batch, contracted = (
        [dot.integers(f"{operand}_{kind}_dims") for operand in ("lhs", "rhs")]
        for kind in ("batch", "contracting")
    )
    if shard.dim in contracted[side]:
        return None
    if shard.dim in batch[side]:
        return shard._replace(dim=batch[side].index(shard.dim))
    ranks = [len(computation.operand(dot, i).shape.dims) for i in (0, 1)]
    before = len(batch[0]) + side * (ranks[0] - len(batch[0]) - len(contracted[0]))
    summed = {*batch[side], *contracted[side]}
    free = [d for d in range(ranks[side]) if d not in summed]
    return shard._replace(dim=before + free.index(shard.dim))


def group_share(computation: HloComputation, select: HloInstruction) -> Fraction | None:
    """1/n if XLA keeps one of n positions of a dimension: where it equals the group's number.

    The user's own masks have op_names; their products belong to the model.
    """
    mask = computation.operand(select, 0)
    if select.op_name or mask.opcode != "compare" or mask.attribute("direction") != "EQ":
        return None
    sides = [computation.operand(mask, i) for i in (0, 1)]
    for side, other in (sides, sides[::-1]):
        if side.opcode != "iota" or other.opcode not in ("iota", "broadcast"):
            continue
        number = side.one_integer("iota_dimension", below=len(mask.shape.dims))
        if number not in (*other.integers("iota_dimension"), *other.integers("dimensions")):
            return Fraction(1, mask.shape.dims[number])
    return None
