"""What the decisions of a jaxpr, and some of its results, are computed from.

A decision is how often a loop that does work runs, or which of several branches with different
work is taken. Only the equations that decisions depend on are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mfu_jax.flops.traced.integers.arithmetic import is_evaluable
from mfu_jax.flops.traced.integers.exchanges import EXCHANGES
from mfu_jax.flops.traced.integers.known_values import Known, can_be_known
from mfu_jax.flops.traced.jaxprs import (
    MESH_KERNELS,
    Branches,
    Inner,
    Scan,
    Shards,
    While,
    bodies,
    first_array,
    inner_of,
)
from mfu_jax.flops.traced.primitive_kinds import has_work
from mfu_jax.util.jax_internals import Literal

# Primitives with several results, each a part of an operand or a reordered operand.
PARTS = {"optimization_barrier", "sort", "split", "unstack"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Need:
    """The part of a jaxpr that must be evaluated.

    Attributes:
        jaxpr: the open jaxpr.
        wanted: indices of the wanted results.
        inputs: indices of the inputs that are read.
        steps: the equations to evaluate, in order.
        decisive: variables whose values settle every decision inside the jaxpr.
        is_joint: whether devices exchange integers in it.
        asks: whether it reads a device's place in the mesh.
    """

    jaxpr: Any
    wanted: frozenset[int]
    inputs: frozenset[int]
    steps: tuple[EvaluationStep, ...]
    decisive: tuple[Any, ...]
    is_joint: bool
    asks: bool


class EvaluationStep(NamedTuple):
    """An equation to evaluate.

    Attributes:
        eqn: the equation.
        results: indices of its results that are read.
        variables: these results.
        inner: what it runs; None for a primitive that runs no jaxpr.
        is_joint: whether devices exchange integers in it.
        asks: whether it reads a device's place in the mesh.
    """

    eqn: Any
    results: tuple[int, ...]
    variables: tuple[Any, ...]
    inner: Inner | None
    is_joint: bool
    asks: bool


class Decided(NamedTuple):
    """The known values that settle the decisions in one jaxpr.

    Attributes:
        key: equal for runs that take the same decisions.
        values: the known values, by variable.
    """

    key: tuple[Any, ...] = ()
    values: Mapping[Any, Known] = {}


class IterationGroup(NamedTuple):
    """Iterations of a loop that take the same decisions.

    Attributes:
        decided: the decisions.
        times: number of these iterations.
        running: whether the loop still runs then; by place if devices leave it at different times.
    """

    decided: Decided
    times: int
    running: Known = True


class Needs:
    """Finds the `Need` of each jaxpr, once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, frozenset[int], bool], Need] = {}
        self._work: dict[int, tuple[Any, bool]] = {}

    def of(self, jaxpr: Any, wanted: Iterable[int] = (), *, decides: bool = False) -> Need:
        """What the wanted results depend on and, with `decides`, every decision inside."""
        key = id(jaxpr), frozenset(wanted), decides
        if key not in self._found:
            self._found[key] = self._of(jaxpr, frozenset(wanted), decides)
        return self._found[key]

    def scan_body(self, scan: Scan, wanted: Iterable[int], *, decides: bool) -> Need:
        """The need of a scan's body; the carry entries that it reads are also wanted."""
        return self.loop_body(scan.body, scan.consts, scan.carries, wanted, decides=decides)

    def while_body(self, loop: While, wanted: Iterable[int], *, decides: bool) -> Need:
        """The need of a while loop's body; what the condition reads is also wanted."""
        condition = self.of(loop.condition, [0], decides=decides)
        tested = {i - loop.cond_consts for i in condition.inputs}
        carries = len(loop.body.invars) - loop.body_consts
        wanted = {*wanted, *(i for i in tested if i >= 0)}
        return self.loop_body(loop.body, loop.body_consts, carries, wanted, decides=decides)

    def loop_body(
        self, body: Any, consts: int, carries: int, wanted: Iterable[int], *, decides: bool
    ) -> Need:
        """The need of a loop's body; the carry entries that it reads are also wanted."""
        wanted = set(wanted)
        while True:
            need = self.of(body, wanted, decides=decides)
            read = {i - consts for i in need.inputs if consts <= i < consts + carries}
            if read <= wanted:
                return need
            wanted |= read

    def _of(self, jaxpr: Any, wanted: frozenset[int], decides: bool) -> Need:
        needed = {v for i in wanted if _can_be_known(v := jaxpr.outvars[i])}
        steps: list[EvaluationStep] = []
        is_joint = False
        decisive: dict[Any, None] = {}  # an order independent of what is wanted
        for eqn in reversed(jaxpr.eqns):
            results = tuple(i for i, v in enumerate(eqn.outvars) if v in needed)
            if results:
                variables = tuple(eqn.outvars[i] for i in results)
                inner, inside = inner_of(eqn), self._inside(eqn, results, decides=False)
                exchanges = eqn.primitive.name in EXCHANGES or any(n.is_joint for n in inside)
                asks = eqn.primitive.name == "axis_index" or any(n.asks for n in inside)
                steps.append(EvaluationStep(eqn, results, variables, inner, exchanges, asks))
                needed.update(_variables(eqn, self._operands(eqn, results)))
            if decides and has_work(eqn, self._work):
                deciding = _variables(eqn, self.deciding(eqn))
                decisive.update(dict.fromkeys(deciding))
                needed.update(deciding)
                is_joint |= self.decides_jointly(eqn)
        return Need(
            jaxpr=jaxpr,
            wanted=wanted,
            inputs=frozenset(i for i, v in enumerate(jaxpr.invars) if v in needed),
            steps=tuple(reversed(steps)),
            decisive=tuple(decisive),
            is_joint=is_joint or any(step.is_joint for step in steps),
            asks=any(step.asks for step in steps),
        )

    def decides_jointly(self, eqn: Any) -> bool:
        """Whether decisions inside an equation depend on integers that devices exchange there."""
        return any(need.is_joint for need in self._inside(eqn, (), decides=True))

    def _inside(self, eqn: Any, results: Sequence[int], *, decides: bool) -> list[Need]:
        """The needs of what an equation runs on the same devices."""
        inner = inner_of(eqn)
        if inner is None or isinstance(inner, Shards):
            return []
        return self._run_by(inner, results, decides)

    def _operands(self, eqn: Any, results: Sequence[int]) -> Iterable[int]:
        """Indices of the operands that the given results of an equation depend on."""
        inner = inner_of(eqn)
        if inner is not None:
            return self._inner(inner, results, False)
        if eqn.primitive.name in EXCHANGES:
            return results  # each depends on its own operand only
        is_known = eqn.primitive.name in PARTS or (len(eqn.outvars) == 1 and is_evaluable(eqn))
        return range(len(eqn.invars)) if is_known else ()

    def deciding(self, eqn: Any) -> Iterable[int]:
        """Indices of the operands that the decisions inside an equation depend on."""
        if eqn.primitive.name == "pallas_call":
            return range(first_array(eqn))
        if eqn.primitive.name in MESH_KERNELS:
            return range(len(eqn.invars))
        inner = inner_of(eqn)
        if inner is not None:
            return self._inner(inner, (), True)
        jaxprs = bodies(eqn)
        if len(jaxprs) != 1 or len(jaxprs[0].invars) != len(eqn.invars):
            return ()
        return self.of(jaxprs[0], decides=True).inputs

    def _inner(self, inner: Inner, results: Sequence[int], decides: bool) -> Iterable[int]:
        """Indices of the operands that results of what an equation runs depend on."""
        needs = self._run_by(inner, results, decides)
        if isinstance(inner, Branches):
            return {0, *(i + 1 for need in needs for i in need.inputs)}
        body = needs[0]
        if isinstance(inner, Scan):
            carried = {i + inner.consts for i in body.wanted if i < inner.carries}
            return {*body.inputs, *carried}
        if isinstance(inner, While):
            start = inner.cond_consts
            tested = {i for i in needs[1].inputs if i < start}
            carried = {i + start + inner.body_consts for i in body.wanted}
            return {*tested, *(i + start for i in body.inputs), *carried}
        return body.inputs

    def _run_by(self, inner: Inner, results: Sequence[int], decides: bool) -> list[Need]:
        """The needs of the jaxprs that an equation runs; of a loop, the body's first."""
        if isinstance(inner, Branches):
            return [self.of(branch, results, decides=decides) for branch in inner.branches]
        if isinstance(inner, Scan):
            return [self.scan_body(inner, results, decides=decides)]
        if isinstance(inner, While):
            body = self.while_body(inner, results, decides=decides)
            return [body, self.of(inner.condition, [0], decides=decides)]
        return [self.of(inner.jaxpr, results, decides=decides)]


def _can_be_known(atom: Any) -> bool:
    return not isinstance(atom, Literal) and can_be_known(atom.aval)


def _variables(eqn: Any, operands: Iterable[int]) -> list[Any]:
    return [v for i in sorted(operands) if _can_be_known(v := eqn.invars[i])]
