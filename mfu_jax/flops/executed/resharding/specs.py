"""Shardings of a partitioned program's values, in words of `PartitionSpec`.

A partitioned program says how its parameters are split, and nothing about the values in between:
their splits are followed from the parameters, dimension by dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mfu_jax.flops.executed.attribution.replication import tile_numbers
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.hlo.dimensions import origins
from mfu_jax.flops.executed.hlo.module import INSIDE, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.uses import Value, made_of

Axes = tuple[str, ...]


class Merged(tuple[tuple[int, Axes | None], ...]):
    """Sizes and axes of dimensions that a reshape has merged, for one that takes them apart."""


Spec = tuple[Axes | Merged | None, ...]
"""The mesh axes that split each dimension; None for a dimension that is not known."""

_MOST_DEPTH = 300
_SAME_DIMS = (
    ELEMENTWISE
    | TRANSCENDENTAL
    | frozenset(
        "copy convert reduce-precision bitcast-convert clamp all-reduce all-reduce-start slice pad "
        "concatenate opt-barrier optimization-barrier reduce-window reverse".split()
    )
)
_MOVED = frozenset(
    "reshape bitcast transpose broadcast reduce dot convolution dynamic-slice dynamic-update-slice "
    "all-gather all-gather-start".split()
)
_PLACES = ("parameter", "get-tuple-element", "tuple", "while", *INSIDE)


class Specs:
    """Follows how values are split.

    Args:
        shardings: of the program's parameters, by number.
        mesh: axis → size, in device order; empty if unknown.
        literals: the integers that devices compute from their own numbers.
    """

    def __init__(
        self, shardings: Mapping[int, str], mesh: Mapping[str, int], literals: Literals
    ) -> None:
        self.module = literals.dataflow.module
        self.devices = self.module.header_int("num_partitions")
        self.shardings = shardings
        self.literals = literals
        self._known: dict[tuple[int, tuple[int, ...]], Spec | None] = {}
        is_whole = math.prod(mesh.values()) == self.devices
        self.mesh = {axis: size for axis, size in mesh.items() if size > 1 and is_whole}

    def of(self, value: Value, depth: int = 0) -> Spec | None:
        """How a value is split; None if nothing is known."""
        key = id(value.instruction), value.path
        if key not in self._known:
            self._known[key] = None  # ends the recursion of a loop
            if self.mesh and depth < _MOST_DEPTH:
                self._known[key] = self._found(value, depth)
        return self._known[key]

    def axes_that_tell_apart(self, numbers: Sequence[int] | np.ndarray) -> Axes | None:
        """The axes along which numbers differ between devices, major first, [devices]."""
        grid = np.asarray(numbers).reshape(tuple(self.mesh.values()))
        steps = {}
        for place, axis in enumerate(self.mesh):
            step = np.diff(grid, axis=place)
            if step.any():
                steps[axis] = abs(int(step.reshape(-1)[np.flatnonzero(step)[0]]))
        count = math.prod(self.mesh[axis] for axis in steps)
        if len(np.unique(grid)) != count:
            return None
        return tuple(sorted(steps, key=lambda axis: -steps[axis]))

    def _found(self, value: Value, depth: int) -> Spec | None:
        computation, instruction, _ = value
        opcode = instruction.opcode
        if opcode == "parameter" and computation is self.module.entry:
            return self._of_parameter(int(instruction.operand_text), instruction)
        operands = list(made_of(self.module, value))
        if opcode in _PLACES or opcode.endswith("-done"):
            found = (self.of(operand, depth + 1) for operand in operands)
            return next((spec for spec in found if spec is not None), None)
        dims = value.array.dims
        if opcode in _SAME_DIMS:
            return self._combined(operands, dims, depth)
        known = [self.of(o, depth + 1) for o in operands] if opcode in _MOVED else []
        if not known or (known[0] is None and opcode not in ("dot", "convolution")):
            return None
        shapes = [o.array.dims for o in operands]
        if opcode in ("reshape", "bitcast"):
            return reshaped(known[0] or (), shapes[0], dims)
        specs = [one or (None,) * len(shape) for one, shape in zip(known, shapes, strict=True)]
        places = origins(instruction, shapes)
        if len(places) != len(dims):
            return None
        spec = tuple(specs[place[0]][place[1]] if place else None for place in places)
        if opcode == "dynamic-slice":
            return self._sliced(value, spec)
        if opcode.startswith("all-gather"):
            (gathered,) = instruction.integers("dimensions")[:1] or (0,)
            return tuple(() if dim == gathered else axes for dim, axes in enumerate(spec))
        return spec

    def _of_parameter(self, number: int, parameter: HloInstruction) -> Spec | None:
        sharding, rank = self.shardings.get(number, ""), len(parameter.shape.dims)
        if sharding in ("{replicated}", "") or sharding.startswith("{maximal"):
            return ((),) * rank if sharding == "{replicated}" else None
        tiles = tile_numbers(sharding, self.devices)
        if tiles is None or tiles.shape[1] < rank:
            return None
        return tuple(self.axes_that_tell_apart(tiles[:, dim]) for dim in range(rank))

    def _combined(self, operands: Sequence[Value], dims: Sequence[int], depth: int) -> Spec | None:
        """Of operands that have the result's dimensions: what any of them knows."""
        rank = len(dims)
        specs = [spec for o in operands if (spec := self.of(o, depth + 1)) and len(spec) == rank]
        if not specs:
            return None
        return tuple(
            next((spec[dim] for spec in specs if spec[dim] is not None), None)
            for dim in range(rank)
        )

    def _sliced(self, value: Value, spec: Spec) -> Spec:
        """Axes are added where the place of a slice depends on the device."""
        computation, instruction = value.computation, value.instruction
        whole = computation.operand(instruction, 0).shape.dims
        found = list(spec)
        for dim, name in enumerate(instruction.operands[1:]):
            if whole[dim] == instruction.shape.dims[dim]:
                continue
            numbers = self.literals.numbers(computation, computation[name])
            axes = None if numbers is None else self.axes_that_tell_apart(numbers)
            before = found[dim]
            is_known = not (axes is None or before is None or isinstance(before, Merged))
            found[dim] = (*(before or ()), *(axes or ())) if is_known else None
        return tuple(found)


def words(spec: Spec | None) -> str:
    """A spec as one writes it: ``P('data', None, ('a', 'b'))``; ``U`` for what is not known."""
    parts = [_word(axes) for axes in spec or ()]
    if set(parts) <= {"U"}:
        return ""
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"


def _word(axes: Axes | Merged | None) -> str:
    if isinstance(axes, Merged):
        axes = axes[0][1] if all(behind == () for _, behind in axes[1:]) else None
    if axes is None:
        return "U"
    return repr(axes[0] if len(axes) == 1 else axes) if axes else "None"


def reshaped(spec: Spec, before: Sequence[int], after: Sequence[int]) -> Spec | None:
    """The spec of a value after a reshape.

    >>> reshaped((("data",), ("model",), ()), (4, 16, 8), (64, 8))[1]
    ()
    >>> reshaped(reshaped((("data",), ("model",)), (4, 16), (64,)), (64,), (4, 16))
    (('data',), ('model',))
    """
    parts: list[tuple[int, Axes | None]] = []
    for axes, size in zip(spec, before, strict=True):
        parts += axes if isinstance(axes, Merged) else [(size, axes)]
    found: list[Axes | Merged | None] = []
    for size in after:
        taken: list[tuple[int, Axes | None]] = []
        while parts and (math.prod(n for n, _ in taken) < size or (size == 1 and not taken)):
            done = math.prod(n for n, _ in taken)
            if not size or size % done:
                return None
            left = size // done
            n, axes = parts.pop(0)
            if n > left:  # its major part has the axes
                if n % left:
                    return None
                parts.insert(0, (n // left, ()))
                n = left
            taken.append((n, axes))
        kept = [part for part in taken if part != (1, ())] or [(size, ())]
        found.append(kept[0][1] if len(kept) == 1 else Merged(kept))
    return tuple(found)
