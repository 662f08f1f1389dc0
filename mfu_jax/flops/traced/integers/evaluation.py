"""Evaluates the integer part of a jaxpr: calls, branches, and loops up to a fixed length."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mfu_jax.flops.traced.integers.arithmetic import evaluate, typed, where
from mfu_jax.flops.traced.integers.arrays import parts_of
from mfu_jax.flops.traced.integers.devices import Devices
from mfu_jax.flops.traced.integers.exchanges import EXCHANGES
from mfu_jax.flops.traced.integers.known_values import Known, scalar
from mfu_jax.flops.traced.integers.needs import PARTS, EvaluationStep, Need, Needs
from mfu_jax.flops.traced.integers.places import (
    ByPlace,
    any_place,
    at_each,
    at_place,
    content,
    equal,
    is_known,
    together,
)
from mfu_jax.flops.traced.integers.proofs import prove
from mfu_jax.flops.traced.integers.shards import joined
from mfu_jax.flops.traced.jaxprs import Branches, InlinedCall, Scan, Shards, While
from mfu_jax.util.jax_internals import Literal

LONGEST_LOOP = 50_000  # iterations of one loop that are evaluated
_MOST_EQUATIONS = 1_000_000  # per count: about ten seconds
_MOST_SPECULATED = 10_000  # of these in code that may never run

# A GPU block may take over the work of one that has not started. If each does its own, the total
# work is the same.
_TAKES_OVER = "query_cluster_cancel"

IntegerValues = dict[Any, Known]  # by variable
Visit = Callable[
    [IntegerValues, Known], None
]  # Known: whether the loop runs, by place if that differs


class IntegerEvaluator:
    """Evaluates the integers that do not depend on data.

    Args:
        constants: known values of constants inside the jaxprs, by variable.

    Attributes:
        devices: the devices whose integers these are.
    """

    def __init__(self, constants: Mapping[Any, Known] | None = None) -> None:
        self.constants = constants or {}
        self.devices = Devices()
        self.needs = Needs()
        self._left = _MOST_EQUATIONS
        self._literals: dict[int, tuple[Any, Known]] = {}

    def run(self, need: Need, known: Sequence[Known]) -> IntegerValues:
        """The values of the variables in a need.

        Args:
            need: what to evaluate.
            known: a value or None for each input of the need's jaxpr.
        """
        self._left -= (len(need.steps) + 1) * max(1, len(self.devices.places))
        values: IntegerValues = {need.jaxpr.invars[i]: known[i] for i in need.inputs}
        for step in need.steps:
            operands = [self.read(values, atom) for atom in step.eqn.invars]
            found = self.results(step, operands)
            values.update(zip(step.variables, found, strict=True))
        return values

    def read(self, values: Mapping[Any, Known], atom: Any) -> Known:
        """The value of a variable or literal."""
        if not isinstance(atom, Literal):
            found = values.get(atom)
            return self.constants.get(atom) if found is None else found
        if id(atom) not in self._literals:
            self._literals[id(atom)] = atom, typed(scalar(atom.val), atom.aval)
        return self._literals[id(atom)][1]

    def outputs(
        self, need: Need, known: Sequence[Known], visit: Visit | None = None, runs: Known = True
    ) -> dict[int, Known]:
        """The wanted results of a need's jaxpr, by index; `visit` sees all values."""
        values = self.run(need, known)
        if visit is not None:
            visit(values, runs)
        return {i: self.read(values, need.jaxpr.outvars[i]) for i in need.wanted}

    def results(self, step: EvaluationStep, operands: Sequence[Known]) -> list[Known]:
        """The wanted results of an equation."""
        inner, wanted = step.inner, step.results
        if self.devices.places and not step.is_joint:
            if step.asks or any(isinstance(value, ByPlace) for value in operands):
                return self._at_each(step, operands)
            with self.devices.alone():
                return self.results(step, operands)
        if isinstance(inner, Branches):
            return self._cond(inner, operands, wanted)
        if isinstance(inner, Scan):
            found = self.scan(inner, operands, wanted)
        elif isinstance(inner, While):
            found = self.while_loop(inner, operands, wanted)[1]
        elif isinstance(inner, Shards):
            found = self._shards(step.eqn, inner, operands, wanted)
        elif isinstance(inner, InlinedCall):
            found = self.outputs(self.needs.of(inner.jaxpr, wanted), operands)
        elif step.eqn.primitive.name in PARTS:
            parts = parts_of(step.eqn, operands)
            return [parts[i] for i in wanted]
        elif step.eqn.primitive.name in EXCHANGES:
            return [self.devices.exchange(step.eqn, i, operands[i]) for i in wanted]
        elif step.eqn.primitive.name == "axis_index":
            return [self.devices.axis_index(step.eqn)]
        elif step.eqn.primitive.name == _TAKES_OVER:
            last = len(step.eqn.outvars) - 1
            return [np.False_ if i == last else None for i in wanted]
        else:
            return [evaluate(step.eqn, operands)]
        return [found.get(i) for i in wanted]

    def _at_each(self, step: EvaluationStep, operands: Sequence[Known]) -> list[Known]:
        """The results of an equation at each place, if no device needs another's integers."""
        found = [
            self.results(step, [at_place(value, number) for value in operands])
            for number in self.devices.each()
        ]
        return [together(values) for values in zip(*found, strict=True)]

    def _shards(
        self, eqn: Any, inner: Shards, operands: Sequence[Known], wanted: Sequence[int]
    ) -> dict[int, Known]:
        need = self.needs.of(inner.jaxpr, wanted)

        def run(values: Sequence[Known]) -> dict[int, Known]:
            found = self.outputs(need, values)
            return {i: at_place(v, self.devices.number) for i, v in found.items()}

        found = self.devices.by_place(eqn, operands, run)
        return {i: joined(eqn, i, [(share, v[i]) for share, v in found]) for i in wanted}

    def _cond(
        self, inner: Branches, operands: Sequence[Known], wanted: Sequence[int]
    ) -> list[Known]:
        index, *rest = operands
        needs = [self.needs.of(branch, wanted) for branch in inner.branches]
        chosen = at_each(lambda i: chosen_branch(i, len(needs)), index)
        if isinstance(chosen, int):
            found = self.outputs(needs[chosen], rest)
            return [found[i] for i in wanted]
        with self._speculating():
            tried = [self.outputs(need, rest) for need in needs]
        return [at_each(_one_of, chosen, *(found[i] for found in tried)) for i in wanted]

    def scan(
        self,
        scan: Scan,
        operands: Sequence[Known],
        wanted: Sequence[int],
        visit: Visit | None = None,
    ) -> dict[int, Known]:
        """The wanted results of a scan, except those that depend on data.

        Args:
            scan: the parts of the scan.
            operands: values of its operands.
            wanted: indices of the results.
            visit: receives the values in each iteration, including those that decide its work.

        Raises:
            TooLongError: there is a `visit`, but the scan has too many iterations to evaluate.
        """
        need = self.needs.scan_body(scan, wanted, decides=visit is not None)
        consts = list(operands[: scan.consts])
        carry = dict(enumerate(operands[scan.consts : scan.consts + scan.carries]))
        slices = operands[scan.consts + scan.carries :]
        stacks: dict[int, list[Known]] = {i: [] for i in need.wanted if i >= scan.carries}
        steps = range(scan.length)
        for step in reversed(steps) if scan.reverse else steps:
            if scan.length > LONGEST_LOOP or not self._may_go_on():
                return self.unchanged(need, consts, carry, len(slices), visit)
            inputs = [*consts, *carry.values(), *(at_each(_slice_of(step), v) for v in slices)]
            results = self.outputs(need, inputs, visit)
            carry = {i: results.get(i) for i in carry}
            for i, stack in stacks.items():
                stack.append(results[i])
        found = {i: carry[i] for i in need.wanted if i < scan.carries}
        order = -1 if scan.reverse else 1
        return found | {i: at_each(_stack, *stack[::order]) for i, stack in stacks.items()}

    def while_loop(
        self,
        loop: While,
        operands: Sequence[Known],
        wanted: Sequence[int],
        visit: Visit | None = None,
    ) -> tuple[Known, dict[int, Known]]:
        """Trip count of a while loop (None if it depends on data), and its wanted results.

        Args:
            loop: the parts of the loop.
            operands: values of its operands. A scalar inside a Pallas kernel may have one value per
                program of the grid; then so does the trip count.
            wanted: indices of the results.
            visit: receives the values in each iteration, including those that decide its work.

        Raises:
            TooLongError: there is a `visit`, but not all iterations can be evaluated.
        """
        test = self.needs.of(loop.condition, [0])
        need = self.needs.while_body(loop, wanted, decides=visit is not None)
        fixed, consts, start = loop.split(operands)
        carry = dict(enumerate(start))
        is_entered = self.outputs(test, [*fixed, *start])[0]
        is_joint = bool(self.devices.places) and (test.is_joint or need.is_joint)
        is_joint |= any(isinstance(value, ByPlace) for value in operands)
        if visit is None and not is_joint and is_entered is not None and np.any(is_entered):
            proof = prove(self, loop, test, need, operands)
            if proof is not None:
                return proof
        trips: Any = np.int64(0)
        runs: Any = np.True_
        earlier: Any = None
        for step in range(LONGEST_LOOP + 1):
            state = _state(carry, need)
            if state is not None and state == earlier:
                break  # an endless loop
            if step & (step - 1) == 0:
                earlier = state
            holds = self.outputs(test, [*fixed, *carry.values()])[0]
            if not is_known(holds) or not self._may_go_on():
                break
            holds = at_each(operator.and_, runs, holds)
            # Batched by vmap, it runs while the condition holds for any example.
            is_batched = loop.condition.outvars[0].aval.shape != ()
            runs = at_each(np.any, holds) if is_batched else holds
            if not any_place(runs):
                return trips, {i: carry[i] for i in need.wanted}
            trips = at_each(_and_one_more, trips, runs)
            results = self.outputs(need, [*consts, *carry.values()], visit, runs)
            carry = {i: at_each(where, holds, results.get(i), v) for i, v in carry.items()}
        return None, self.unchanged(need, consts, dict(enumerate(start)), 0, visit)

    def _may_go_on(self) -> bool:
        return self._left >= 0

    @contextlib.contextmanager
    def _speculating(self) -> Iterator[None]:
        """Limits the evaluation of code that may never run, and whose loops may never end."""
        before = self._left
        granted = self._left = min(before, _MOST_SPECULATED)
        try:
            yield
        finally:
            self._left += before - granted

    def unchanged(
        self,
        need: Need,
        consts: list[Known],
        carry: dict[int, Known],
        slices: int,
        visit: Visit | None = None,
    ) -> dict[int, Known]:
        """The carry entries of a loop that no iteration changes, None for the others.

        Args:
            need: the need of the loop's body.
            consts: values of its constants.
            carry: values of its carry before the first iteration.
            slices: number of the body's inputs after these, which are unknown.
            visit: what waits for the values in each iteration.

        Raises:
            TooLongError: there is a `visit`.
        """
        if visit is not None:
            raise TooLongError
        while True:
            with self._speculating():
                after = self.outputs(need, [*consts, *carry.values(), *[None] * slices])
            kept = {i: v if equal(v, after.get(i)) else None for i, v in carry.items()}
            if all(kept[i] is v for i, v in carry.items()):
                return kept
            carry = kept


class TooLongError(Exception):
    """A loop has too many iterations to evaluate, or its condition depends on data."""


def chosen_branch(index: Known, count: int) -> Known:
    """The branch that an index selects; an array if it differs within a kernel's grid."""
    if index is None:
        return None
    chosen = np.clip(np.asarray(index).astype(np.int64), 0, count - 1)
    return chosen if chosen.ndim else int(chosen)


def _one_of(chosen: Known, *cases: Known) -> Known:
    """One of several values; if the choice is unknown, their common value or None."""
    if isinstance(chosen, int):  # at this place
        return cases[chosen]
    if any(case is None for case in cases):
        return None
    if chosen is not None:
        return np.choose(chosen, np.broadcast_arrays(*cases))
    return cases[0] if all(equal(cases[0], case) for case in cases) else None


def _state(carry: Mapping[int, Known], need: Need) -> Any:
    """What determines all further iterations of a while loop; None if part of it is unknown."""
    values = [carry[i] for i in need.wanted]
    return [content(value) for value in values] if all(map(is_known, values)) else None


def _and_one_more(trips: Any, runs: Any) -> Any:
    return trips + np.asarray(runs, np.int64)


def _slice_of(step: int) -> Callable[[Known], Known]:
    return lambda value: None if value is None else value[step]


def _stack(*slices: Known) -> Known:
    return np.stack(slices) if slices and all(v is not None for v in slices) else None


def trip_count(loop: While, operands: Sequence[Known]) -> Known:
    """Iterations of a `while` without constants of its own: a number, an array, or None.

    Args:
        loop: the parts of the loop.
        operands: values of its operands; a scalar may have one per program of a grid.
    """
    trips, _ = IntegerEvaluator().while_loop(loop, operands, ())
    return trips if trips is None or np.ndim(trips) else int(trips)
