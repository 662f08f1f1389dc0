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
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mfu_jax.flops.executed.attribution.replication import (
    ReplicaGroups,
    canonical,
    parameter_shardings,
    placed,
    replicas_of,
    tile_dims,
)
from mfu_jax.flops.executed.attribution.sums import MODEL_PHASES, FoundMatmul
from mfu_jax.flops.executed.costs.collectives import KINDS, is_further_link, read_collective
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.counting import ProgramCounter
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.replica_groups import device_pairs, groups_text, replica_groups
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.uses import RESULT, Use, Value, followed, sources
from mfu_jax.flops.executed.mesh_axes import axes_between
from mfu_jax.flops.executed.resharding.resharded_tensor import (
    Kind,
    ReshardedTensor,
    SourceLines,
)
from mfu_jax.flops.executed.resharding.specs import Axes, Merged, Spec, Specs, words
from mfu_jax.flops.scopes import Scope, read_scope
from mfu_jax.util.failsafe import Boundary, failsafe

_LEAST_SHARE = 0.05  # of the bytes that all collectives of a step move
_LEAST_PART = 0.005  # of them, for one of several collectives of a line
_NEAREST = 100  # uses of an exchange without a line, among which one with a line is looked for
_LEAST_REPEATED = 0.2  # of the FLOPs of the forward and backward matmuls
_LAYOUT = frozenset(
    "bitcast copy reshape transpose convert concatenate slice opt-barrier optimization-barrier "
    "reduce-precision bitcast-convert copy-start".split()
)
_PLACES = frozenset("parameter fusion fusion-start fusion-done get-tuple-element tuple".split())
_UNCHANGED = _LAYOUT | _PLACES | {"all-gather", "all-gather-start", "all-gather-done"}
_NUMBERS = ("broadcast", "constant", "iota")
_ELEMENTWISE = ELEMENTWISE | TRANSCENDENTAL
_SHARD_MAP = "shard_map"
_SUMS = re.compile(r"/(dot_general|conv_general_dilated|reduce\w*|add_any|psum\w*)$")

_Cause = Kind | Literal[""]
# How the uses of a gathered value end, and what that means; the first one decides.
_ENDS: Mapping[str, _Cause] = {
    "mixed": "",
    "slice": "full rematerialization",
    "stack": "gathered stack",
    RESULT: "replicated work",
}
_Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Exchange:
    """A collective of the program, outside `shard_map`s; of a combined one, one array's part.

    Attributes:
        computation: where it is.
        instruction: the collective.
        operand: the array that it moves.
        received: what devices receive of it: the collective, its end, or an element of either.
        kind: of the collective.
        groups: of devices, or pairs of them.
        bytes_moved: in one step, on one device.
    """

    computation: HloComputation
    instruction: HloInstruction
    operand: HloInstruction
    received: HloInstruction
    kind: str
    groups: _Groups
    bytes_moved: int

    @property
    def result(self) -> Value:
        """What devices receive."""
        return Value(self.computation, self.received)

    @property
    def is_sum(self) -> bool:
        """Whether it adds up what a matmul or a sum leaves on each device."""
        first = self.received.op_name.partition(":")[0]
        return self.kind in ("all-reduce", "reduce-scatter") and bool(_SUMS.search(first))


class _Argument(NamedTuple):
    """An argument of the program.

    Attributes:
        parameter: its parameter.
        held: for each device, the first one that holds the same shard.
        dims: dimensions on all devices together.
    """

    parameter: HloInstruction
    held: ReplicaGroups
    dims: tuple[int, ...]

    @property
    def shards(self) -> int:
        """How many different ones there are."""
        return len(set(self.held))

    def may_be(self, shape: Shape) -> bool:
        """Whether an array is the whole one, or a shard of it."""
        local = self.parameter.shape
        if (shape.dtype, len(shape.dims)) != (local.dtype, len(local.dims)):
            return False
        is_split = all(n and size % n == 0 for n, size in zip(shape.dims, self.dims, strict=True))
        is_large = local.size * self.shards <= shape.size * len(self.held)
        return shape.dims == local.dims or (is_split and is_large)


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
        self.literals = Literals(counter.reader.dataflow)
        self.total = 0  # bytes that all collectives move
        self._slices: dict[str, Use] = {}  # by the name of what gathers before it
        self.exchanges = {id(e.received): e for e in self._exchanges()}
        shardings = parameter_shardings(self.module, counter.program)
        self.specs = Specs(shardings, mesh, self.literals)
        self.arguments = {
            number: self._argument(parameter, shardings[number])
            for number, parameter in sorted(self.module.entry.parameters.items())
        }
        returned = set(self.module.entry.root.shape.leaves())
        self.state = {  # what the program returns in the same form: weights, moments
            number: argument
            for number, argument in self.arguments.items()
            if any(map(argument.may_be, returned))
        }

    def findings(self) -> tuple[ReshardedTensor, ...]:
        lost = self._lost_batch()
        causes: list[tuple[_Exchange, _Cause]] = [(exchange, "lost batch") for exchange in lost]
        causes += [
            (exchange, self._cause(exchange))
            for exchange in self.exchanges.values()
            if exchange not in lost and exchange.bytes_moved >= _LEAST_PART * self.total
        ]
        found = _merged(self._finding(exchange, kind) for exchange, kind in causes if kind)
        large = [
            finding
            for finding in found
            if finding.kind == "lost batch" or finding.bytes_moved >= _LEAST_SHARE * self.total
        ]
        large += self._replicated_state()
        return tuple(sorted(large or self._repeated(), key=lambda f: -f.bytes_moved))

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
                groups = device_pairs(instruction) or self._groups(instruction)
                parts = _parts(computation, instruction)
                whole = sum(operand.shape.bytes for operand, _ in parts)
                for operand, received in parts:
                    if _SHARD_MAP not in received.op_name:
                        part = math.ceil(moved * operand.shape.bytes / whole) if whole else 0
                        yield _Exchange(
                            computation, instruction, operand, received, found.kind, groups, part
                        )

    def _groups(self, instruction: HloInstruction) -> _Groups:
        return replica_groups(groups_text(instruction), self.devices) or ()

    def _cause(self, exchange: _Exchange) -> _Cause:
        if exchange.kind == "all-gather":
            return self._of_gathered(exchange)
        if exchange.kind == "all-to-all":
            return self._of_moved(exchange)
        if exchange.kind == "collective-permute":
            return self._of_permuted(exchange)
        return ""

    def _of_gathered(self, exchange: _Exchange) -> _Cause:
        """What becomes of a gathered value, if nothing needs it whole."""
        if "chain_id" in exchange.instruction.attribute_text:
            return ""  # spread over fusions, under a matmul: where it ends is not followed
        ends = set()
        for use in followed(self.module, exchange.result, lambda use: not self._end(use, exchange)):
            ends.add(end := self._end(use, exchange))
            if end == "slice":
                self._slices.setdefault(exchange.received.name, use)
        return next((cause for end, cause in _ENDS.items() if end in ends), "")

    def _end(self, use: Use, exchange: _Exchange) -> str:
        """How a use of a gathered value ends its way; empty if the result is as replicated."""
        user, opcode, groups = use.user, use.user.opcode, exchange.groups
        if use.operand < 0:
            return "" if self._is_kept_whole(use, groups) else RESULT
        if opcode in _LAYOUT or opcode.endswith("-done"):
            return ""
        if opcode == "dynamic-slice" and use.operand == 0:
            offsets = [use.computation[name] for name in user.operands[1:]]
            differing = [o for o in offsets if not _is_same(self._held(o), groups)]
            numbers = [self.literals.numbers(use.computation, o) for o in differing]
            if differing:  # known to, it is a slice along what was gathered
                return "slice" if any(n and not _is_same(n, groups) for n in numbers) else "mixed"
            return "stack" if _slices_gathered(use, exchange) and self._is_in_loop(use) else ""
        is_same = opcode != "conditional" and _is_same(self._held(user), groups)
        return "" if is_same else "mixed"

    def _is_in_loop(self, use: Use) -> bool:
        callers, name = [], use.computation.name
        while caller := self.module.caller(name):
            callers.append(caller[1].opcode)
            name = caller[0].name
        return "while" in callers

    def _of_moved(self, exchange: _Exchange) -> _Cause:
        """Why an all-to-all is not needed; empty if a matmul, or something unknown, uses it."""
        moved_back = False
        for use in followed(self.module, exchange.result, _keeps_places):
            opcode = use.user.opcode
            is_same = use.user.op_name == exchange.received.op_name
            if is_same and opcode in _ELEMENTWISE and self._has_other(use):
                return "moved for one operation"
            if use.operand >= 0 and opcode == "all-to-all":
                moved_back |= self._groups(use.user) == exchange.groups
        return "there and back" if moved_back else ""

    def _has_other(self, use: Use) -> bool:
        """Whether an elementwise use has another operand that is not one broadcast number."""
        names = [name for i, name in enumerate(use.user.operands) if i != use.operand]
        others = [Value(use.computation, use.computation[name]) for name in names]
        made = [self._made_of(other, _LAYOUT | _PLACES) for other in others]
        return not all(any(v.instruction.opcode in _NUMBERS for v in values) for values in made)

    def _of_permuted(self, exchange: _Exchange) -> _Cause:
        pairs, op_name = exchange.groups, exchange.received.op_name
        stay = sum(source == target for source, target in pairs)
        if stay and stay < len(pairs) == self.devices:
            return "device order"
        is_split = _primitive(op_name) == "split" and "roll" not in op_name
        return "split across shards" if is_split else ""

    # Batches

    @functools.cached_property
    def _batch(self) -> ReplicaGroups:
        """For each device, the first one with the same part of the step's data."""
        data = [argument.held for n, argument in self.arguments.items() if n not in self.state]
        return canonical(list(zip(*data, strict=True)) or [()] * self.devices)

    def _lost_batch(self) -> list[_Exchange]:
        """The exchanges after which the batch no longer tells devices apart."""
        parts = len(set(self._batch))
        trains = any(scope.phase == "backward" for _, scope in self._matmuls)
        if parts == 1 or not (self.state and trains):  # else what is returned is no state
            return []
        held = self._replicas(self.state.keys())

        def is_lost(instruction: HloInstruction) -> bool:
            return len(set(held.get(id(instruction), range(self.devices)))) < parts

        def is_blamed(exchange: _Exchange) -> bool:
            crosses = any(len({self._batch[d] for d in group}) > 1 for group in exchange.groups)
            kept = exchange.kind == "all-to-all" or is_lost(exchange.received)
            return crosses and kept and not is_lost(exchange.operand)

        moves = {number: e for number, e in self.exchanges.items() if not e.is_sum}
        for matmul, scope in self._matmuls:
            start = Value(matmul.computation, matmul.matmul.instruction)
            if scope.phase != "forward" or not is_lost(start.instruction):
                continue
            made_of = sources(self.module, start, lambda value: id(value.instruction) in moves)
            met = dict.fromkeys(id(value.instruction) for value in made_of)
            if blamed := [moves[n] for n in met if n in moves and is_blamed(moves[n])]:
                return blamed
        return []

    def _repeated(self) -> Iterator[ReshardedTensor]:
        """A batch that is replicated, where devices repeat much of the matmuls for it."""
        found = {id(m.matmul.instruction): m for m, _ in self._matmuls}
        repeated = {
            number: int(m.matmul.flops * m.runs * (1 - len(set(held)) / self.devices))
            for number, m in found.items()
            if _SHARD_MAP not in m.op_name and (held := self._held(m.matmul.instruction))
        }
        whole = sum(m.matmul.flops * m.runs for m in found.values())
        if not whole or sum(repeated.values()) < _LEAST_REPEATED * whole:
            return
        largest = found[max(repeated, key=repeated.__getitem__)]
        instruction = largest.matmul.instruction
        held = self._held(instruction)
        alike = [[d for d, h in enumerate(held) if h == one] for one in sorted(set(held))]
        for value in sources(self.module, Value(largest.computation, instruction), lambda _: False):
            number = int(value.instruction.operand_text) if self._is_argument(value) else -1
            if number < 0 or number in self.state or self.arguments[number].shards > 1:
                continue
            axes, detail = axes_between(alike, self.mesh), f"{len(alike[0])}"
            yield self._described(
                "replicated batch", value.instruction, instruction, axes=axes, detail=detail
            )
            return

    # State

    def _argument(self, parameter: HloInstruction, sharding: str) -> _Argument:
        dims, tiles = parameter.shape.dims, tile_dims(sharding)
        whole = tuple(n * t for n, t in zip(dims, tiles, strict=False)) if tiles else dims
        return _Argument(parameter, placed(sharding, self.devices), whole)

    def _replicated_state(self) -> Iterator[ReshardedTensor]:
        """Optimizer state that is kept whole although the weights are sharded."""
        by_leaf: dict[tuple[str, int], list[_Argument]] = {}
        for argument in self.state.values():
            leaf = argument.parameter.op_name.rpartition("[")[2]
            elements = argument.parameter.shape.size * argument.shards
            by_leaf.setdefault((leaf, elements), []).append(argument)
        whole = sum(a.parameter.shape.bytes for a in self.arguments.values())
        matmuls = {id(found.matmul.instruction) for found, _ in self.counter.matmuls()}
        for arguments in by_leaf.values():
            like = max(arguments, key=lambda argument: argument.shards)
            for parameter, shards in ((a.parameter, a.shards) for a in arguments):
                if shards == like.shards or parameter.shape.bytes < _LEAST_SHARE * whole:
                    continue
                start = Value(self.module.entry, parameter)
                uses = followed(self.module, start, lambda use: id(use.user) not in matmuls)
                if not any(id(use.user) in matmuls for use in uses):
                    name = like.parameter.op_name
                    yield self._described("replicated state", parameter, parameter, detail=name)

    def _is_kept_whole(self, use: Use, groups: _Groups) -> bool:
        """Whether a result is state that the user replicates, such as weights (ZeRO-1)."""
        shape = use.user.shape
        for index in use.path:
            shape = shape.elements[index]
        return any(
            (taken.parameter.shape.dtype, taken.parameter.shape.dims) == (shape.dtype, shape.dims)
            and _is_same(taken.held, groups)
            for taken in self.state.values()
        )

    # Helpers

    @functools.cached_property
    def _matmuls(self) -> list[tuple[FoundMatmul, Scope]]:
        found = [(m, s) for m, s in self.counter.matmuls() if s.phase in MODEL_PHASES]
        differentiated = [pair for pair in found if "jvp(" in pair[0].op_name]
        return differentiated or found

    def _replicas(self, alike: Set[int] = frozenset()) -> dict[int, ReplicaGroups]:
        """The devices with the same result of each instruction, if these arguments are alike."""
        ids = {id(i) for n in self.counter.order for i in self.module[n].instructions.values()}
        return replicas_of(self.counter.program, ids, self.literals, alike=alike)

    @functools.cached_property
    def _all_held(self) -> dict[int, ReplicaGroups]:
        return self._replicas()

    def _held(self, instruction: HloInstruction) -> ReplicaGroups:
        return self._all_held.get(id(instruction)) or tuple(range(self.devices))

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
        start = Value(exchange.computation, exchange.operand)
        made = self._made_of(start, _UNCHANGED) or [start]
        return made[0], len(made) == 1 and self._is_argument(made[0])

    def _axes(self, exchange: _Exchange) -> Axes:
        return tuple(axes_between(exchange.groups, self.mesh).split("+"))

    def _before(self, exchange: _Exchange, value: Value) -> Spec | None:
        """How the value is split that is moved, or of which a part is."""
        dims, spec = next(value.instruction.shape.leaves()).dims, self.specs.of(value)
        moved = exchange.operand.shape.dims
        if exchange.kind == "all-gather" and self.mesh and moved == dims:
            gathered = exchange.instruction.integers("dimensions")
            spec = tuple(
                axes or (self._axes(exchange) if dim in gathered else axes)
                for dim, axes in enumerate(spec or (None,) * len(dims))
            )
        return spec if exchange.kind in ("all-gather", "all-to-all") else None

    def _after(self, exchange: _Exchange, value: Value) -> Spec | None:
        """How the value is split that comes of an exchange, and of the slice behind a gather."""
        if use := self._slices.get(exchange.received.name):
            return self.specs.of(Value(use.computation, use.user))
        if exchange.kind != "all-to-all":
            is_known = exchange.kind != "collective-permute"
            return self.specs.of(exchange.result) if is_known else None
        uses = followed(self.module, exchange.result, lambda u: u.user.opcode in _LAYOUT)
        use = next((u for u in uses if u.user.opcode not in _LAYOUT and u.operand >= 0), None)
        before, spec = next(value.instruction.shape.leaves()).dims, self._before(exchange, value)
        after = use.computation.operand(use.user, use.operand).shape.dims if use else ()
        if spec is None or len(after) != len(before):
            return None
        moved = self._axes(exchange)
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
        return self._described(
            kind,
            value.instruction if is_argument else exchange.received,
            self._at(exchange),
            axes=axes_between(exchange.groups, self.mesh),
            before=words(self._before(exchange, value)),
            after=words(self._after(exchange, value)),
            bytes_moved=exchange.bytes_moved,
            instructions=(exchange.instruction.name,),
        )

    def _at(self, exchange: _Exchange) -> HloInstruction:
        """The exchange; where XLA gives it no line, as in JAX 0.12, its first user with one."""
        uses = followed(self.module, exchange.result, lambda use: not self._has_line(use.user))
        users = (use.user for use in itertools.islice(uses, _NEAREST) if use.operand >= 0)
        known = filter(self._has_line, (exchange.received, *users))
        return next(known, exchange.received)

    def _has_line(self, instruction: HloInstruction) -> bool:
        return self._lines.of(instruction)[1] > 0

    def _described(
        self, kind: Kind, tensor: HloInstruction, at: HloInstruction, **facts: Any
    ) -> ReshardedTensor:
        """A finding about an argument or a result, with the source line of an instruction."""
        file, line = self._lines.of(at)
        name = _operation(at.op_name)
        if tensor.opcode == "parameter":
            name = tensor.op_name
            facts["before"] = words(self.specs.of(Value(self.module.entry, tensor)))
        shape = str(next(tensor.shape.leaves()))
        return ReshardedTensor(kind=kind, tensor=name, file=file, line=line, shape=shape, **facts)


def _parts(
    computation: HloComputation, instruction: HloInstruction
) -> list[tuple[HloInstruction, HloInstruction]]:
    """The arrays that a collective moves, each with what devices receive of it.

    XLA combines collectives, and starts and ends them apart; an element of the result keeps the
    name and the line of the collective that it was.
    """
    users = computation.users.get(instruction.name, ())
    end = next((user for user in users if user.opcode.endswith("-done")), instruction)
    operands = [computation[name] for name in instruction.operands]
    if len(operands) == 1 or instruction.opcode.startswith("all-to-all"):  # whose are one array's
        return [(operands[0], end)]
    received = {
        int(user.attribute("index") or 0): user
        for user in computation.users.get(end.name, ())
        if user.opcode == "get-tuple-element"
    }
    return [(operand, received.get(n, end)) for n, operand in enumerate(operands)]


def _keeps_places(use: Use) -> bool:
    opcode = use.user.opcode
    return opcode in _LAYOUT or opcode in _ELEMENTWISE or opcode.endswith("-done")


def _slices_gathered(use: Use, exchange: _Exchange) -> bool:
    """Whether a slice in a loop reads a small part of the dimension that was gathered."""
    whole = use.computation.operand(use.user, 0).shape.dims
    gathered = exchange.instruction.integers("dimensions")
    if whole != exchange.received.shape.dims or len(gathered) != 1:
        return False
    return use.user.shape.dims[gathered[0]] * len(exchange.groups[0]) <= whole[gathered[0]]


def _is_same(held: ReplicaGroups, groups: _Groups) -> bool:
    """Whether the devices of each group hold the same value."""
    return all(len({held[device] for device in group}) == 1 for group in groups)


def _primitive(op_name: str) -> str:
    return op_name.partition(";")[0].rpartition("/")[2]


def _operation(op_name: str) -> str:
    """Scope and operation of an op_name."""
    first = op_name.partition(";")[0]
    return " ".join(part for part in (read_scope(first).path, _primitive(first)) if part)


def _merged(found: Iterable[ReshardedTensor]) -> list[ReshardedTensor]:
    """One finding for each line, described by its first: the others are of the same operation."""
    merged: dict[tuple[str, int, str], ReshardedTensor] = {}
    for finding in sorted(found, key=lambda f: -f.bytes_moved):
        key = (finding.file, finding.line, "" if finding.line else finding.tensor)
        first = merged.setdefault(key, finding)
        if first is not finding:
            moved = first.bytes_moved + finding.bytes_moved
            names = first.instructions + finding.instructions
            merged[key] = replace(first, bytes_moved=moved, instructions=names)
    return list(merged.values())
