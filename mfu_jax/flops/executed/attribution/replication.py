"""Matmuls that several devices run on the same values: work that is replicated, not shared.

The program is walked while tracking, for every value, the groups of devices that hold the same one.
Sharded parameters and partition ids differ between devices; collectives make values equal again.
Where the text does not say, all devices are assumed to differ, so that no work is wrongly called a
repetition.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any, TypeAlias

import numpy as np

from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH
from mfu_jax.flops.executed.hlo.module import (
    INSIDE,
    HloComputation,
    HloInstruction,
    HloModule,
)
from mfu_jax.flops.executed.hlo.opcodes import DIFFER_BY_DEVICE
from mfu_jax.flops.executed.hlo.replica_groups import (
    device_pairs,
    groups_text,
    iota,
    numbers,
    replica_groups,
)

# For each device, the first device that holds the same value; for a tuple, those of its elements.
ReplicaGroups = tuple[int, ...]
Replicas: TypeAlias = "ReplicaGroups | list[Replicas]"

_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")
_NAMED = re.compile(
    r"\{mesh\[((?:'\w+'=\d+,?)*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?, "
    r"\[(.*?)\](?:, replicated=\{[^}]*\})?\}$"
)
_MOST_LOOP_PASSES = 8


def replicas_of(
    program: Any, wanted: Set[int], literals: Literals, *, alike: Set[int] = frozenset()
) -> dict[int, ReplicaGroups]:
    """For each wanted instruction that runs, by ``id``, the devices with the same result.

    Args:
        program: the compiled program, or its text.
        wanted: the ``id`` of instructions, such as its matmuls.
        literals: what devices compute from their numbers, such as offsets.
        alike: numbers of parameters that are taken to be the same on every device, so that only
            the others tell devices apart.

    Returns:
        Omits results that differ on every device; empty if the program is not partitioned.
    """
    module = literals.dataflow.module
    if module.header_int("num_partitions") == 1 or module.header_int("replica_count") > 1:
        return {}
    walk, entry = _ReplicaWalk(wanted, literals), module.entry
    given: list[Replicas] = [walk.different] * (max(entry.parameters, default=-1) + 1)
    for number, sharding in parameter_shardings(module, program).items():
        given[number] = walk.same if number in alike else walk.one(placed(sharding, walk.devices))
    walk.run(entry, given)
    return {number: held for number, held in walk.found.items() if held is not walk.different}


def parameter_shardings(module: HloModule, program: Any) -> dict[int, str]:
    """The shardings of a program's parameters in HLO syntax, by number; empty if not known."""
    known = _shardings_of(program)
    return {
        number: tiled(parameter.attribute("sharding") or "".join(known[number : number + 1]))
        for number, parameter in module.entry.parameters.items()
    }


def _shardings_of(program: Any) -> list[str]:
    if isinstance(program, str):
        return []
    if not hasattr(program, "runtime_executable"):
        return list(getattr(program, "parameter_shardings", ()))  # a dump's
    from mfu_jax.util import jax_internals  # text needs no JAX

    return jax_internals.parameter_shardings(program)


def canonical(keys: Sequence[Hashable]) -> ReplicaGroups:
    """The groups of devices with equal keys, one key for each device."""
    last = len(keys) - 1
    first = dict(zip(reversed(keys), range(last, -1, -1), strict=True))  # the first one wins
    return tuple(map(first.__getitem__, keys))


@functools.lru_cache(maxsize=256)  # many parameters share one
def placed(sharding: str, devices: int) -> ReplicaGroups:
    """Which devices hold the same shard of a parameter."""
    if sharding == "{replicated}" or sharding.startswith("{maximal"):
        return (0,) * devices
    tiles = tile_numbers(sharding, devices)
    return tuple(range(devices)) if tiles is None else canonical(list(map(tuple, tiles.tolist())))


@functools.lru_cache(maxsize=256)  # many parameters share one
def tiled(sharding: str) -> str:
    """A sharding by the axes of a mesh, as JAX 0.11 writes it, in tiles; others as they are.

    ``{mesh['a'=2,'b'=2], [{'b'}, {}]}`` is ``{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}``.
    """
    if sharding == "{mesh[], replicated}":
        return "{replicated}"
    match = _NAMED.match(sharding)
    if not match:
        return sharding
    mesh, dims, order, split = match.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    by_dim = [re.findall(r"'(\w+)'", axes) for axes in re.findall(r"\{([^}]*)\}", split)]
    used = list(itertools.chain.from_iterable(by_dim))
    if ":" in split or not sizes or not set(used) <= set(sizes):  # a part of an axis
        return sharding
    shape = ",".join(map(str, sizes.values()))
    rest = [axis for axis in sizes if axis not in used]
    try:
        ids = iota(shape, dims or shape, order)
        ids = ids.transpose([list(sizes).index(axis) for axis in (*used, *rest)])
    except ValueError:  # damaged
        return sharding
    tiles = [math.prod(sizes[axis] for axis in axes) for axes in by_dim]
    copies = math.prod(sizes[axis] for axis in rest)
    if copies == ids.size:
        return "{replicated}"
    places = ",".join(map(str, tiles + [copies] * (copies > 1)))
    listed = ",".join(map(str, ids.reshape(-1).tolist()))
    return f"{{devices=[{places}]{listed}{' last_tile_dim_replicate' * (copies > 1)}}}"


def tile_numbers(sharding: str, devices: int) -> np.ndarray | None:
    """Which tile of each dimension a device holds, [devices, dimensions]; None if not known."""
    match = _TILES.search(sharding)
    if match is None or sharding.startswith("{{") or "last_tile_dims" in sharding:
        return None
    dims, source, order, listed = match.groups()
    ids = iota(dims, source, order) if source else np.reshape(numbers(listed), numbers(dims))
    if ids.size != devices:
        return None
    tiles = np.empty((devices, ids.ndim), int)
    tiles[ids.reshape(-1)] = np.indices(ids.shape).reshape(ids.ndim, -1).T
    return tiles[:, :-1] if "last_tile_dim_replicate" in sharding else tiles


def tile_dims(sharding: str) -> tuple[int, ...]:
    """Into how many parts a sharding splits each dimension; empty if it splits none."""
    match = _TILES.search(sharding)
    return tuple(numbers(match[1])) if match else ()


# What a group of devices receives, given the values that it holds.
_RECEIVED: dict[str, Callable[[list[int]], Hashable]] = {
    "all-reduce": lambda held: tuple(sorted(held)),
    "all-gather": tuple,
    "collective-broadcast": lambda held: held[0],
    "reduce-scatter": lambda held: tuple(sorted(held)),
    "all-to-all": tuple,
}
_BY_PLACE = frozenset({"reduce-scatter", "all-to-all"})  # each device of a group gets a part of it


class _ReplicaWalk:
    """Follows values through the computations of a program."""

    def __init__(self, wanted: Set[int], literals: Literals) -> None:
        self.module = literals.dataflow.module
        self.devices = devices = self.module.header_int("num_partitions")
        self.wanted = wanted
        self.literals = literals
        # Equal groups are one object: fast to compare.
        self.kept: dict[ReplicaGroups, ReplicaGroups] = {}
        self.same = self.one(0 for _ in range(devices))
        self.different = self.one(range(devices))
        self.depth = 0  # of the calls that are being followed
        self.found: dict[int, ReplicaGroups] = {}
        self.merged: dict[tuple[int, int], ReplicaGroups] = {}  # by ``id`` of kept groups
        self.called: dict[tuple[str, tuple[int, ...]], Replicas] = {}  # by ``id`` of kept groups
        self.received: dict[tuple[str, str, int], ReplicaGroups] = {}  # by ``id`` of kept groups

    def one(self, groups: Iterable[int]) -> ReplicaGroups:
        """The one object for equal groups."""
        made = tuple(groups)
        return self.kept.setdefault(made, made)

    def run(self, computation: HloComputation, given: Sequence[Replicas]) -> Replicas:
        """The devices that hold the same result of a computation; records the wanted ones."""
        if self.depth > MAX_DEPTH:
            return self.different
        self.depth += 1
        held: dict[str, Replicas] = {}
        different, wanted = self.different, self.wanted
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "parameter" and instruction.operand_text.isdecimal():
                number = int(instruction.operand_text)
                result = given[number] if number < len(given) else different
            else:
                operands = [held.get(name, different) for name in instruction.operands]
                rule = _RULES.get(opcode) if operands or opcode in INSIDE else None
                if rule:
                    result = rule(self, instruction, operands)
                elif opcode in DIFFER_BY_DEVICE:
                    result = different
                elif len(operands) == 1 and not isinstance(operands[0], list):
                    result = operands[0]
                else:
                    result = self._whole(operands)
            if result is different:
                result = self._numbered(computation, instruction)
            held[instruction.name] = result
            if id(instruction) in wanted:
                groups = self._whole(result)
                before = self.found.get(id(instruction), groups)
                self.found[id(instruction)] = self._merge(before, groups)
        self.depth -= 1
        return held[computation.root.name]

    def _numbered(self, computation: HloComputation, instruction: HloInstruction) -> ReplicaGroups:
        """The devices with the same integer, where it follows from their numbers: an offset."""
        if instruction.opcode in DIFFER_BY_DEVICE or instruction.shape.size != 1:
            return self.different
        found = self.literals.numbers(computation, instruction)
        return self.different if found is None else self.one(canonical(found))

    def _tuple(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        return operands

    def _element(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        elements = operands[0]
        if not isinstance(elements, list):
            return elements
        index = instruction.attribute("index")
        return elements[int(index) if index.isdecimal() else 0]

    def _same_value(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        return operands[0]

    def _collective(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        received = [self._received(instruction, self._whole(held)) for held in operands]
        return received[0] if len(received) == 1 else list(received)

    def _call(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        results = [self._called(name, operands) for name in instruction.callees]
        return results[0] if len(results) == 1 else self._whole(results)

    def _called(self, name: str, operands: list[Replicas]) -> Replicas:
        """The result of a computation; cached, because passes over a loop repeat most of them."""
        computation = self.module[name]
        if list in map(type, operands):
            return self.run(computation, operands)
        key = (name, tuple(map(id, operands)))
        if key not in self.called:
            self.called[key] = self.run(computation, operands)
        return self.called[key]

    def _looped(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        state = operands[0]
        body, condition = instruction.loop_computations
        for _ in range(_MOST_LOOP_PASSES):
            again = self.run(self.module[condition], [state])
            after = self._either(state, self.run(self.module[body], [state]))
            after = self._with(after, self._whole(again))
            if after == state:
                return state
            state = after
        self.run(self.module[body], [self.different])
        return self.different

    def _chosen(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        branches = zip(instruction.callees, operands[1:], strict=False)
        results = [self.run(self.module[name], [given]) for name, given in branches]
        if not results:
            return self.different
        return self._with(functools.reduce(self._either, results), self._whole(operands[0]))

    def _received(self, instruction: HloInstruction, held: ReplicaGroups) -> ReplicaGroups:
        kind, text = instruction.opcode.removesuffix("-start"), groups_text(instruction)
        key = kind, text, id(held)
        if key not in self.received:
            self.received[key] = self.one(self._exchanged(kind, text, held))
        return self.received[key]

    def _exchanged(self, kind: str, text: str, held: ReplicaGroups) -> ReplicaGroups:
        groups = replica_groups(text, self.devices)
        if groups is None:
            return self.different
        if len(groups) == 1:  # of all devices
            return self.different if kind in _BY_PLACE else self.same
        keys: list[Hashable] = [None] * self.devices
        numbers: dict[Hashable, int] = {}  # replace values as long as a group
        for group in groups:
            value = _RECEIVED[kind]([held[device] for device in group])
            number = numbers.setdefault(value, len(numbers))
            for place, device in enumerate(group):
                keys[device] = (number, place) if kind in _BY_PLACE else number
        return canonical(keys)

    def _permuted(self, instruction: HloInstruction, operands: list[Replicas]) -> Replicas:
        held = self._whole(operands)
        keys: list[Hashable] = [None] * self.devices  # devices that receive nothing hold zeros
        for source, target in device_pairs(instruction):
            keys[target] = held[source]
        return self.one(canonical(keys))

    def _whole(self, held: Replicas) -> ReplicaGroups:
        """The devices on which all elements of a value are the same."""
        if not isinstance(held, list):
            return held
        whole = self.same
        for element in held:
            if element is self.different:
                return element
            if element is not whole:  # fast where all are the same
                whole = self._merge(whole, self._whole(element))
        return whole

    def _either(self, a: Replicas, b: Replicas) -> Replicas:
        """A value that may be either of two."""
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return [self._either(x, y) for x, y in zip(a, b, strict=True)]
        return self._merge(self._whole(a), self._whole(b))

    def _with(self, held: Replicas, choice: ReplicaGroups) -> Replicas:
        """A value that depends on a choice."""
        if choice is self.same:
            return held
        if isinstance(held, list):
            return [self._with(element, choice) for element in held]
        return self._merge(held, choice)

    def _merge(self, a: ReplicaGroups, b: ReplicaGroups) -> ReplicaGroups:
        if a is b or b is self.same:
            return a
        if a is self.same:
            return b
        if a is self.different or b is self.different:
            return self.different
        key = (id(a), id(b))
        if key not in self.merged:
            self.merged[key] = self.one(canonical(list(zip(a, b, strict=True))))
        return self.merged[key]


# Every other instruction mixes its operands.
_ReplicaRule = Callable[[_ReplicaWalk, HloInstruction, list[Replicas]], Replicas]
_RULES: dict[str, _ReplicaRule] = {
    "tuple": _ReplicaWalk._tuple,
    "get-tuple-element": _ReplicaWalk._element,
    **dict.fromkeys(
        ("copy", "bitcast", "opt-barrier", "optimization-barrier"), _ReplicaWalk._same_value
    ),
    **dict.fromkeys(
        ("all-gather-done", "all-reduce-done", "fusion-done"), _ReplicaWalk._same_value
    ),
    **dict.fromkeys(
        (k + start for k in _RECEIVED for start in ("", "-start")), _ReplicaWalk._collective
    ),
    **dict.fromkeys(("collective-permute", "collective-permute-start"), _ReplicaWalk._permuted),
    **dict.fromkeys(INSIDE, _ReplicaWalk._call),
    "while": _ReplicaWalk._looped,
    "conditional": _ReplicaWalk._chosen,
}
