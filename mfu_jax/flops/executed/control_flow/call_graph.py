"""What each computation calls, and the few integers that this depends on: its environment.

Most computations depend on no integer and have one environment: the empty one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mfu_jax.flops.executed.control_flow.evaluation import Evaluation, StepLimitError
from mfu_jax.flops.executed.control_flow.loops import Loop, LoopRun, stated_trip_count
from mfu_jax.flops.executed.control_flow.scalar_programs import ScalarProgram
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.value_refs import DEVICE_ID, ParameterRef, TuplePath
from mfu_jax.flops.executed.integers.by_device import among, of_device
from mfu_jax.flops.executed.integers.instructions import branch_index
from mfu_jax.flops.executed.integers.values import ByDevice, Value

Environment = tuple[Value, ...]


class Node(NamedTuple):
    """A computation in an environment.

    Attributes:
        name: name of the computation.
        environment: values; those of all devices if they exchange integers in the computation.
        device: the device that runs it in that case.
    """

    name: str
    environment: Environment = ()
    device: int | None = None


class ResolvedCall(NamedTuple):
    """What one instruction runs in one environment of its computation.

    Attributes:
        instruction: the call.
        callees: what it runs, and how often.
        is_choice: whether only one of the callees runs, and which one is unknown.
        reason: why a loop's trip count is not known.
    """

    instruction: HloInstruction
    callees: Sequence[tuple[Node, int]]
    is_choice: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CallSites:
    """The calls of one computation. Most have few or none, and share the empty tuple.

    Attributes:
        scalars: computes the integers that decide what runs; None if there is nothing to decide.
        decisions: their registers.
        fixed: what runs once in every environment.
        dependent: the other calls.
    """

    scalars: ScalarProgram | None = None
    decisions: tuple[int, ...] = ()
    fixed: tuple[Node, ...] = ()
    dependent: tuple[CallSite, ...] = ()

    @property
    def needs(self) -> Collection[ParameterRef]:
        """The values that its computation's callers must pass."""
        return self.scalars.inputs if self.scalars else ()

    @property
    def is_joint(self) -> bool:
        """Whether devices exchange integers in the computation: it then needs those of all."""
        inside = any(site.is_joint for site in self.dependent)
        return inside or (self.scalars is not None and self.scalars.is_joint)

    def environment(self, inputs: Sequence[Value]) -> Environment:
        """The values of `decisions`, given values of `needs`."""
        if not self.scalars or not self.decisions:
            return ()
        try:
            values = self.scalars.run(inputs)
        except StepLimitError:
            values = self.scalars.initial
        return tuple([values[register] for register in self.decisions])


@dataclass(frozen=True, slots=True)
class Callee:
    """A computation, and the caller's registers that hold the values it needs."""

    name: str
    sites: CallSites
    at: list[int]

    def node(self, values: Sequence[Value], device: int | None) -> Node:
        inputs = [values[i] for i in self.at]
        if device is not None and not self.sites.is_joint:
            inputs = [of_device(value, device) for value in inputs]
            device = None
        environment = self.sites.environment(inputs)
        return Node(self.name, environment, device if environment else None)


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call whose callees depend on integers of its computation.

    Attributes:
        instruction: the call.
        callees: what it runs.
        reads: the registers that `resolve` reads.
    """

    instruction: HloInstruction
    callees: list[Callee]
    reads: list[int]

    @property
    def is_joint(self) -> bool:
        """Whether devices exchange integers in what it runs."""
        return any(callee.sites.is_joint for callee in self.callees)

    def resolve(self, values: list[Value], device: int | None) -> ResolvedCall:
        """What the instruction runs, given the registers of its computation's scalars.

        If they hold the values of all devices, it is what `device` runs.
        """
        nodes = [(callee.node(values, device), 1) for callee in self.callees]
        return ResolvedCall(self.instruction, nodes)


@dataclass(frozen=True, slots=True)
class BranchCall(CallSite):
    """A conditional, whose callees are its branches; it first reads what chooses one."""

    chosen_by: HloInstruction

    def resolve(self, values: list[Value], device: int | None) -> ResolvedCall:
        choices = values[self.reads[0]]
        chosen = self._branch(of_device(choices, device))
        if chosen is None:
            nodes = [(branch.node(values, device), 1) for branch in self.callees]
            return ResolvedCall(self.instruction, nodes, is_choice=True)
        if isinstance(choices, ByDevice) and self.callees[chosen].sites.is_joint:
            taken = enumerate(map(self._branch, choices.values))
            values = list(among(values, {other for other, branch in taken if branch == chosen}))
        return ResolvedCall(self.instruction, [(self.callees[chosen].node(values, device), 1)])

    def _branch(self, choice: Value) -> int | None:
        return branch_index(self.chosen_by, len(self.callees), choice)


@dataclass(frozen=True, slots=True)
class LoopCall(CallSite):
    """A loop, whose callees are its body and its condition; it reads the state before it."""

    loop: Loop

    @property
    def is_joint(self) -> bool:
        inside = any(callee.sites.is_joint for callee in self.callees)
        return inside or self.loop.is_joint

    def resolve(self, values: list[Value], device: int | None) -> ResolvedCall:
        initial = tuple([values[register] for register in self.reads])
        if device is not None and self.is_joint:
            return self._resolved(self.loop.run_jointly(initial)[device], device)
        initial = tuple([of_device(value, device) for value in initial])
        body, condition = self.callees
        if not (body.at or condition.at):
            trips = self.loop.count(initial)
            if trips is not None:
                callees = [(body.node((), None), trips), (condition.node((), None), trips + 1)]
                return ResolvedCall(self.instruction, callees)
        return self._resolved(self.loop.run(initial), None)

    def _resolved(self, run: LoopRun, device: int | None) -> ResolvedCall:
        times: Counter[Node] = Counter()
        body, condition = self.callees
        for state, runs in run.states.items():
            times[body.node(state, device)] += runs
            times[condition.node(state, device)] += runs
        times[condition.node(run.final, device)] += 1
        reason = run.reason if run.trips is None else ""
        return ResolvedCall(self.instruction, list(times.items()), reason=reason)


NO_CALLS = CallSites()
_DECIDE = ("while", "conditional")  # what runs depends on an integer


class CallGraph:
    """The calls of a program's computations, added callees before callers.

    Args:
        dataflow: of the program.
        calls: the calls of each computation.
        given_trip_count: returns the trip count that the user gave for a ``while``, or None.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        calls: Mapping[str, Sequence[HloInstruction]],
        *,
        given_trip_count: Callable[[HloInstruction], int | None],
    ) -> None:
        self.module = module = dataflow.module
        self.calls = calls
        self.given_trip_count = given_trip_count
        self.devices, device_opcode = _devices(module)
        graph = weakref.proxy(self)
        self.evaluation = Evaluation(dataflow, graph, self.devices, device_opcode)
        self.branches: dict[tuple[str, TuplePath], tuple[ScalarProgram, int]] = {}
        self.loops: dict[tuple[int, tuple[TuplePath, ...]], Loop] = {}
        self.nodes: dict[str, Node] = {}  # of computations that need nothing from callers
        self.needing: set[str] = set()  # the others
        self.sites: dict[str, CallSites] = {}

    def add(self, name: str) -> None:
        """Adds a computation whose callees have been added."""
        if not self.calls[name]:
            self.sites[name], self.nodes[name] = NO_CALLS, Node(name)
            return
        sites = self.sites[name] = self._sites_of(self.module[name])
        if sites.needs:
            self.needing.add(name)
        else:
            self.nodes[name] = Node(name, sites.environment(()))

    def entries(self) -> Counter[Node]:
        """The entry as devices run it, with the number that do; 1 if all run the same."""
        name = self.module.entry.name
        if name in self.nodes:
            return Counter([self.nodes[name]])
        sites, devices = self.sites[name], range(self.devices)
        if sites.is_joint:
            environment = sites.environment([ByDevice(tuple(devices))])
            return Counter(Node(name, environment, device) for device in devices)
        nodes = Counter(Node(name, sites.environment([device])) for device in devices)
        return nodes if len(nodes) > 1 else Counter(set(nodes))

    def _sites_of(self, computation: HloComputation) -> CallSites:
        scalars: ScalarProgram | None = None
        fixed: list[Node] = []
        calls: list[CallSite] = []
        for call in self.calls[computation.name]:
            callees = call.callees
            if call.opcode not in _DECIDE and self.needing.isdisjoint(callees):
                fixed += [self.nodes[name] for name in callees]
                continue
            if scalars is None:
                is_entry = computation is self.module.entry
                scalars = ScalarProgram(self.evaluation, computation, is_entry=is_entry)
            calls.append(self._call_site(computation, scalars, call))
        decisions: list[int] = []
        if scalars:
            reads = {register for site in calls for register in site.reads}
            decisions = [i for i in sorted(reads) if i and scalars.initial[i] is None]
        return CallSites(scalars, tuple(decisions), tuple(fixed), tuple(calls))

    def _call_site(
        self, computation: HloComputation, scalars: ScalarProgram, call: HloInstruction
    ) -> CallSite:
        def callee(name: str, first: int = 0) -> Callee:
            """What a callee needs; its parameter 0 is the call's operand `first`."""
            sites = self.sites[name]
            at = [
                scalars.register(
                    call if path == DEVICE_ID else computation.operand(call, first + n), path
                )
                for n, path in sites.needs
            ]
            return Callee(name, sites, at)

        if call.opcode == "while":
            called = [(name, self.sites[name]) for name in call.loop_computations]
            wanted = tuple([parameter.path for _, sites in called for parameter in sites.needs])
            loop = self.loop(call, wanted)
            state = computation.operand(call, 0)
            starts = [scalars.register(state, path) for path in loop.paths]
            callees = [
                Callee(name, sites, [loop.at[parameter.path] for parameter in sites.needs])
                for name, sites in called
            ]
            return LoopCall(call, callees, starts, loop)
        if call.opcode == "conditional":
            chosen_by = computation.operand(call, 0)
            branches = [callee(name, 1 + i) for i, name in enumerate(call.callees)]
            reads = [scalars.register(chosen_by), *(i for branch in branches for i in branch.at)]
            return BranchCall(call, branches, reads, chosen_by)
        callees = [callee(name) for name in call.callees]
        return CallSite(call, callees, [i for callee in callees for i in callee.at])

    def loop(self, instruction: HloInstruction, wanted: tuple[TuplePath, ...]) -> Loop:
        """The part of a ``while`` that the wanted paths of its state depend on; made once."""
        key = (id(instruction), wanted)
        if key not in self.loops:
            trips = self.given_trip_count(instruction)
            if trips is None:
                trips = stated_trip_count(instruction)
            computations = (self.module[name] for name in instruction.loop_computations)
            body, condition = (ScalarProgram(self.evaluation, item) for item in computations)
            self.loops[key] = Loop(instruction, body, condition, wanted, trips)
        return self.loops[key]

    def branch(self, name: str, path: TuplePath) -> tuple[ScalarProgram, int]:
        """The program for a computation's result at `path`, and its register; made once."""
        if (name, path) not in self.branches:
            branch = ScalarProgram(self.evaluation, self.module[name])
            self.branches[name, path] = (branch, branch.root(path))
        return self.branches[name, path]


def _devices(module: HloModule) -> tuple[int, str]:
    """How many devices run a program, and the opcode that numbers them, if one does."""
    partitions, replicas = (module.header_int(key) for key in ("num_partitions", "replica_count"))
    if partitions > 1 and replicas > 1:
        return partitions * replicas, ""
    return max(partitions, replicas), "partition-id" if partitions > 1 else "replica-id"
