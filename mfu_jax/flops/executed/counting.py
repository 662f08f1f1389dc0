"""Executed FLOPs: what a compiled program runs on one device, from its optimised HLO text.

Every instruction is read once, for the cost of one run of its computation; `control_flow` says how
often that computation runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from mfu_jax.flops import undifferentiated
from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.exact import Number
from mfu_jax.flops.executed.attribution.duplicates import duplicates, is_recomputed
from mfu_jax.flops.executed.attribution.op_names import (
    inferred_op_name,
    named_operations,
    operation_of,
    unfolded_op_name,
)
from mfu_jax.flops.executed.attribution.padding import ImagePieces, WasteFinder
from mfu_jax.flops.executed.attribution.replication import replicas_of
from mfu_jax.flops.executed.attribution.sums import MODEL_PHASES, FoundMatmul, MatmulSums, whole
from mfu_jax.flops.executed.attribution.value_graph import value_graph
from mfu_jax.flops.executed.control_flow.call_graph import CallGraph
from mfu_jax.flops.executed.control_flow.execution_counts import ExecutionCounter
from mfu_jax.flops.executed.cost_types import ComputationCost, unaccounted
from mfu_jax.flops.executed.costs.custom_calls import KernelFlops
from mfu_jax.flops.executed.costs.literals import Literals
from mfu_jax.flops.executed.costs.reader import CostReader
from mfu_jax.flops.executed.hlo.module import HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.parsing import check_module, parse_hlo, with_large_constants
from mfu_jax.flops.executed.hlo.text import HloParseError
from mfu_jax.flops.executed.result import ExecutedCount, Flag
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths
from mfu_jax.flops.scopes import Scope, read_scope


class HasText(Protocol):
    """A compiled program: ``jax.jit(f).lower(…).compile()``."""

    def as_text(self) -> str | None:
        """The optimised HLO text."""


def executed_flops(
    program: HasText | str,
    *,
    kernel_flops: KernelFlops | None = None,
    trip_counts: Mapping[str, int] | None = None,
    group_sizes: Sequence[int] = (),
    sequence_lengths: Sequence[int] = (),
) -> ExecutedCount:
    """Counts the matmul FLOPs that one device executes in one call of a compiled program.

    Args:
        program: the result of ``jax.jit(f).lower(…).compile()``, or its ``as_text()``.
        kernel_flops: FLOPs of one run of custom kernels, by kernel name or custom-call target; or
            a function of the `KernelCall` that returns them, or None if unknown. Used when the
            program does not contain the cost; `register_kernel` overrides the program's. Where
            `pallas_kernel_flops` says that blocks overhang their arrays, what they run there is in
            `beyond`, not in `total`.
        trip_counts: iterations of loops that depend on data, by the op_name or name of the
            ``while`` that `unaccounted` shows.
        group_sizes: rows of each group (expert) in grouped matmuls, on one device.
        sequence_lengths: keys of each sequence in paged attention.

    Returns:
        The count. Work that could not be counted is in `unaccounted`.

    Raises:
        HloParseError: the text is not optimised HLO.
        UserError: the sizes or lengths are not whole numbers.

    >>> executed_flops('''HloModule m
    ... ENTRY %main (x: f32[2,3], y: f32[3,4]) -> f32[2,4] {
    ...   %x = f32[2,3] parameter(0)
    ...   %y = f32[3,4] parameter(1)
    ...   ROOT %d = f32[2,4] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''').total
    48
    """
    return counter_of(
        program,
        kernel_flops=kernel_flops,
        trip_counts=trip_counts,
        lengths=Lengths.of(group_sizes, sequence_lengths),
    ).count()


def counter_of(
    program: HasText | str,
    *,
    kernel_flops: KernelFlops | None = None,
    trip_counts: Mapping[str, int] | None = None,
    lengths: Lengths = NO_LENGTHS,
) -> ProgramCounter:
    """The counter of a program; arguments and errors as for `executed_flops`."""
    text = program if isinstance(program, str) else program.as_text()
    if not text:
        raise HloParseError("the compiled program has no text")
    module = parse_hlo(text)
    check_module(module)
    module.full = functools.cache(lambda: with_large_constants(program))
    reader = CostReader(
        module,
        kernel_flops=kernel_flops,
        trip_counts=trip_counts or {},
        lengths=lengths,
    )
    return ProgramCounter(module, reader, program, named_operations(text))


class ProgramCounter:
    """Multiplies each computation's cost by its runs, and adds everything up."""

    def __init__(
        self, module: HloModule, reader: CostReader, program: Any, named: Mapping[str, int]
    ) -> None:
        self.program = program
        self.named = named
        self.module = module
        self.reader = reader
        self.costs: dict[str, ComputationCost] = {}
        self.waste = WasteFinder(reader.dataflow, reader.lengths)
        self.pieces = ImagePieces(module)
        self.host: set[str] = set()  # computations that the host runs
        self.order = self._bottom_up_order()
        graph = CallGraph(
            reader.dataflow,
            calls={name: cost.calls for name, cost in self.costs.items()},
            given_trip_count=reader.given_trip_count,
        )
        self.runs = ExecutionCounter(graph, self.order, self.costs)
        self.runs.count()

    def matmuls(self) -> list[tuple[FoundMatmul, Scope]]:
        """Every matmul that runs, with its scope and phase."""
        numbers = (id(m.instruction) for n in reversed(self.order) for m in self.costs[n].matmuls)
        found = [self._found[number] for number in numbers if number in self._found]
        return [
            (item, scope._replace(phase="xla_rematerialized"))
            if id(item.matmul.instruction) in self._recomputed
            else (item, scope)
            for item, scope in zip(found, self._scopes(found), strict=True)
        ]

    def count(self) -> ExecutedCount:
        runs = self.runs
        times, once, costs = runs.times, runs.once, self.costs
        reached = [n for n in reversed(self.order) if times[n] or once[n]]
        ran = [n for n in reached if n not in self.host] if self.host else reached
        sums = self._sums(self.matmuls())
        on_host = self._on_host(reached)
        return ExecutedCount(
            **sums.in_whole_flops(),
            unaccounted=tuple(self._unaccounted()),
            duplicated=int(sum(i.matmul.flops * i.runs for i in self._duplicates.values())),
            named=self.named,
            host=on_host.total(),
            host_operations=dict(on_host),
            elementwise=int(sum([times[n] * costs[n].elementwise for n in ran])),
            hbm_bytes=int(sum([times[n] * costs[n].hbm_bytes for n in ran])),
            collectives=tuple(
                dataclasses.replace(item, times=math.ceil(item.times * times[n]))
                for n in ran
                for item in costs[n].collectives
            ),
            vector_xla=sum([once[n] * costs[n].vector_xla for n in ran]),
            elementwise_once=sum([once[n] * costs[n].elementwise for n in ran]),
            flags=(
                *(Flag(text=text, times=n) for text, n in runs.choices.items()),
                *(Flag(text=t, times=math.ceil(times[n])) for n in ran for t in costs[n].notes),
            ),
        )

    def _on_host(self, reached: Sequence[str]) -> Counter[str]:
        """FLOPs that the host runs, by operation."""
        found: dict[str, Number] = defaultdict(int)
        for name in reached:
            for matmul in self.costs[name].matmuls if name in self.host else ():
                key = operation_of(self._op_name(name, matmul.instruction))
                found[key] += self.runs.times[name] * matmul.flops
        return whole(found)

    def _unaccounted(self) -> Iterator[Unaccounted]:
        """Work that cannot be counted, with its runs, including those in branches not counted."""
        for name in reversed(self.order):
            if unknown := self.costs[name].unaccounted:
                runs = math.ceil(self.runs.times[name]) + self.runs.untaken[name]
                for item in unknown if runs else ():
                    yield dataclasses.replace(item, times=item.times * runs)
        for instruction, reason, runs in self.runs.unknown_loops.values():
            if self.reader.iterations.contains(instruction):
                continue  # counted by the textbook formula
            name = instruction.op_name or instruction.name
            reason = f"{reason}; its body is counted once; give trip_counts={{{name!r}: …}}"
            yield dataclasses.replace(unaccounted(instruction, "while", reason), times=runs)

    @functools.cached_property
    def _found(self) -> dict[int, FoundMatmul]:
        """The matmuls that run, by ``id`` of the instruction, callers before callees."""
        times, once = self.runs.times, self.runs.once
        return {
            id(m.instruction): FoundMatmul(
                self.module[n], m, self._op_name(n, m.instruction), times[n], once[n]
            )
            for n, cost in self.costs.items()
            if cost.matmuls and (times[n] or once[n]) and n not in self.host
            for m in cost.matmuls
        }

    def _sums(self, matmuls: list[tuple[FoundMatmul, Scope]]) -> MatmulSums:
        """The matmuls by phase, scope, dtype and kernel."""
        sums = MatmulSums()
        ids = {id(item.matmul.instruction) for item, _ in matmuls}
        literals = Literals(self.reader.dataflow)
        replicas = replicas_of(self.program, ids, literals)
        for item, scope in matmuls:
            number = id(item.matmul.instruction)
            sums.add(item.matmul, scope, item.runs, item.once)
            if scope.phase not in MODEL_PHASES:
                continue  # it has a line of its own
            if number in self._duplicates:
                sums.add_duplicate(item, scope)
                continue
            zeros = self.waste.wasted(item.computation, item.matmul)
            sums.add_model(item, scope, zeros, self.pieces.label(item.op_name))
            if number in replicas:
                sums.add_repeated(item, replicas[number], sum(zeros))
        return sums

    def _scopes(self, found: list[FoundMatmul]) -> list[Scope]:
        """The phase and scope of each matmul."""
        scopes = [read_scope(item.op_name) for item in found]
        pairs = functools.partial(zip, found, scopes, strict=True)
        if not any(s.phase == "forward" and "jvp(" not in item.op_name for item, s in pairs()):
            return scopes
        matmuls = {id(item.matmul.instruction): (item.op_name, s.phase) for item, s in pairs()}
        known = undifferentiated.classify(value_graph(self.module, matmuls))
        return [
            scope._replace(phase=known.get(id(item.matmul.instruction), scope.phase))
            for item, scope in pairs()
        ]

    def _bottom_up_order(self) -> list[str]:
        """Names of the reachable computations, callees before callers."""
        order: list[str] = []
        open_names: set[str] = set()
        stack = [(self.module.entry.name, False, False)]
        while stack:
            name, fused, done = stack.pop()
            if done:
                open_names.discard(name)
                order.append(name)
                continue
            if name in open_names:
                raise HloParseError(f"computation %{name} calls itself")
            if name in self.costs:
                continue
            open_names.add(name)
            cost = self.reader.computation_cost(self.module[name], fused=fused)
            self.costs[name] = cost
            stack.append((name, fused, True))
            for call in cost.calls:
                inside = fused or call.opcode in ("fusion", "fusion-start")
                if name in self.host or (call.runs_on_host):
                    self.host.update(call.callees)
                stack += [(callee, inside, False) for callee in call.callees]
        return order

    @functools.cached_property
    def _duplicates(self) -> dict[int, FoundMatmul]:
        """Matmuls that repeat what another one computes, by ``id``."""
        first = (item for n, item in self._running() if n not in self._recomputed)
        refs = ((item.computation, item.matmul.instruction) for item in first)
        return {id(i): self._found[id(i)] for i in duplicates(self.reader.dataflow, refs)}

    @functools.cached_property
    def _recomputed(self) -> set[int]:
        """The ``id`` of matmuls that XLA runs again to save memory."""
        return {
            number
            for number, item in self._running()
            if is_recomputed(self.module, item.computation, item.matmul.instruction)
        }

    def _running(self) -> Iterator[tuple[int, FoundMatmul]]:
        """Those of `_found` that run at all; the others count only with loops counted once."""
        return (pair for pair in self._found.items() if pair[1].runs)

    def _op_name(self, name: str, instruction: HloInstruction) -> str:
        """A matmul's op_name, else that of its fusion, else a guess."""
        caller = self.module.caller(name) if not instruction.op_name else None
        of_fusion = caller[1].op_name if caller and caller[1].opcode.startswith("fusion") else ""
        for op_name in (instruction.op_name, of_fusion):
            if "/" in op_name:
                return unfolded_op_name(self.module, self.module[name], instruction, op_name)
        inferred = inferred_op_name(self.module, self.module[name], instruction)
        return inferred or self.runs.caller_op_name(name)
