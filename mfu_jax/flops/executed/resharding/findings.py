"""Finds tensors that the partitioner replicates, or moves from one sharding to another and back.

A healthy program has collectives, too: gathered weights (FSDP), sums of partial products and
gathered sequences (tensor and sequence parallelism), gathered keys (context parallelism), and
whatever a `shard_map` asks for. So a collective is reported for what becomes of its result:

- gathered, and then each device takes a slice of it, or all of the group compute the same;
- gathered along a stack of which a loop reads one slice at a time;
- a batch that told devices apart before it, and no longer does in the matmuls after it;
- moved for an elementwise operation whose other operand is sharded differently;
- moved, used elementwise, and moved back;
- moved to another order of the devices, or across the borders of a ``split``.

Beside these: optimizer state that is replicated while the weights are sharded, and a batch that is
replicated although that makes devices repeat each other's matmuls.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mfu_jax.flops.executed.attribution.replication import (
    ReplicaGroups,
    parameter_shardings,
    placed,
    replicas_of,
    tile_dims,
)
from mfu_jax.flops.executed.attribution.sums import MODEL_PHASES, FoundMatmul
from mfu_jax.flops.executed.costs.collectives import KINDS, is_further_link, read_collective
from mfu_jax.flops.executed.costs.literals import Literals, numbers_by_device
from mfu_jax.flops.executed.counting import ProgramCounter
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.replica_groups import device_pairs, groups_text, replica_groups
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.uses import RESULT, Use, Value, followed, sources
from mfu_jax.flops.executed.mesh_axes import axes_between
from mfu_jax.flops.executed.resharding.resharded_tensor import Kind, ReshardedTensor
from mfu_jax.flops.executed.resharding.source_lines import SourceLines
from mfu_jax.flops.executed.resharding.specs import (
    Axes,
    Merged,
    Spec,
    Specs,
    words,
)
from mfu_jax.flops.scopes import Scope, read_scope
from mfu_jax.util.failsafe import Boundary, failsafe

_LEAST_SHARE = 0.05  # of the bytes that all collectives of a step move
_LEAST_PART = 0.005  # of them, for one of several collectives of a line
_LEAST_REPEATED = 0.2  # of the FLOPs of the forward and backward matmuls
_LAYOUT = frozenset(
    "bitcast copy reshape transpose convert concatenate slice opt-barrier optimization-barrier "
    "reduce-precision bitcast-convert copy-start".split()
)
_PLACES = frozenset({"parameter", "fusion", "get-tuple-element", "tuple"})
_UNCHANGED = _LAYOUT | _PLACES | {"all-gather", "all-gather-start", "all-gather-done"}
_NUMBERS = ("broadcast", "constant", "iota")
_MATMULS = ("dot", "convolution")
_ELEMENTWISE = ELEMENTWISE | TRANSCENDENTAL
_SHARD_MAP = "shard_map"
_SUMS = re.compile(r"/(dot_general|conv_general_dilated|reduce\w*|add_any|psum\w*)$")


_Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Exchange:
    """A collective of the program, outside `shard_map`s."""

    computation: HloComputation
    instruction: HloInstruction
    kind: str
    groups: _Groups
    bytes_moved: int


def resharded_tensors(
    counter: ProgramCounter, mesh: Mapping[str, int]
) -> tuple[ReshardedTensor, ...]:
    """The tensors of a program that are resharded or replicated without need, largest first.

    Nothing, and a warning, if they cannot be found: no count or plan waits for this advice.

    Args:
        counter: of the program.
        mesh: axis → size, in device order; empty if unknown.
    """
    devices = counter.module.header_int("num_partitions")
    if devices < 2 or counter.module.header_int("replica_count") > 1:
        return ()
    with failsafe("whether tensors are resharded is not known", Boundary()):
        return _Doctor(counter, mesh, devices).findings()
    return ()


class _Doctor:
    """Examines one program."""

    def __init__(self, counter: ProgramCounter, mesh: Mapping[str, int], devices: int) -> None:
        self.counter = counter
        self.module: HloModule = counter.module
        self.mesh = mesh
        self.devices = devices
        self.literals = Literals(counter.reader.dataflow, lambda: None)
        self.total = 0  # bytes that all collectives move
        self._slices: dict[str, Use] = {}  # by the name of what gathers before it
        self.exchanges = list(self._exchanges())
        self.ids = {
            id(instruction)
            for name in counter.order
            for instruction in self.module[name].instructions.values()
        }

    def findings(self) -> tuple[ReshardedTensor, ...]:
        found = [self._finding(e, "lost batch") for e in self._lost_batch()]
        lost = {name for finding in found for name in finding.instructions}
        for exchange in self.exchanges:
            if exchange.instruction.name in lost:
                continue
            if exchange.bytes_moved < _LEAST_PART * self.total:
                continue
            if kind := self._cause(exchange):
                found.append(self._finding(exchange, kind))
        merged = [
            finding
            for finding in _merged(found)
            if finding.kind == "lost batch" or finding.bytes_moved >= _LEAST_SHARE * self.total
        ]
        merged += self._state()
        return tuple(sorted(merged or self._repeated(), key=lambda f: -f.bytes_moved))

    # Collectives

    def _exchanges(self) -> Iterator[_Exchange]:
        for name in self.counter.order:
            runs, computation = self.counter.runs.times[name], self.module[name]
            for instruction in computation.instructions.values() if runs else ():
                kind = instruction.opcode.removesuffix("-start")
                if kind not in KINDS or is_further_link(computation, instruction):
                    continue
                found = read_collective(self.module, computation, instruction, "")
                moved = math.ceil(found.bytes * runs)
                self.total += moved
                if _SHARD_MAP not in instruction.op_name:
                    groups = device_pairs(instruction) or _groups_of(instruction, self.devices)
                    yield _Exchange(computation, instruction, found.kind, groups, moved)

    def _cause(self, exchange: _Exchange) -> Kind | Literal[""]:
        if exchange.kind == "all-gather":
            return self._of_gathered(exchange)
        if exchange.kind == "all-to-all":
            return self._of_moved(exchange)
        if exchange.kind == "collective-permute":
            return self._of_permuted(exchange)
        return ""

    def _of_gathered(self, exchange: _Exchange) -> Kind | Literal[""]:
        """What becomes of a gathered value, if nothing needs it whole."""
        if "chain_id" in exchange.instruction.attribute_text:
            return ""  # spread over fusions, under a matmul: where it ends is not followed
        ends: set[str] = set()
        value = Value(exchange.computation, exchange.instruction)

        def passes(use: Use) -> bool:
            end = self._end(use, exchange)
            if end:
                ends.add(end)
            if end == "slice":
                self._slices.setdefault(exchange.instruction.name, use)
            return not end

        for use in followed(self.module, value, passes):
            if use.operand < 0 and not self._is_kept_whole(use, exchange.groups):
                ends.add(RESULT)
        if "mixed" in ends:
            return ""
        if "slice" in ends:
            return "full rematerialization"
        if "stack" in ends:
            return "gathered stack"
        return "replicated work" if ends else ""

    def _end(self, use: Use, exchange: _Exchange) -> str:
        """How a use of a gathered value ends its way; empty if the result is as replicated."""
        user, opcode = use.user, use.user.opcode
        if opcode in _LAYOUT or opcode.endswith("-done"):
            return ""
        if opcode == "dynamic-slice" and use.operand == 0:
            offsets = [use.computation[name] for name in user.operands[1:]]
            differing = [o for o in offsets if not _is_same(self._held(o), exchange.groups)]
            if differing:
                varies = any(self._varies(use.computation, o, exchange.groups) for o in differing)
                return "slice" if varies else "mixed"
            return "stack" if _slices_gathered(use, exchange) else ""
        if opcode == "conditional":
            return "mixed"
        return "" if _is_same(self._held(user), exchange.groups) else "mixed"

    def _varies(self, computation: HloComputation, offset: HloInstruction, groups: _Groups) -> bool:
        """Whether an offset is known to differ within a group: a slice along what was gathered."""
        numbers = numbers_by_device(self.literals, computation, offset)
        return numbers is not None and not _is_same(numbers, groups)

    def _of_moved(self, exchange: _Exchange) -> Kind | Literal[""]:
        """Why an all-to-all is not needed; empty if a matmul, or something unknown, uses it."""
        instruction = exchange.instruction
        moved_back = False

        def passes(use: Use) -> bool:
            nonlocal moved_back
            opcode = use.user.opcode
            if opcode in _LAYOUT or opcode in _ELEMENTWISE or opcode.endswith("-done"):
                return True
            if opcode == "all-to-all":
                moved_back = moved_back or _groups_of(use.user, self.devices) == exchange.groups
            return False

        for use in followed(self.module, Value(exchange.computation, instruction), passes):
            is_same = use.user.op_name == instruction.op_name
            if is_same and use.user.opcode in _ELEMENTWISE and self._has_other(use):
                return "moved for one operation"
        return "there and back" if moved_back else ""

    def _has_other(self, use: Use) -> bool:
        """Whether an elementwise use has another operand that is not one broadcast number."""
        names = [name for i, name in enumerate(use.user.operands) if i != use.operand]
        others = [Value(use.computation, use.computation[name]) for name in names]
        made = [self._made_of(other, _LAYOUT | _PLACES) for other in others]
        return not all(any(v.instruction.opcode in _NUMBERS for v in values) for values in made)

    def _of_permuted(self, exchange: _Exchange) -> Kind | Literal[""]:
        pairs = exchange.groups
        stay = sum(source == target for source, target in pairs)
        if stay and stay < len(pairs) == self.devices:
            return "device order"
        op_name = exchange.instruction.op_name
        if _primitive(op_name) == "split" and "roll" not in op_name:
            return "split across shards"
        return ""

    # Batches

    @functools.cached_property
    def _batch(self) -> tuple[int, ...]:
        """For each device, a number of the part of the step's data that it has."""
        groups = [self._placed(number) for number in self.module.entry.parameters]
        data = [
            g
            for n, g in zip(self.module.entry.parameters, groups, strict=True)
            if n not in self._state_numbers
        ]
        keys = list(zip(*data, strict=True)) if data else [()] * self.devices
        return tuple(keys.index(key) for key in keys)

    def _lost_batch(self) -> list[_Exchange]:
        """The exchanges after which the batch no longer tells devices apart."""
        parts = len(set(self._batch))
        if parts == 1 or not self._state_numbers:
            return []
        held = replicas_of(
            self.module, self.counter.program, self.ids, self.literals, alike=self._state_numbers
        )

        def is_lost(instruction: HloInstruction) -> bool:
            groups = held.get(id(instruction))
            return groups is not None and len(set(groups)) < parts

        blamed: dict[int, _Exchange] = {}
        exchanges = {id(e.instruction): e for e in self.exchanges}

        def stops(value: Value) -> bool:
            exchange = exchanges.get(id(value.instruction))
            return exchange is not None and not (
                exchange.kind in ("all-reduce", "reduce-scatter")
                and _SUMS.search(exchange.instruction.op_name.partition(":")[0])
            )

        matmuls = [m for m, scope in self._matmuls if scope.phase == "forward"]
        for matmul in matmuls:
            if not is_lost(matmul.matmul.instruction):
                continue
            start = Value(matmul.computation, matmul.matmul.instruction)
            for value in sources(self.module, start, stops):
                exchange = exchanges.get(id(value.instruction))
                if exchange is None or not stops(value):
                    continue
                operands = [value.computation[n] for n in value.instruction.operands]
                crosses = any(len({self._batch[d] for d in g}) > 1 for g in exchange.groups)
                kept = exchange.kind == "all-to-all" or is_lost(exchange.instruction)
                if crosses and kept and not any(map(is_lost, operands)):
                    blamed[id(exchange.instruction)] = exchange
            if blamed:
                break
        return list(blamed.values())

    def _repeated(self) -> Iterator[ReshardedTensor]:
        """A batch that is replicated, where devices repeat much of the matmuls for it."""
        repeated: Counter[int] = Counter()
        found = {id(m.matmul.instruction): m for m, _ in self._matmuls}
        for number, matmul in found.items():
            groups = self._held(matmul.matmul.instruction)
            if _SHARD_MAP not in matmul.op_name:
                copies = 1 - len(set(groups)) / self.devices
                repeated[number] = int(matmul.matmul.flops * matmul.runs * copies)
        whole = sum(m.matmul.flops * m.runs for m in found.values())
        if not whole or sum(repeated.values()) < _LEAST_REPEATED * whole:
            return
        largest = found[repeated.most_common(1)[0][0]]
        instruction = largest.matmul.instruction
        start = Value(largest.computation, instruction)
        for value in sources(self.module, start, lambda _: False):
            parameter = value.instruction
            if not self._is_argument(value):
                continue
            number = int(parameter.operand_text)
            if number in self._state_numbers or len(set(self._placed(number))) > 1:
                continue
            held = self._held(instruction)
            alike = [[d for d, h in enumerate(held) if h == one] for one in sorted(set(held))]
            yield self._described(
                parameter, instruction, "replicated batch", groups=alike, detail=f"{len(alike[0])}"
            )
            return

    # State

    def _state(self) -> Iterator[ReshardedTensor]:
        """Optimizer state that is kept whole although the weights are sharded."""
        entry = self.module.entry
        by_leaf: dict[tuple[str, str], list[int]] = {}
        shards = {n: len(set(self._placed(n))) for n in self._state_numbers}
        for number in self._state_numbers:
            parameter = entry.parameters[number]
            leaf = parameter.op_name.rpartition("[")[2]
            elements = parameter.shape.size * self._tiles(number)
            by_leaf.setdefault((leaf, str(elements)), []).append(number)
        whole = sum(p.shape.bytes for p in entry.parameters.values())
        for numbers in by_leaf.values():
            most = max(shards[n] for n in numbers)
            for number in numbers:
                parameter = entry.parameters[number]
                if shards[number] == most or parameter.shape.bytes < _LEAST_SHARE * whole:
                    continue
                uses = followed(
                    self.module,
                    Value(entry, parameter),
                    lambda use: use.user.opcode not in _MATMULS,
                )
                if any(use.user.opcode in _MATMULS for use in uses):
                    continue
                like = next(n for n in numbers if shards[n] == most)
                name = entry.parameters[like].op_name
                yield self._described(parameter, parameter, "replicated state", detail=name)

    @functools.cached_property
    def _state_numbers(self) -> frozenset[int]:
        """Parameters that the program returns in the same form: weights, moments."""
        entry = self.module.entry
        returned = set(entry.root.shape.leaves())
        return frozenset(
            number
            for number, parameter in entry.parameters.items()
            if any(self._may_be(shape, number) for shape in returned)
        )

    def _may_be(self, shape: Shape, number: int) -> bool:
        """Whether an array is of a parameter's whole array, or a shard of it."""
        local = self.module.entry.parameters[number].shape
        if (shape.dtype, len(shape.dims)) != (local.dtype, len(local.dims)):
            return False
        if shape.dims == local.dims:
            return True
        whole = local.size * self._tiles(number)
        split = zip(shape.dims, self._whole(number), strict=True)
        return all(n and size % n == 0 for n, size in split) and whole <= shape.size * self.devices

    def _whole(self, number: int) -> tuple[int, ...]:
        """The dimensions of a parameter on all devices together."""
        dims = self.module.entry.parameters[number].shape.dims
        tiles = tile_dims(self._shardings[number])
        return tuple(n * t for n, t in zip(dims, tiles, strict=False)) if tiles else dims

    def _is_kept_whole(self, use: Use, groups: _Groups) -> bool:
        """Whether a result is state that the user replicates, such as weights (ZeRO-1)."""
        shape = use.user.shape
        for index in use.path:
            shape = shape.elements[index]
        taken = self.module.entry.parameters
        return any(
            (taken[n].shape.dtype, taken[n].shape.dims) == (shape.dtype, shape.dims)
            and _is_same(self._placed(n), groups)
            for n in self._state_numbers
        )

    # Helpers

    @functools.cached_property
    def _matmuls(self) -> list[tuple[FoundMatmul, Scope]]:
        found = [(m, s) for m, s in self.counter.matmuls() if s.phase in MODEL_PHASES]
        differentiated = [pair for pair in found if "jvp(" in pair[0].op_name]
        return differentiated or found

    @functools.cached_property
    def _all_held(self) -> dict[int, ReplicaGroups]:
        return replicas_of(self.module, self.counter.program, self.ids, self.literals)

    def _held(self, instruction: HloInstruction) -> ReplicaGroups:
        return self._all_held.get(id(instruction)) or tuple(range(self.devices))

    @functools.cached_property
    def _shardings(self) -> dict[int, str]:
        return parameter_shardings(self.module, self.counter.program)

    def _placed(self, number: int) -> ReplicaGroups:
        return placed(self._shardings[number], self.devices)

    def _tiles(self, number: int) -> int:
        return len(set(self._placed(number)))

    @functools.cached_property
    def _specs(self) -> Specs:
        return Specs(self.module, self._shardings, self.mesh, self.devices, self.literals)

    def _made_of(self, value: Value, passed: frozenset[str]) -> list[Value]:
        """What a value is made of: operations beyond those of `passed`, or arguments."""

        def stops(value: Value) -> bool:
            return self._is_argument(value) or value.instruction.opcode not in passed

        if stops(value):
            return [value]
        return list(filter(stops, sources(self.module, value, stops)))

    def _is_argument(self, value: Value) -> bool:
        is_of_entry = value.computation is self.module.entry
        return is_of_entry and value.instruction.opcode == "parameter"

    def _origin(self, exchange: _Exchange) -> tuple[Value, bool]:
        """The value that an exchange moves a part of; whether it is an argument of the program."""
        operand = exchange.computation.operand(exchange.instruction, 0)
        start = Value(exchange.computation, operand)
        made = self._made_of(start, _UNCHANGED) or [start]
        return made[0], len(made) == 1 and self._is_argument(made[0])

    def _before(self, exchange: _Exchange) -> tuple[tuple[int, ...], Spec | None]:
        """Dimensions on one device, and the split, of the value that is moved."""
        value, _ = self._origin(exchange)
        dims, spec = next(value.instruction.shape.leaves()).dims, self._specs.of(value)
        moved = exchange.computation.operand(exchange.instruction, 0).shape.dims
        if exchange.kind == "all-gather" and self.mesh and moved == dims:
            found = list(spec or (None,) * len(dims))
            for dim in exchange.instruction.integers("dimensions"):
                found[dim] = found[dim] or tuple(
                    axes_between(exchange.groups, self.mesh).split("+")
                )
            spec = tuple(found)
        return dims, spec if exchange.kind in ("all-gather", "all-to-all") else None

    def _after(self, exchange: _Exchange) -> Spec | None:
        """How the value is split that comes of an exchange, and of the slice behind a gather."""
        if use := self._slices.get(exchange.instruction.name):
            return self._specs.of(Value(use.computation, use.user))
        value = Value(exchange.computation, exchange.instruction)
        if exchange.kind != "all-to-all":
            return None if exchange.kind == "collective-permute" else self._specs.of(value)
        uses = followed(self.module, value, lambda u: u.user.opcode in _LAYOUT)
        use = next((u for u in uses if u.user.opcode not in _LAYOUT and u.operand >= 0), None)
        before, spec = self._before(exchange)
        after = use.computation.operand(use.user, use.operand).shape.dims if use else ()
        if spec is None or len(after) != len(before):
            return None
        moved = tuple(axes_between(exchange.groups, self.mesh).split("+"))
        found: list[Axes | Merged | None] = []
        for axes, n, m in zip(spec, before, after, strict=True):
            if axes is None or isinstance(axes, Merged):
                found.append(axes if n <= m else None)
                continue
            kept = tuple(axis for axis in axes if axis not in moved)
            found.append((*kept, *moved) if n > m else kept)
        return tuple(found)

    @functools.cached_property
    def _lines(self) -> SourceLines:
        program = self.counter.program
        return SourceLines(program if isinstance(program, str) else program.as_text() or "")

    def _finding(self, exchange: _Exchange, kind: Kind) -> ReshardedTensor:
        value, is_argument = self._origin(exchange)
        tensor = value.instruction if is_argument else exchange.instruction
        return self._described(tensor, exchange.instruction, kind, exchange)

    def _described(
        self,
        tensor: HloInstruction,
        instruction: HloInstruction,
        kind: Kind,
        exchange: _Exchange | None = None,
        groups: _Groups = (),
        detail: str = "",
    ) -> ReshardedTensor:
        file, line = self._lines.of(instruction)
        is_argument = tensor.opcode == "parameter"
        before = self._before(exchange)[1] if exchange else None
        if is_argument:
            before = self._specs.of(Value(self.module.entry, tensor))
        return ReshardedTensor(
            kind=kind,
            tensor=tensor.op_name if is_argument else _operation(instruction.op_name),
            file=file,
            line=line,
            axes=axes_between(exchange.groups if exchange else groups, self.mesh),
            before=words(before),
            after=words(self._after(exchange)) if exchange else "",
            shape=str(next(tensor.shape.leaves())),
            bytes_moved=exchange.bytes_moved if exchange else 0,
            instructions=(instruction.name,) if exchange else (),
            detail=detail,
        )


def _slices_gathered(use: Use, exchange: _Exchange) -> bool:
    """Whether a slice in a loop reads a small part of the dimension that was gathered."""
    whole = use.computation.operand(use.user, 0).shape.dims
    gathered = exchange.instruction.integers("dimensions")
    if whole != exchange.instruction.shape.dims or len(gathered) != 1:
        return False
    return use.user.shape.dims[gathered[0]] * len(exchange.groups[0]) <= whole[gathered[0]]


def _groups_of(instruction: HloInstruction, devices: int) -> _Groups:
    return replica_groups(groups_text(instruction), devices) or ()


def _is_same(held: ReplicaGroups, groups: _Groups) -> bool:
    """Whether the devices of each group hold the same value."""
    return all(len({held[device] for device in group}) == 1 for group in groups)


def _primitive(op_name: str) -> str:
    return op_name.partition(";")[0].rpartition("/")[2]


def _operation(op_name: str) -> str:
    """Scope and operation of an op_name."""
    first = op_name.partition(";")[0]
    scope = read_scope(first)
    return " ".join(part for part in (scope.path, _primitive(first)) if part)


def _merged(found: Iterable[ReshardedTensor]) -> list[ReshardedTensor]:
    """One finding for each line, described by its first: the others are of the same operation."""
    merged: dict[tuple[str, int, str], ReshardedTensor] = {}
    for finding in sorted(found, key=lambda f: -f.bytes_moved):
        key = (finding.file, finding.line, "" if finding.line else finding.tensor)
        first = merged.get(key)
        merged[key] = (
            finding
            if first is None
            else replace(
                first,
                bytes_moved=first.bytes_moved + finding.bytes_moved,
                instructions=first.instructions + finding.instructions,
            )
        )
    return list(merged.values())
