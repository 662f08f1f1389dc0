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
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.executed.control_flow.call_graph import (
    NO_CALLS,
    CallGraph,
    Node,
    ResolvedCall,
    name_of,
)
from mfu_jax.flops.executed.hlo.module import HloInstruction


class ExecutionCounter:
    """Counts the runs of all computations.

    Args:
        graph: the calls of the program.
        order: names of its computations, callees before callers; the last one is the entry.
        flops: FLOPs of one run of each computation, without its callees.

    Attributes:
        times: runs of each computation in one step; a fraction if devices differ.
        once: the same with every loop body counted once.
        untaken: upper bound of the runs in branches that are not counted.
        unknown_loops: loops whose trip count is unknown, with the reason and their runs.
        choices: texts about branches of different cost, and how often each choice was made.
    """

    def __init__(
        self,
        graph: CallGraph,
        order: Sequence[str],
        flops: Mapping[str, int],
    ) -> None:
        self.graph = graph
        self.sites = graph.sites
        self.calls = graph.calls
        self.order = order
        self.entry = order[-1]
        self.flops = flops
        # For computations that are reached and call others.
        self.resolved: dict[str, dict[Node, Sequence[ResolvedCall]]] = {}
        self.entries: Counter[Node] = Counter()
        self.totals: dict[Node, int] = {}
        self.least: dict[Node, int] = {}
        self.times: dict[str, Number] = defaultdict(int)
        self.once: dict[str, int] = defaultdict(int)
        self.untaken: dict[str, int] = defaultdict(int)
        self.unknown_loops: dict[int, tuple[HloInstruction, str, int]] = {}
        self.choices: Counter[str] = Counter()

    def count(self) -> None:
        """Fills the attributes."""
        for name in self.order:
            self.graph.add(name)
        self.entries = self.graph.entries()
        self._resolve()
        for name in self.order:
            self._add_totals(name)
        self._run()
        if len(self.entries) > 1:
            self._average(self.entries.total())
        self._run_once()

    def _resolve(self) -> None:
        self._reach(self.entries)
        for name in reversed(self.order):
            sites = self.sites[name]
            nodes = self.resolved.get(name)
            if not nodes:
                continue
            for node in nodes if sites.scalars else ():
                values = sites.scalars.initial.copy() if sites.scalars else []
                environment = () if isinstance(node, str) else node.environment
                device = None if isinstance(node, str) else node.device
                for register, value in zip(sites.decisions, environment, strict=True):
                    values[register] = value
                nodes[node] = calls = [s.resolve(values, device) for s in sites.dependent]
                for call in calls:
                    self._reach(callee for callee, _ in call.callees)
            self._reach(sites.fixed)

    def _reach(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            name = name_of(node)
            if self.sites[name] is not NO_CALLS:
                self.resolved.setdefault(name, {}).setdefault(node, ())

    def _add_totals(self, name: str) -> None:
        """Adds the FLOPs of one run of a computation in each environment, callees included.

        Both the most and the least, since it may be unknown which branch runs.
        """
        if self.sites[name] is NO_CALLS:
            self.totals[name] = self.least[name] = self.flops[name]
            return
        fixed = self.sites[name].fixed
        nodes = self.resolved.get(name, {})
        for totals, chosen in ((self.totals, max), (self.least, min)):
            always = self.flops[name]
            if fixed and nodes:
                always += sum([totals[callee] for callee in fixed])
            for node, calls in nodes.items():
                totals[node] = always
                for call in calls:
                    called = [totals[callee] * times for callee, times in call.callees]
                    totals[node] += chosen(called) if call.is_choice else sum(called)

    # Runs, from callers to callees

    def _run(self) -> None:
        times: dict[Node, int] = defaultdict(int, self.entries)
        untaken: dict[Node, int] = defaultdict(int)
        for name in reversed(self.order):
            sites = self.sites[name]
            if sites is NO_CALLS:
                of_all = times.get(name, 0)
                if name in untaken:
                    self.untaken[name] += untaken[name]
            else:
                of_all = self._run_calls(name, times, untaken)
            for callee in sites.fixed:
                times[callee] += of_all
                untaken[callee] += self.untaken[name]
            if of_all and sites.notes:
                self.choices.update(dict.fromkeys(sites.notes, of_all))
            if of_all:
                self.times[name] = of_all

    def _run_calls(self, name: str, times: dict[Node, int], untaken: dict[Node, int]) -> int:
        """Adds the runs of a computation's callees; returns its own."""
        of_all = 0
        for node, calls in self.resolved.get(name, {}).items():
            runs, not_run = times[node], untaken[node]
            of_all += runs
            self.untaken[name] += not_run
            for call in calls:
                self._note(call, runs, not_run)
                taken = self._taken(call)
                for callee, factor in call.callees:
                    if callee == taken or not call.is_choice:
                        times[callee] += runs * factor
                        untaken[callee] += not_run * factor
                    else:
                        untaken[callee] += (runs + not_run) * factor
        return of_all

    def _average(self, devices: int) -> None:
        """Divides the runs by the number of devices; those listed as unknown are rounded up."""
        for name, runs in self.times.items():
            self.times[name] = integral(Fraction(runs, devices))
        for name, not_run in self.untaken.items():
            self.untaken[name] = -(-not_run // devices)
        for number, (instruction, reason, runs) in self.unknown_loops.items():
            self.unknown_loops[number] = instruction, reason, -(-runs // devices)
        for text, runs in self.choices.items():
            self.choices[text] = -(-runs // devices)
        totals = [self.totals[node] for node in self.entries]
        if len(set(totals)) > 1:
            text = (
                f"devices run different branches or loops, {min(totals):,} to {max(totals):,} "
                f"FLOPs; counted as the mean of {devices} devices"
            )
            whole = sum(self.totals[node] * n for node, n in self.entries.items())
            if whole % devices:
                text += f", rounded down: {whole:,} in all"
            self.choices[text] += 1

    def _taken(self, call: ResolvedCall) -> Node | None:
        """The most expensive branch, if it is unknown which one runs; else None."""
        if not call.is_choice:
            return None
        return max(call.callees, key=lambda callee: self.totals[callee[0]])[0]

    def _note(self, call: ResolvedCall, runs: int, not_run: int) -> None:
        instruction = call.instruction
        if call.reason and runs + not_run:
            _, _, before = self.unknown_loops.get(id(instruction), (instruction, "", 0))
            reason = call.reason + self.graph.evaluation.doubts()
            self.unknown_loops[id(instruction)] = (instruction, reason, before + runs + not_run)
        flops = [(self.least[callee], self.totals[callee]) for callee, _ in call.callees]
        if call.is_choice and runs and len({n for both in flops for n in both}) > 1:
            shown = ", ".join(_shown(*both) for both in flops)
            where = instruction.op_name or instruction.name
            on = f"which one runs depends on data{self.graph.evaluation.doubts()}"
            text = f"conditional {where}: branches of {shown} FLOPs; "
            self.choices[f"{text}the most expensive one is counted; {on}"] += runs

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
