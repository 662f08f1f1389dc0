"""How often each computation of a program runs in one step.

What a computation runs may depend on a few integers: the bound of a loop, the index of a branch.
Their values are its environment. From the entry downwards, each computation is resolved once for
every environment that it runs in, and the number of its runs is kept for each.
Most computations depend on nothing, and have one environment: the empty one.
The entry's is the number of the device, where that decides anything: then all devices are resolved,
and runs are their mean.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.executed.hlo import HloInstruction
from mfu_jax.flops.executed.plans import Node, Planner, Resolved


class RunCounter:
    """Counts the runs of all computations.

    Args:
        planner: of the program.
        order: names of its computations, callees before callers; the last one is the entry.
        flops: of one run of each computation, without what it calls.

    Attributes:
        times: runs of each computation in one step; a fraction where devices differ.
        once: the same with every loop body counted once.
        untaken: upper bound of the runs in branches that are not counted.
        unknown_loops: loops whose trip count is not known, with the reason and their runs.
        choices: texts about branches of different cost, and how often each choice was made.
    """

    def __init__(
        self,
        planner: Planner,
        order: Sequence[str],
        flops: Mapping[str, int],
    ) -> None:
        self.planner = planner
        self.plans = planner.plans
        self.calls = planner.calls
        self.order = order
        self.entry = order[-1]
        self.flops = flops
        self.resolved: dict[str, dict[Node, list[Resolved]]] = defaultdict(dict)
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
            self.planner.add(name)
        self.entries = self.planner.entries()
        self._resolve()
        for name in self.order:
            self._add_totals(name)
        self._run()
        if len(self.entries) > 1:
            self._average(self.entries.total())
        self._run_once()

    def _resolve(self) -> None:
        self.resolved[self.entry] = {node: [] for node in self.entries}
        for name in reversed(self.order):
            plan = self.plans[name]
            for node in self.resolved[name]:
                if plan.part is None:
                    continue
                values = plan.part.initial.copy()
                for register, value in zip(plan.decisions, node.environment, strict=True):
                    values[register] = value
                calls = [planned.resolve(values) for planned in plan.planned]
                self.resolved[name][node] = calls
                for call in calls:
                    for callee, _ in call.callees:
                        self.resolved[callee.name].setdefault(callee, [])
            if self.resolved[name]:
                for callee in plan.fixed:
                    self.resolved[callee.name].setdefault(callee, [])

    def _add_totals(self, name: str) -> None:
        """FLOPs of one run of a computation in each environment, with all that it calls.

        Most and least of them, where it is not known which branch runs.
        """
        fixed = self.plans[name].fixed
        for totals, chosen in ((self.totals, max), (self.least, min)):
            always = self.flops[name]
            if fixed and self.resolved[name]:
                always += sum([totals[callee] for callee in fixed])
            for node, calls in self.resolved[name].items():
                totals[node] = always
                for call in calls:
                    called = [totals[callee] * times for callee, times in call.callees]
                    totals[node] += chosen(called) if call.is_choice else sum(called)

    # Runs, from callers to callees

    def _run(self) -> None:
        times: dict[Node, int] = defaultdict(int, self.entries)
        untaken: dict[Node, int] = defaultdict(int)
        for name in reversed(self.order):
            of_all = 0
            for node, calls in self.resolved[name].items():
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
            for callee in self.plans[name].fixed:
                times[callee] += of_all
                untaken[callee] += self.untaken[name]
            if of_all and (notes := self.plans[name].notes):
                self.choices.update(dict.fromkeys(notes, of_all))
            if of_all:
                self.times[name] = of_all

    def _average(self, devices: int) -> None:
        """Divides what all devices run among them; what is listed as unknown is rounded up."""
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

    def _taken(self, call: Resolved) -> Node | None:
        """Of branches between which nothing decides, the most expensive one."""
        if not call.is_choice:
            return None
        return max(call.callees, key=lambda callee: self.totals[callee[0]])[0]

    def _note(self, call: Resolved, runs: int, not_run: int) -> None:
        instruction = call.instruction
        if call.reason and runs + not_run:
            _, _, before = self.unknown_loops.get(id(instruction), (instruction, "", 0))
            reason = call.reason + self.planner.evaluation.doubts()
            self.unknown_loops[id(instruction)] = (instruction, reason, before + runs + not_run)
        flops = [(self.least[callee], self.totals[callee]) for callee, _ in call.callees]
        if call.is_choice and runs and len({n for both in flops for n in both}) > 1:
            shown = ", ".join(_shown(*both) for both in flops)
            where = instruction.op_name or instruction.name
            on = f"which one runs depends on data{self.planner.evaluation.doubts()}"
            text = f"conditional {where}: branches of {shown} FLOPs; "
            self.choices[f"{text}the most expensive one is counted; {on}"] += runs

    def _run_once(self) -> None:
        """Runs as XLA's own report counts them, with the most expensive branch of each choice."""
        totals: dict[str, int] = {}
        for name in self.order:
            called = [[totals[callee] for callee in c.callees] for c in self.calls[name]]
            totals[name] = self.flops[name] + sum(
                max(costs) if call.opcode == "conditional" else sum(costs)
                for call, costs in zip(self.calls[name], called, strict=True)
            )
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
        """The op_name of a computation's first caller that has one, itself or by its own."""
        for outer, call in self._callers[name]:
            if op_name := call.op_name or self.caller_op_name(outer):
                return op_name
        return ""


def _shown(least: int, most: int) -> str:
    """FLOPs of a branch, of which a branch inside may leave out a part."""
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
