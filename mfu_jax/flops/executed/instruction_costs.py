"""What each instruction of a compiled program costs: one record per launched instruction.

A fusion is one record, including all it contains; so is an asynchronous operation, at its start.
The records sum to the totals of `executed_flops`. Profiles join them with times, by name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mfu_jax.flops.count import Beyond
from mfu_jax.flops.executed.cost_types import InstructionCost, MatmulCost
from mfu_jax.flops.executed.costs.memory_traffic import host_bytes, is_to_host
from mfu_jax.flops.executed.costs.reader import CostReader
from mfu_jax.flops.executed.counting import HasText, ProgramCounter, counter_of
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.opcodes import FREE, TRANSCENDENTAL
from mfu_jax.flops.executed.hlo.replica_groups import device_pairs, groups_text, replica_groups
from mfu_jax.flops.executed.instruction_shapes import results_of, shape_of, state_of
from mfu_jax.flops.executed.records import CONTROL, InstructionRecord, ProgramCosts
from mfu_jax.flops.scopes import Scope, read_scope

_FUSIONS = ("fusion", "fusion-start")
_CHAIN = re.compile(r'chain_id="(\w+)"')


def instruction_costs(program: HasText | str) -> ProgramCosts:
    """Costs of a compiled program by instruction.

    Args:
        program: the result of ``jax.jit(f).lower(…).compile()``, or its ``as_text()``.

    Raises:
        HloParseError: the text is not optimised HLO.
    """
    return costs_of(counter_of(program))


def costs_of(counter: ProgramCounter) -> ProgramCosts:
    """As `instruction_costs`, of a program that has been read."""
    module = counter.module
    return ProgramCosts(
        name=module.name,
        devices=module.header_int("num_partitions") * module.header_int("replica_count"),
        state=state_of(module.entry),
        results=results_of(module.entry),
        records={record.name: record for record in _RecordReader(counter).records()},
        executed=counter.count(),
    )


class _ScopedMatmul(NamedTuple):
    """A matmul in one run, with its name and phase."""

    cost: MatmulCost
    op_name: str
    scope: Scope


class _Inside(NamedTuple):
    """All instructions of one launched instruction, and what each costs."""

    instructions: list[HloInstruction]
    costs: list[InstructionCost]


class _RecordReader:
    """Makes the records of one program.

    Args:
        counter: the program's counter.
    """

    def __init__(self, counter: ProgramCounter) -> None:
        self.module = counter.module
        self.reader: CostReader = counter.reader
        self.runs = counter.runs
        self.order = counter.order
        self.chains: dict[str, str] = {}  # id → the fusion that starts it
        self.inside: set[str] = set()  # computations of fusions and asynchronous operations
        self.matmuls = {
            id(found.matmul.instruction): (found.op_name, scope)
            for found, scope in counter.matmuls()
        }

    def records(self) -> Iterator[InstructionRecord]:
        for name in reversed(self.order):  # callers first
            if name in self.inside:
                continue
            runs = math.ceil(self.runs.times[name])
            for instruction in self.module[name].instructions.values():
                if instruction.opcode not in FREE:  # a device launches nothing for these
                    yield self._record(self.module[name], instruction, runs)

    def _record(
        self, computation: HloComputation, instruction: HloInstruction, runs: int
    ) -> InstructionRecord:
        inside = self._inside(computation, instruction)
        matmuls = list(self._matmuls(inside))
        collective = next((cost.collective for cost in inside.costs if cost.collective), None)
        op_name, scope = self._scope(instruction, inside, matmuls)
        return InstructionRecord(
            name=instruction.name,
            module=self.module.name,
            computation=computation.name,
            opcode=instruction.opcode,
            op_name=op_name,
            scope=scope.path,
            phase=scope.phase,
            runs=runs,
            flops_by_dtype=_summed((m.cost.dtype, m.cost.flops) for m in matmuls),
            flops_by_phase=_summed(pair for m in matmuls for pair in _by_phase(m)),
            beyond=Beyond(*map(sum, zip(*(m.cost.beyond for m in matmuls), strict=True))),
            vector_matmuls=sum(m.cost.flops for m in matmuls if m.cost.is_vector),
            kernels=tuple(sorted({m.cost.kernel for m in matmuls if m.cost.kernel})),
            grid_steps=sum(m.cost.grid_steps for m in matmuls),
            elementwise=sum(cost.elementwise for cost in inside.costs),
            transcendental=sum(
                i.shape.size for i in inside.instructions if i.opcode in TRANSCENDENTAL
            ),
            hbm_bytes=sum(cost.hbm_bytes for cost in inside.costs),
            collective=collective,
            device_groups=self._groups(inside) if collective else (),
            started_by=_started_by(instruction) or self._ended_chain(inside),
            starts_chain=self._starts_chain(instruction, inside),
            host_bytes=host_bytes(computation, instruction, inside.instructions),
            to_host=is_to_host(instruction),
            shape=shape_of(
                computation, instruction, inside.instructions, [m.cost for m in matmuls]
            ),
            called=tuple(instruction.callees) if instruction.opcode in CONTROL else (),
            unaccounted=tuple(c.unaccounted.reason for c in inside.costs if c.unaccounted),
        )

    def _inside(self, computation: HloComputation, instruction: HloInstruction) -> _Inside:
        """The instruction, and the instructions of the computations that it consists of."""
        cost = self.reader.instruction_cost(computation, instruction, fused=False)
        inside = _Inside([instruction], [cost])
        fused = instruction.opcode in _FUSIONS
        is_whole = fused or instruction.opcode == "async-start"
        called = [(name, fused) for name in instruction.callees] if is_whole else []
        while called:
            name, fused = called.pop()
            inner = self.module[name]
            self.inside.add(inner.name)
            for one in inner.instructions.values():
                inside.instructions.append(one)
                inside.costs.append(self.reader.instruction_cost(inner, one, fused=fused))
                called += [(name, fused or one.opcode in _FUSIONS) for name in one.callees]
        return inside

    def _matmuls(self, inside: _Inside) -> Iterator[_ScopedMatmul]:
        for cost in inside.costs:
            if matmul := cost.matmul:
                unknown = matmul.instruction.op_name, _UNKNOWN
                named = self.matmuls.get(id(matmul.instruction), unknown)
                yield _ScopedMatmul(matmul, *named)

    def _scope(
        self, instruction: HloInstruction, inside: _Inside, matmuls: list[_ScopedMatmul]
    ) -> tuple[str, Scope]:
        """Name and scope of the largest matmul, else of the instruction or its last named part."""
        largest = max(matmuls, key=lambda m: m.cost.flops, default=None)
        if largest is not None and largest.cost.flops:
            return largest.op_name, largest.scope
        named = [i.op_name for i in inside.instructions if "/" in i.op_name]
        op_name = instruction.op_name if "/" in instruction.op_name else "".join(named[-1:])
        first = op_name.partition(";")[0]  # XLA joins the names of what it merges
        return first, read_scope(first) if first else _UNKNOWN

    def _starts_chain(self, instruction: HloInstruction, inside: _Inside) -> bool:
        chain = _chain(inside, "AsyncCollectiveStart")
        if chain:
            self.chains[chain] = instruction.name
        return bool(chain)

    def _ended_chain(self, inside: _Inside) -> str:
        return self.chains.get(_chain(inside, "AsyncCollectiveDone"), "")

    def _groups(self, inside: _Inside) -> tuple[tuple[int, ...], ...]:
        devices = self.module.header_int("num_partitions")
        for instruction, cost in zip(inside.instructions, inside.costs, strict=True):
            if cost.collective is None:
                continue
            if pairs := device_pairs(instruction):
                return tuple(pairs)
            groups = replica_groups(groups_text(instruction), devices)
            return tuple(map(tuple, groups or ()))
        return ()


_UNKNOWN = Scope("other", "")


def _by_phase(matmul: _ScopedMatmul) -> Iterator[tuple[str, int]]:
    again = 0 if matmul.scope.phase == "xla_rematerialized" else matmul.cost.rematerialized
    yield matmul.scope.phase, matmul.cost.flops - again
    if again:
        yield "rematerialized", again


def _summed(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for key, number in pairs:
        sums[key] += number
    return dict(sums)


def _chain(inside: _Inside, target: str) -> str:
    """The id of the chain of a collective that a fusion starts or ends; empty if none."""
    if not any(
        f'"{target}"' in i.attribute_text for i in inside.instructions if i.opcode == "custom-call"
    ):
        return ""
    found = (
        _CHAIN.search(i.attribute_text)
        for i in inside.instructions
        if "chain_id" in i.attribute_text
    )
    return next((match[1] for match in found if match), "")


def _started_by(instruction: HloInstruction) -> str:
    is_later = instruction.opcode.endswith(("-done", "-update"))
    return instruction.operands[0] if is_later and instruction.operands else ""
