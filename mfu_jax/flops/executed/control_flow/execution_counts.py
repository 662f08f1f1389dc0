"""How often each computation of a program runs in one step.

What a computation runs may depend on a few integers: the bound of a loop, the index of a branch.
Their values are its environment. From the entry downwards, each computation is resolved once for
every environment that it runs in, and its runs are counted for each.
Most computations depend on no integer and have one environment: the empty one.
The entry's environment is the device number if that decides anything: then all devices are
resolved, and runs are their mean.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, Self

from mfu_jax.flops.count import dtype_bits
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.executed.control_flow.call_graph import CallGraph, Node, ResolvedCall
from mfu_jax.flops.executed.cost_types import ComputationCost, MatmulCost
from mfu_jax.flops.executed.hlo.module import HloInstruction
from mfu_jax.flops.scopes import read_scope


class WorkKind(NamedTuple):
    """What matmuls with equal FLOPs may differ in, in words."""

    dtype: str
    phase: str
    unit: str
    kernel: str

    @classmethod
    def of(cls, matmul: MatmulCost) -> Self:
        """The kind of a matmul."""
        phase = read_scope(matmul.instruction.op_name).phase
        unit = "on vector units" if matmul.is_vector else "on matrix units"
        return cls(matmul.dtype, phase, unit, matmul.kernel or "by XLA")


class ExecutionCounter:
    """Counts the runs of all computations.

    Args:
        graph: the calls of the program.
        order: names of its computations, callees before callers; the last one is the entry.
        costs: cost of one run of each computation, without its callees.

    Attributes:
        times: runs of each computation in one step; a fraction if devices differ.
        once: the same with every loop body counted once.
        untaken: upper bound of the runs in branches that are not counted.
        unknown_loops: loops whose trip count is unknown, with the reason and their runs.
        choices: texts about branches of different cost or kind, and how often each choice was made.
    """

    def __init__(
        self,
        graph: CallGraph,
        order: Sequence[str],
        costs: Mapping[str, ComputationCost],
    ) -> None:
        self.graph = graph
        self.sites = graph.sites
        self.calls = graph.calls
        self.order = order
        self.entry = order[-1]
        self.costs = costs
        self.flops = {name: sum(m.flops for m in cost.matmuls) for name, cost in costs.items()}
        self.resolved: dict[Node, Sequence[ResolvedCall]] = {}
        self.totals: dict[Node, tuple[int, int]] = {}
        self.times: dict[str, Number] = defaultdict(int)
        self.once: dict[str, int] = defaultdict(int)
        self.untaken: dict[str, int] = defaultdict(int)
        self.unknown_loops: dict[int, tuple[HloInstruction, str, int]] = {}
        self.choices: Counter[str] = Counter()
        self.kinds: dict[Node, Counter[WorkKind]] = {}  # where branches cost the same

    def count(self) -> None:
        """Fills the attributes."""
        for name in self.order:
            self.graph.add(name)
        entries = self.graph.entries()
        self._run(entries)
        if len(entries) > 1:
            self._average(entries)
        self._run_once()

    def _calls(self, node: Node) -> Sequence[ResolvedCall]:
        """What a computation in an environment runs that depends on it."""
        sites = self.sites[node.name]
        if not sites.scalars:
            return ()
        if node not in self.resolved:
            values = sites.scalars.initial.copy()
            for register, value in zip(sites.decisions, node.environment, strict=True):
                values[register] = value
            self.resolved[node] = [site.resolve(values, node.device) for site in sites.dependent]
        return self.resolved[node]

    def _total(self, node: Node) -> tuple[int, int]:
        """FLOPs of one run of a computation, callees included.

        The least and the most, since it may be unknown which branch runs.
        """
        if node not in self.totals:
            parts = [(self.flops[node.name],) * 2, *map(self._total, self.sites[node.name].fixed)]
            for call in self._calls(node):
                ways = [[n * times for n in self._total(callee)] for callee, times in call.callees]
                least, most = zip(*ways, strict=True)
                parts.append((min(least), max(most)) if call.is_choice else (sum(least), sum(most)))
            self.totals[node] = sum(least for least, _ in parts), sum(most for _, most in parts)
        return self.totals[node]

    # Runs, from callers to callees

    def _run(self, entries: Counter[Node]) -> None:
        # By computation, its nodes with their runs, and those in branches that are not counted.
        due: dict[str, dict[Node, tuple[int, int]]] = defaultdict(dict)
        called: list[tuple[ResolvedCall, int, int]] = []

        def add(node: Node, runs: int, not_run: int) -> None:
            nodes = due[node.name]
            before = nodes.get(node, (0, 0))
            nodes[node] = before[0] + runs, before[1] + not_run

        for node, devices in entries.items():
            add(node, devices, 0)
        for name in reversed(self.order):
            for node, (runs, not_run) in due.pop(name, {}).items():
                if runs:
                    self.times[name] += runs
                self.untaken[name] += not_run
                for callee in self.sites[name].fixed:
                    add(callee, runs, not_run)
                for call in self._calls(node):
                    called.append((call, runs, not_run))
                    taken = self._taken(call)
                    for callee, factor in call.callees:
                        if callee == taken or not call.is_choice:
                            add(callee, runs * factor, not_run * factor)
                        else:
                            add(callee, 0, (runs + not_run) * factor)
        for call, runs, not_run in called:
            self._note(call, runs, not_run)

    def _average(self, entries: Counter[Node]) -> None:
        """Divides the runs by the number of devices; those listed as unknown are rounded up."""
        devices = entries.total()
        for name, runs in self.times.items():
            self.times[name] = integral(Fraction(runs, devices))
        for name, not_run in self.untaken.items():
            self.untaken[name] = -(-not_run // devices)
        for number, (instruction, reason, runs) in self.unknown_loops.items():
            self.unknown_loops[number] = instruction, reason, -(-runs // devices)
        for text, runs in self.choices.items():
            self.choices[text] = -(-runs // devices)
        totals = [self._total(node)[1] for node in entries]
        if len(set(totals)) > 1:
            text = (
                f"devices run different branches or loops, {min(totals):,} to {max(totals):,} "
                f"FLOPs; counted as the mean of {devices} devices"
            )
            whole = sum(total * n for total, n in zip(totals, entries.values(), strict=True))
            if whole % devices:
                text += f", rounded down: {whole:,} in all"
            self.choices[text] += 1

    def _taken(self, call: ResolvedCall) -> Node | None:
        """The most expensive branch, if it is unknown which one runs; else None.

        Of branches with equal FLOPs, it is the one of the widest dtypes.
        """
        if not call.is_choice:
            return None
        totals = [self._total(callee)[1] for callee, _ in call.callees]
        most = max(totals)
        dearest = [callee for (callee, _), n in zip(call.callees, totals, strict=True) if n == most]
        return dearest[0] if len(dearest) == 1 or not most else max(dearest, key=self._bits)

    def _bits(self, node: Node) -> int:
        return sum(flops * dtype_bits(kind.dtype) for kind, flops in self._kinds(node).items())

    def _kinds(self, node: Node) -> Counter[WorkKind]:
        """FLOPs by kind of one run of a computation, callees included."""
        if node in self.kinds:
            return self.kinds[node]
        kinds = self.kinds[node] = Counter[WorkKind]()
        for matmul in self.costs[node.name].matmuls:
            kinds[WorkKind.of(matmul)] += matmul.flops
        callees = [(callee, 1) for callee in self.sites[node.name].fixed]
        for call in self._calls(node):
            taken = self._taken(call)
            callees += [each for each in call.callees if taken in (None, each[0])]
        for callee, times in callees:
            for kind, flops in self._kinds(callee).items() if times else ():
                kinds[kind] += flops * times
        return kinds

    def _note(self, call: ResolvedCall, runs: int, not_run: int) -> None:
        instruction = call.instruction
        if call.reason and runs + not_run:
            _, _, before = self.unknown_loops.get(id(instruction), (instruction, "", 0))
            reason = call.reason + self.graph.evaluation.doubts()
            self.unknown_loops[id(instruction)] = (instruction, reason, before + runs + not_run)
        if not call.is_choice or not runs + not_run:
            return
        flops = [self._total(callee) for callee, _ in call.callees]
        where = instruction.op_name or instruction.name
        on = f"which one runs depends on data{self.graph.evaluation.doubts()}"
        if len({n for both in flops for n in both}) > 1:
            shown = ", ".join(_shown(*both) for both in flops)
            text = f"conditional {where}: branches of {shown} FLOPs; the most expensive one"
            if runs:
                self.choices[f"{text} is counted; {on}"] += runs
        elif flops[0][1] and (differences := self._differences(call)):
            text = f"conditional {where}: branches of {flops[0][1]:,} FLOPs each, but not of the "
            text += f"same {differences}; the one of the widest dtypes is counted; {on}"
            self.choices[text] += runs + not_run

    def _differences(self, call: ResolvedCall) -> str:
        """In what branches with equal FLOPs differ; empty if they are the same work."""
        branches = [self._kinds(callee) for callee, _ in call.callees]
        if all(kinds == branches[0] for kinds in branches):
            return ""
        found = []
        for index, aspect in enumerate(WorkKind._fields):
            parts: list[Counter[str]] = [Counter() for _ in branches]
            for part, kinds in zip(parts, branches, strict=True):
                for kind, flops in kinds.items():
                    part[kind[index]] += flops
            if any(part != parts[0] for part in parts):
                shown = (" and ".join(f"{n:,} {kind}" for kind, n in p.items()) for p in parts)
                found.append(f"{aspect} ({', or '.join(shown)})")
        return ", ".join(found) or "combination of them"

    def _run_once(self) -> None:
        """Runs as XLA's own report counts them, with the most expensive branch of each choice."""
        totals: dict[str, int] = {}
        for name in self.order:
            totals[name] = self.flops[name]
            for call in self.calls[name]:
                costs = [totals[callee] for callee in call.callees]
                totals[name] += max(costs) if call.opcode == "conditional" else sum(costs)
        self.once[self.entry] = 1
        for name in reversed(self.order):
            if not self.once[name]:
                continue
            for call in self.calls[name]:
                callees = call.callees
                if call.opcode == "conditional":
                    callees = (max(callees, key=totals.__getitem__),)
                for callee in callees:
                    self.once[callee] += self.once[name]

    @functools.cached_property
    def _callers(self) -> dict[str, list[tuple[str, HloInstruction]]]:
        """The calls of each computation, from the entry downwards, and where they are."""
        callers: dict[str, list[tuple[str, HloInstruction]]] = defaultdict(list)
        for name in reversed(self.order):
            for call in self.calls[name] if self.once[name] else ():
                for callee in call.callees:
                    callers[callee].append((name, call))
        return callers

    def caller_op_name(self, name: str) -> str:
        """The op_name of a computation's first caller that has one, itself or from its callers."""
        for outer, call in self._callers[name]:
            if op_name := call.op_name or self.caller_op_name(outer):
                return op_name
        return ""


def _shown(least: int, most: int) -> str:
    """FLOPs of a branch; a range if a branch inside it may skip a part."""
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
