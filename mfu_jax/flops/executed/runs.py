"""How often each computation of a program runs in one step.

What a computation runs may depend on a few integers that its callers pass: the bound of a loop, the
index of a branch. Their values are its environment. From the entry downwards, each computation is
resolved once for every environment that it runs in, and the number of its runs is kept for each.
Most computations depend on nothing, and have one environment: the empty one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mfu_jax.flops.executed.dataflow import TuplePath
from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.integers import Value
from mfu_jax.flops.executed.loops import Loop, stated_trip_count
from mfu_jax.flops.executed.slices import (
    Evaluation,
    Leaf,
    Slice,
    StepLimitError,
    branch_index,
)

Environment = tuple[Value, ...]


class Node(NamedTuple):
    """A computation in one environment."""

    name: str
    environment: Environment = ()


class Resolved(NamedTuple):
    """What one instruction runs in one environment of its computation.

    Attributes:
        instruction: the call.
        callees: what it runs, and how often.
        is_choice: whether only one of the callees runs, and it is not known which.
        reason: why a loop's trip count is not known.
    """

    instruction: HloInstruction
    callees: Sequence[tuple[Node, int]]
    is_choice: bool = False
    reason: str = ""


class _Planned(Protocol):
    def resolve(self, values: list[Value]) -> Resolved:
        """What the instruction runs, for the registers of its computation's slice."""


@dataclass(slots=True)
class _Plan:
    """The calls of one computation: `fixed` ones run once in every environment."""

    part: Slice | None = None
    fixed: list[Node] = field(default_factory=list)
    planned: list[_Planned] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def needs(self) -> Collection[Leaf]:
        """The values that its computation's callers must pass."""
        return self.part.inputs if self.part else ()


_NO_CALLS = _Plan()
_DECIDE = ("while", "conditional")  # what runs depends on an integer


class RunCounter:
    """Counts the runs of all computations.

    Args:
        module: the program.
        order: names of its computations, callees before callers.
        calls: the calls of each computation.
        flops: of one run of each computation, without what it calls.
        given_trip_count: the trip count that the user gave for a ``while``, or None.
        full_module: the program with its large constants written out, or None.

    Attributes:
        times: runs of each computation in one step.
        once: the same with every loop body counted once.
        untaken: upper bound of the runs in branches that are not counted.
        callers: op_name of a computation's first caller.
        unknown_loops: loops whose trip count is not known, with the reason and their runs.
        choices: texts about branches of different cost, and how often each choice was made.
    """

    def __init__(
        self,
        module: HloModule,
        order: Sequence[str],
        calls: Mapping[str, Sequence[HloInstruction]],
        flops: Mapping[str, int],
        *,
        given_trip_count: Callable[[HloInstruction], int | None],
        full_module: Callable[[], HloModule | None],
    ) -> None:
        self.module = module
        self.order = order
        self.calls = calls
        self.flops = flops
        self.given_trip_count = given_trip_count
        self.evaluation = Evaluation(module, full_module, self._loop)
        self.loops: dict[tuple[int, tuple[TuplePath, ...]], Loop] = {}
        self.nodes = {name: Node(name) for name in order}  # in the empty environment
        self.plans: dict[str, _Plan] = {}
        self.resolved: dict[str, dict[Node, list[Resolved]]] = defaultdict(dict)
        self.totals: dict[Node, int] = {}
        self.times: dict[str, int] = defaultdict(int)
        self.once: dict[str, int] = defaultdict(int)
        self.untaken: dict[str, int] = defaultdict(int)
        self.callers: dict[str, str] = defaultdict(str)
        self.unknown_loops: dict[int, tuple[HloInstruction, str, int]] = {}
        self.choices: Counter[str] = Counter()

    def count(self) -> None:
        """Fills the attributes."""
        for name in self.order:
            has_calls = bool(self.calls[name])
            self.plans[name] = self._plan(self.module[name]) if has_calls else _NO_CALLS
        self._resolve()
        for name in self.order:
            self._add_totals(name)
        self._run()
        self._run_once()

    # What each computation calls

    def _plan(self, computation: HloComputation) -> _Plan:
        plan = _Plan()
        for call in self.calls[computation.name]:
            callees = call.callees
            if call.opcode not in _DECIDE and not any(self.plans[name].needs for name in callees):
                plan.fixed += [self.nodes[name] for name in callees]
                continue
            if plan.part is None:
                is_entry = computation is self.module.entry
                plan.part = Slice(self.evaluation, computation, is_entry=is_entry)
            plan.planned.append(self._planned(computation, plan.part, call))
            if call.opcode == "while":
                plan.notes += self._disagreement(computation, call)
        return plan

    def _planned(self, computation: HloComputation, part: Slice, call: HloInstruction) -> _Planned:
        def registers(name: str, first: int = 0) -> list[int]:
            """Of what a callee needs; its parameter 0 is the call's operand `first`."""
            return [
                part.register(computation.operand(call, first + leaf.number), leaf.path)
                for leaf in self.plans[name].needs
            ]

        if call.opcode == "while":
            body, condition = call.loop_computations
            wanted = {
                name: [leaf.path for leaf in self.plans[name].needs] for name in (body, condition)
            }
            loop = self._loop(self.evaluation, call, (*wanted[body], *wanted[condition]))
            state = computation.operand(call, 0)
            starts = [part.register(state, path) for path in loop.paths]
            return _PlannedLoop(call, loop, starts, wanted[body], wanted[condition])
        if call.opcode == "conditional":
            chosen_by = computation.operand(call, 0)
            branches = [(name, registers(name, 1 + i)) for i, name in enumerate(call.callees)]
            return _PlannedChoice(call, chosen_by, part.register(chosen_by), branches)
        return _PlannedCall(call, [(name, registers(name)) for name in call.callees])

    def _loop(
        self, evaluation: Evaluation, instruction: HloInstruction, wanted: tuple[TuplePath, ...]
    ) -> Loop:
        key = (id(instruction), wanted)
        if key not in self.loops:
            trips = self.given_trip_count(instruction)
            if trips is None:
                trips = stated_trip_count(instruction)
            self.loops[key] = Loop(evaluation, instruction, wanted, trips)
        return self.loops[key]

    def _disagreement(self, computation: HloComputation, call: HloInstruction) -> Iterator[str]:
        """A note if the compiler states another trip count than a proof gives."""
        stated = stated_trip_count(call)
        if stated is None or self.given_trip_count(call) is not None:
            return
        loop = Loop(self.evaluation, call, (), None)
        part = Slice(self.evaluation, computation)
        state = computation.operand(call, 0)
        starts = [part.register(state, path) for path in loop.paths]
        proved = loop.count(tuple(part.initial[register] for register in starts))
        if proved is not None and proved != stated:
            where = call.op_name or call.name
            yield (
                f"while {where}: the compiler states {stated:,} iterations, its condition ends it "
                f"after {proved:,}; the compiler's number is used"
            )

    # What each computation calls in each environment

    def _resolve(self) -> None:
        entry = Node(self.module.entry.name)
        self.resolved[entry.name][entry] = []
        for name in reversed(self.order):
            plan = self.plans[name]
            for node in self.resolved[name]:
                if plan.part is None:
                    continue
                values = self._values(plan.part, node.environment)
                calls = [planned.resolve(values) for planned in plan.planned]
                self.resolved[name][node] = calls
                for call in calls:
                    for callee, _ in call.callees:
                        self.resolved[callee.name].setdefault(callee, [])
            if self.resolved[name]:
                for callee in plan.fixed:
                    self.resolved[callee.name].setdefault(callee, [])

    def _values(self, part: Slice, environment: Environment) -> list[Value]:
        try:
            return part.run(environment)
        except StepLimitError:
            return part.initial

    def _add_totals(self, name: str) -> None:
        """FLOPs of one run of a computation in each environment, with all that it calls."""
        if not self.resolved[name]:
            return
        fixed = sum([self.totals[callee] for callee in self.plans[name].fixed])
        for node, calls in self.resolved[name].items():
            self.totals[node] = self.flops[name] + fixed + sum(map(self._total, calls))

    def _total(self, call: Resolved) -> int:
        totals = [self.totals[callee] * times for callee, times in call.callees]
        return max(totals) if call.is_choice else sum(totals)

    # Runs, from callers to callees

    def _run(self) -> None:
        times: dict[Node, int] = defaultdict(int)
        untaken: dict[Node, int] = defaultdict(int)
        times[Node(self.module.entry.name)] = 1
        for name in reversed(self.order):
            for node, calls in self.resolved[name].items():
                runs, not_run = times[node], untaken[node]
                self.times[name] += runs
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
                times[callee] += self.times[name]
                untaken[callee] += self.untaken[name]
            if self.times[name]:
                self.choices.update(dict.fromkeys(self.plans[name].notes, self.times[name]))

    def _taken(self, call: Resolved) -> Node | None:
        """Of branches between which nothing decides, the most expensive one."""
        if not call.is_choice:
            return None
        return max(call.callees, key=lambda callee: self.totals[callee[0]])[0]

    def _note(self, call: Resolved, runs: int, not_run: int) -> None:
        instruction = call.instruction
        if call.reason and runs + not_run:
            _, _, before = self.unknown_loops.get(id(instruction), (instruction, "", 0))
            reason = call.reason + self._elided()
            self.unknown_loops[id(instruction)] = (instruction, reason, before + runs + not_run)
        flops = [self.totals[callee] for callee, _ in call.callees]
        if call.is_choice and runs and len(set(flops)) > 1:
            shown = ", ".join(f"{n:,}" for n in flops)
            where = instruction.op_name or instruction.name
            on = f"which one runs depends on data{self._elided()}"
            text = f"conditional {where}: branches of {shown} FLOPs; "
            self.choices[f"{text}the most expensive one is counted; {on}"] += runs

    def _elided(self) -> str:
        """What to add to a reason if a constant could not be read."""
        if not self.evaluation.elided:
            return ""
        return ", or on a table that this text elides (count the compiled program instead)"

    def _run_once(self) -> None:
        """Runs as XLA's own report counts them, with the most expensive branch of each choice."""
        totals: dict[str, int] = {}
        for name in self.order:
            called = [[totals[callee] for callee in c.callees] for c in self.calls[name]]
            totals[name] = self.flops[name] + sum(
                max(costs) if call.opcode == "conditional" else sum(costs)
                for call, costs in zip(self.calls[name], called, strict=True)
            )
        self.once[self.module.entry.name] = 1
        for name in reversed(self.order):
            if not self.once[name]:
                continue
            for call in self.calls[name]:
                callees = call.callees
                if call.opcode == "conditional":
                    callees = (max(callees, key=totals.__getitem__),)
                for callee in callees:
                    self.once[callee] += self.once[name]
                    self.callers[callee] = (
                        self.callers[callee] or call.op_name or self.callers[name]
                    )


@dataclass(frozen=True, slots=True)
class _PlannedCall:
    instruction: HloInstruction
    callees: list[tuple[str, list[int]]]

    def resolve(self, values: list[Value]) -> Resolved:
        return Resolved(self.instruction, [(_node(*callee, values), 1) for callee in self.callees])


@dataclass(frozen=True, slots=True)
class _PlannedChoice:
    instruction: HloInstruction
    chosen_by: HloInstruction
    register: int
    branches: list[tuple[str, list[int]]]

    def resolve(self, values: list[Value]) -> Resolved:
        nodes = [(_node(*branch, values), 1) for branch in self.branches]
        chosen = branch_index(self.chosen_by, len(nodes), values[self.register])
        if chosen is None:
            return Resolved(self.instruction, nodes, is_choice=True)
        return Resolved(self.instruction, [nodes[chosen]])


@dataclass(frozen=True, slots=True)
class _PlannedLoop:
    instruction: HloInstruction
    loop: Loop
    starts: list[int]
    body_needs: list[TuplePath]
    condition_needs: list[TuplePath]

    def resolve(self, values: list[Value]) -> Resolved:
        body, condition = self.instruction.loop_computations
        initial = tuple([values[register] for register in self.starts])
        if not (self.body_needs or self.condition_needs):
            trips = self.loop.count(initial)
            if trips is not None:
                return Resolved(
                    self.instruction, [(Node(body), trips), (Node(condition), trips + 1)]
                )
        run = self.loop.run(initial)
        callees: Counter[Node] = Counter()
        for state, times in run.states.items():
            callees[self._node(body, self.body_needs, state)] += times
            callees[self._node(condition, self.condition_needs, state)] += times
        callees[self._node(condition, self.condition_needs, run.final)] += 1
        reason = run.reason if run.trips is None else ""
        return Resolved(self.instruction, list(callees.items()), reason=reason)

    def _node(self, name: str, needs: list[TuplePath], state: Environment) -> Node:
        return Node(name, tuple([state[self.loop.at[path]] for path in needs]))


def _node(name: str, registers: list[int], values: list[Value]) -> Node:
    return Node(name, tuple([values[register] for register in registers]))
