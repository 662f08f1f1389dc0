"""What the decisions of a jaxpr, and some of its results, are computed from.

A decision is how often a loop with work runs, and which of several branches with different work
does. Only the equations that these depend on are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mfu_jax.flops.traced.integers.arithmetic import is_evaluable
from mfu_jax.flops.traced.known_values import is_integer
from mfu_jax.flops.traced.primitive_kinds import has_work, is_call
from mfu_jax.flops.traced.tracing import inner_jaxprs
from mfu_jax.jax_internals import Literal, scan_groups

# Several results, each a part of an operand.
PARTS = {"optimization_barrier", "split", "unstack"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Need:
    """The part of a jaxpr that must be evaluated.

    Attributes:
        jaxpr: the open jaxpr.
        wanted: indices of the results that are wanted.
        inputs: indices of the inputs that it reads.
        steps: its equations in order, and the indices of their results that it reads.
        decisive: variables whose values settle every decision inside the jaxpr.
    """

    jaxpr: Any
    wanted: frozenset[int]
    inputs: frozenset[int]
    steps: tuple[tuple[Any, tuple[int, ...]], ...]
    decisive: tuple[Any, ...]


class Scan(NamedTuple):
    """The parts of a `scan` equation."""

    body: Any
    consts: int
    carries: int
    length: int
    reverse: bool


class While(NamedTuple):
    """The parts of a `while` equation; its operands are both groups of constants, and the carry."""

    condition: Any
    body: Any
    cond_consts: int
    body_consts: int

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The condition's constants, the body's constants, the carry."""
        start = self.cond_consts + self.body_consts
        consts = operands[: self.cond_consts], operands[self.cond_consts : start]
        return list(consts[0]), list(consts[1]), list(operands[start:])


def scan_of(eqn: Any) -> Scan:
    """The parts of a `scan` equation."""
    (body,) = inner_jaxprs(eqn.params)["jaxpr"]
    return Scan(body, *scan_groups(eqn), eqn.params["length"], eqn.params["reverse"])


def while_of(eqn: Any) -> While:
    """The parts of a `while` equation."""
    inner = inner_jaxprs(eqn.params)
    (condition,), (body,) = inner["cond_jaxpr"], inner["body_jaxpr"]
    return While(condition, body, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])


class Needs:
    """Finds the `Need` of each jaxpr once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, frozenset[int], bool], Need] = {}
        self._work: dict[int, tuple[Any, bool]] = {}

    def of(self, jaxpr: Any, wanted: Iterable[int] = (), *, decides: bool = False) -> Need:
        """What the wanted results depend on, and with `decides` every decision inside."""
        key = id(jaxpr), frozenset(wanted), decides
        if key not in self._found:
            self._found[key] = self._of(jaxpr, frozenset(wanted), decides)
        return self._found[key]

    def scan_body(self, scan: Scan, wanted: Iterable[int], *, decides: bool) -> Need:
        """The need of a scan's body; the entries of the carry that it reads are wanted, too."""
        return self.loop_body(scan.body, scan.consts, scan.carries, wanted, decides=decides)

    def while_condition(self, loop: While) -> Need:
        """The need of a while loop's condition."""
        return self.of(loop.condition, [0])

    def while_body(self, loop: While, wanted: Iterable[int], *, decides: bool) -> Need:
        """The need of a while loop's body; what the condition reads is wanted, too."""
        tested = {i - loop.cond_consts for i in self._condition_inputs(loop, decides)}
        carries = len(loop.body.invars) - loop.body_consts
        wanted = {*wanted, *(i for i in tested if i >= 0)}
        return self.loop_body(loop.body, loop.body_consts, carries, wanted, decides=decides)

    def _condition_inputs(self, loop: While, decides: bool) -> frozenset[int]:
        return self.of(loop.condition, [0], decides=decides).inputs

    def loop_body(
        self, body: Any, consts: int, carries: int, wanted: Iterable[int], *, decides: bool
    ) -> Need:
        """The need of a loop's body; the entries of the carry that it reads are wanted, too."""
        wanted = set(wanted)
        while True:
            need = self.of(body, wanted, decides=decides)
            read = {i - consts for i in need.inputs if consts <= i < consts + carries}
            if read <= wanted:
                return need
            wanted |= read

    def _of(self, jaxpr: Any, wanted: frozenset[int], decides: bool) -> Need:
        needed = {v for i in wanted if _can_be_known(v := jaxpr.outvars[i])}
        steps: list[tuple[Any, tuple[int, ...]]] = []
        decisive: dict[Any, None] = {}  # in an order that does not depend on what is wanted
        for eqn in reversed(jaxpr.eqns):
            results = tuple(i for i, v in enumerate(eqn.outvars) if v in needed)
            if results:
                steps.append((eqn, results))
                needed.update(_variables(eqn, self._operands(eqn, results)))
            if decides and has_work(eqn, self._work):
                deciding = _variables(eqn, self.deciding(eqn))
                decisive.update(dict.fromkeys(deciding))
                needed.update(deciding)
        return Need(
            jaxpr=jaxpr,
            wanted=wanted,
            inputs=frozenset(i for i, v in enumerate(jaxpr.invars) if v in needed),
            steps=tuple(reversed(steps)),
            decisive=tuple(decisive),
        )

    def _operands(self, eqn: Any, results: Sequence[int]) -> Iterable[int]:
        """Indices of the operands that some of an equation's results depend on."""
        name = eqn.primitive.name
        if name == "cond":
            return self._cond(eqn, results, False)
        if name == "scan":
            return self._scan(eqn, results, False)
        if name == "while":
            return self._while(eqn, results, False)
        if is_call(eqn):
            ((jaxpr,),) = inner_jaxprs(eqn.params).values()
            return self.of(jaxpr, results).inputs
        is_known = name in PARTS or (len(eqn.outvars) == 1 and is_evaluable(eqn))
        return range(len(eqn.invars)) if is_known else ()

    def deciding(self, eqn: Any) -> Iterable[int]:
        """Indices of the operands that the decisions inside an equation depend on."""
        name = eqn.primitive.name
        if name == "pallas_call":
            return range(eqn.params["grid_mapping"].num_index_operands)
        if name == "cond":
            return self._cond(eqn, (), True)
        if name == "scan":
            return self._scan(eqn, (), True)
        if name == "while":
            return self._while(eqn, (), True)
        inner = [j for jaxprs in inner_jaxprs(eqn.params).values() for j in jaxprs]
        if len(inner) != 1 or len(inner[0].invars) != len(eqn.invars):
            return ()
        return self.of(inner[0], decides=True).inputs

    def _cond(self, eqn: Any, results: Sequence[int], decides: bool) -> set[int]:
        inputs = (
            self.of(branch, results, decides=decides).inputs
            for branch in inner_jaxprs(eqn.params)["branches"]
        )
        return {0, *(i + 1 for indices in inputs for i in indices)}

    def _scan(self, eqn: Any, results: Sequence[int], decides: bool) -> set[int]:
        scan = scan_of(eqn)
        need = self.scan_body(scan, results, decides=decides)
        carried = {i + scan.consts for i in need.wanted if i < scan.carries}
        return {*need.inputs, *carried}

    def _while(self, eqn: Any, results: Sequence[int], decides: bool) -> set[int]:
        loop = while_of(eqn)
        need = self.while_body(loop, results, decides=decides)
        tested = {i for i in self._condition_inputs(loop, decides) if i < loop.cond_consts}
        carried = {i + loop.cond_consts + loop.body_consts for i in need.wanted}
        return {*tested, *(i + loop.cond_consts for i in need.inputs), *carried}


def _can_be_known(atom: Any) -> bool:
    return not isinstance(atom, Literal) and is_integer(atom.aval)


def _variables(eqn: Any, operands: Iterable[int]) -> list[Any]:
    return [v for i in sorted(operands) if _can_be_known(v := eqn.invars[i])]
