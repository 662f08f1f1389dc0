"""Where a value is known to be zero: explicit padding, and the dense form of ragged operands.

If a dimension does not divide into the devices' shards, XLA pads it, or masks what lies beyond it:
on the last devices only, so that shares are means over all.

What cannot be followed counts as real, that is, nonzero.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from fractions import Fraction

from mfu_jax.flops.executed.attribution.partly_zero import MOVES, Real, moved, whole
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.formulas.windows import common
from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, SAME_VALUE, Dataflow
from mfu_jax.flops.executed.hlo.dimensions import origins
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.value_refs import Frame, UnknownValueError
from mfu_jax.flops.lengths import Lengths

# Primitives whose pads and slices the user wrote; a pad's gradient is a negative pad.
_USERS = frozenset({"concatenate", "dynamic_slice", "pad", "slice", "split"})
# The scope in which a model pads for the hardware: such zeros are not the model's.
_PADDING_SCOPE = "zero_padding"
_USERS_CHOICE = ("select_n", "where")  # whose masked products belong to the model
_SAME_PLACES = SAME_VALUE - {"bitcast", "reshape"} | {"negate", "reduce-precision", "all-reduce"}
# What these compute from elements beyond the end of an array is beyond the end of theirs.
_KEEP_ENDS = ELEMENTWISE | TRANSCENDENTAL | {"concatenate", "dot", "pad"}
_KEEP_ZEROS = frozenset({"select", "dynamic-slice", "multiply", *MOVES})
_ZERO = re.compile(r"-?0(\.0*)?")


def is_written_by_user(instruction: HloInstruction) -> bool:
    """Whether a pad or slice comes from JAX code: the model counts what it adds or drops.

    XLA's have the matmul's op_name, or none.
    """
    names = instruction.op_name.split(";")
    return any(n.rpartition("/")[2] in _USERS and _PADDING_SCOPE not in n for n in names)


class Zeros:
    """Where a program's values are known to be zero."""

    def __init__(self, dataflow: Dataflow, lengths: Lengths) -> None:
        self.dataflow = dataflow
        self.lengths = lengths
        self.literals = Literals(dataflow)
        self.is_sharded = dataflow.module.header_int("num_partitions") > 1
        self.followed = _KEEP_ZEROS | _KEEP_ENDS if self.is_sharded else _KEEP_ZEROS
        self._known: dict[tuple[int, str], Real] = {}  # by frame and instruction

    def real_elements(self, frame: Frame, instruction: HloInstruction, depth: int = 0) -> Real:
        """Which elements of an instruction's result may differ from zero.

        Args:
            frame: one that the dataflow keeps.
            instruction: an instruction of its computation.
            depth: how far it is behind the first one.
        """
        key = (id(frame), instruction.name)
        if key not in self._known:
            self._known[key] = whole(instruction.shape.dims)
            with contextlib.suppress(UnknownValueError, ValueError, IndexError):
                if depth <= MAX_DEPTH:
                    self._known[key] = self._followed(frame, instruction, depth + 1)
        return self._known[key]

    def _followed(self, frame: Frame, instruction: HloInstruction, depth: int) -> Real:
        frame, made, path = self.dataflow.follow(frame, instruction, through=_SAME_PLACES)
        all_real = whole(instruction.shape.dims)
        if path or made.opcode not in self.followed or made.shape.dims != instruction.shape.dims:
            return all_real
        if made is not instruction:
            return self.real_elements(frame, made, depth)
        sources = [frame.computation[name] for name in made.operands]
        if made.opcode == "select" and not (real := self._selected(frame, made)).is_all:
            return real
        if made.opcode == "dynamic-slice":
            return self._shard(frame, made, self.real_elements(frame, sources[0], depth))
        if made.opcode == "multiply":
            factors = (self.real_elements(frame, source, depth) for source in sources)
            return next((real for real in factors if not real.is_all), all_real)
        if made.opcode in MOVES and (made.opcode != "pad" or self._is_padding(frame, made)):
            real = self.real_elements(frame, sources[0], depth)
            is_known = made.opcode == "pad" or not real.is_all
            return moved(real, made, sources[0]) if is_known else all_real
        for side, source in enumerate(sources if self.is_sharded else ()):
            real = self.real_elements(frame, source, depth)
            if (axis := _following(made, sources, side, real.uneven)) is not None:
                return all_real._replace(unpadded=real.unpadded, uneven=axis)
        return all_real

    def _is_padding(self, frame: Frame, pad: HloInstruction) -> bool:
        is_zeros = self.is_zero(frame, frame.computation.operand(pad, 1))
        return is_zeros and not is_written_by_user(pad)

    def _selected(self, frame: Frame, select: HloInstruction) -> Real:
        """Zeros except in one group: the dense form of a ragged or grouped operand."""
        computation = frame.computation
        mask, chosen, other = (computation.operand(select, i) for i in range(3))
        if not self.is_zero(frame, other):
            return whole(select.shape.dims)
        if shard := self._masked_shard(frame, select, mask):
            return shard
        share = group_share(computation, select)
        copies = self._copies(frame, chosen) if share is None else 1
        if copies > 1 and (found := self._rows(frame, mask)):
            rows, groups = found
            is_scalar = copies == select.shape.size  # of a sum's gradient
            share = self._share_in_groups(rows, groups if is_scalar else copies)
        return whole(select.shape.dims)._replace(share=share or Fraction(1))

    def _shard(self, frame: Frame, cut: HloInstruction, padded: Real) -> Real:
        """Each device's part of a padded array."""
        partial = [d for d, p in enumerate(padded.dims) if len(p) != padded.sizes[d]]
        devices: list[list[range]] = []  # by padded dimension: the positions of each device
        for d in partial:
            size = cut.shape.dims[d]
            operand = frame.computation.operand(cut, 1 + d)
            starts = self.literals.on_each_device(frame, operand)
            if starts is None:
                return whole(cut.shape.dims)
            last = padded.sizes[d] - size
            devices.append([range(s, s + size) for s in (max(0, min(s, last)) for s in starts)])
        if not devices:
            return whole(cut.shape.dims)
        kept = Fraction(0)
        real = [padded.dims[d] for d in partial]
        for shards in zip(*devices, strict=True):
            inside = [len(common(of, s)) for of, s in zip(real, shards, strict=True)]
            kept += Fraction(math.prod(inside), math.prod(map(len, shards)) * len(devices[0]))
        uneven = partial[0] if kept < 1 and len(partial) == 1 else None
        return whole(cut.shape.dims)._replace(unpadded=kept, uneven=uneven)

    def _masked_shard(
        self, frame: Frame, select: HloInstruction, mask: HloInstruction
    ) -> Real | None:
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
        is_part = 0 < share < 1
        return whole(select.shape.dims)._replace(unpadded=share, uneven=dim) if is_part else None

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


def _following(
    made: HloInstruction, sources: Sequence[HloInstruction], side: int, axis: int | None
) -> int | None:
    """The dimension of a result that goes along one of an operand's; None if none does."""
    if axis is None:
        return None
    sizes = [source.shape.dims for source in sources]
    if made.opcode == "dot":
        found = origins(made, sizes)
        return found.index((side, axis)) if (side, axis) in found else None
    return axis if sizes[side][axis] == made.shape.dims[axis] else None


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
