"""The work of loops, branches and `shard_map`s in a jaxpr."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.traced.abstract_values import AbstractValue, Values, either, join
from mfu_jax.flops.traced.integers.evaluation import LONGEST_LOOP, chosen_branch
from mfu_jax.flops.traced.integers.known_values import Known
from mfu_jax.flops.traced.integers.needs import Decided, IterationGroup
from mfu_jax.flops.traced.jaxprs import inner_jaxprs, scan_of, while_of
from mfu_jax.flops.traced.work_totals import Choice, WorkTotals, unaccounted

if TYPE_CHECKING:
    from mfu_jax.flops.traced.control_flow.decisions import Decisions


class Interpreter(Protocol):
    """What control flow needs of the interpreter that meets it; see `JaxprCounter`."""

    decisions: Decisions
    takes_decisions: bool

    def walk(
        self,
        jaxpr: Any,
        values: Sequence[AbstractValue],
        stack: str = "",
        decided: Decided | None = None,
    ) -> tuple[Values, WorkTotals]: ...

    def use_scores(self, values: Iterable[AbstractValue]) -> None: ...

    def in_branch(self, is_sure: bool) -> contextlib.AbstractContextManager[None]: ...

    def without_decisions(self) -> contextlib.AbstractContextManager[None]: ...


def scan(counter: Interpreter, eqn: Any, values: Values, stack: str, totals: WorkTotals) -> Values:
    """Adds the work of all iterations."""
    loop = scan_of(eqn)
    if counter.takes_decisions:
        groups = counter.decisions.of_scan(loop, [value.known for value in values])
    else:
        groups = [IterationGroup(Decided(), loop.length)]
    start = loop.consts + loop.carries
    slices = [value.stacked(-1) for value in values[start:]]
    values = [*values[:start], *slices]
    body = _Body(loop.body, loop.consts, loop.carries, stack)
    results = _loop_work(counter, body, values, groups, totals)
    stacked = (value.stacked(1) for value in results[loop.carries :])
    return [*results[: loop.carries], *stacked]


def while_loop(
    counter: Interpreter, eqn: Any, values: Values, stack: str, totals: WorkTotals
) -> Values:
    """Adds the work of all iterations and tests; of one iteration if their number is unknown."""
    loop = while_of(eqn)
    trips, groups = None, [IterationGroup(Decided(), 1)]
    if counter.takes_decisions:
        trips, groups = counter.decisions.of_while(loop, [value.known for value in values])
    fixed = values[: loop.cond_consts]
    inputs = values[loop.cond_consts :]
    work = WorkTotals()
    body = _Body(loop.body, loop.body_consts, len(inputs) - loop.body_consts, stack)
    results = _loop_work(counter, body, inputs, groups, work)
    _, test = counter.walk(loop.condition, [*fixed, *results], stack)
    totals.add(work)
    totals.add(test, 2 if trips is None else trips + 1)
    if trips is None and (work.total or test.total or work.unaccounted or test.unaccounted):
        reason = (
            "a while loop whose trip count depends on data, or is not proved and more than "
            f"{LONGEST_LOOP:,}: its body was counted once; use scan or fori_loop with a static "
            "bound, or add the other iterations yourself"
        )
        totals.unaccounted[unaccounted(eqn, stack, reason)] += 1
    return results


def cond(counter: Interpreter, eqn: Any, values: Values, stack: str, totals: WorkTotals) -> Values:
    """Adds the work of the branch that runs, or of the most expensive one if that is unknown."""
    branches = inner_jaxprs(eqn.params)["branches"]
    index, *operands = values
    chosen = chosen_branch(counter.decisions.devices.here(index.known), len(branches))
    if chosen is not None:
        branches = (branches[chosen],)
    with counter.in_branch(is_sure=len(branches) == 1):
        runs = [counter.walk(branch, operands, stack) for branch in branches]
    works = tuple(body for _, body in runs)
    if len(works) == 1:
        totals.add(works[0])
        return runs[0][0]
    unknown: Counter[Unaccounted] = Counter()
    for body in works:  # any of them may have unaccounted work
        unknown |= body.unaccounted
    kernels = {kernel for body in works for kernel in body.kernels}
    totals.add(WorkTotals(unaccounted=unknown, kernels=kernels))
    flops = [body.total for body in works]
    if any(flops):
        totals.choices[Choice(works, eqn, stack)] += 1  # settled once all masks are known
    if len(set(flops)) > 1:
        reason = (
            f"the branches cost {', '.join(map(str, flops))} FLOPs; which one runs depends on "
            "data, or on a loop too long to evaluate: the most expensive one was counted"
        )
        totals.unaccounted[unaccounted(eqn, stack, reason)] += 1
    results = runs[0][0]
    for other, _ in runs[1:]:
        results = [either(a, b) for a, b in zip(results, other, strict=True)]
    return results


def shard_map(
    counter: Interpreter, eqn: Any, values: Values, stack: str, totals: WorkTotals
) -> Values:
    """Adds the work of the body, which is one device's, on all devices of the manual axes."""
    (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]

    def in_parts(values: Values, whole: Sequence[Any], part: Sequence[Any]) -> Values:
        shapes = ([getattr(v.aval, "shape", ()) for v in side] for side in (whole, part))
        return list(map(AbstractValue.in_parts, values, *shapes))

    values = in_parts(values, eqn.invars, jaxpr.invars)

    def run(known: Sequence[Known]) -> tuple[Values, WorkTotals]:
        return counter.walk(jaxpr, list(map(AbstractValue.with_known, values, known)), stack)

    results: Values = []
    known = [value.known for value in values]
    for share, (found, body) in counter.decisions.devices.by_place(eqn, known, run):
        totals.add(body, share.devices)
        pairs = zip(results, found, strict=True)
        results = [either(a, b) for a, b in pairs] if results else found
    return in_parts(results, eqn.outvars, jaxpr.outvars)


class _Body(NamedTuple):
    """The body of a loop: a jaxpr (constants, carry, slices) → (carry, slices).

    Attributes:
        jaxpr: the open jaxpr.
        consts: number of constants.
        carries: number of carry entries.
        stack: the name stack around the loop.
    """

    jaxpr: Any
    consts: int
    carries: int
    stack: str


def _loop_work(
    counter: Interpreter,
    body: _Body,
    values: Sequence[AbstractValue],
    groups: Sequence[IterationGroup],
    totals: WorkTotals,
) -> Values:
    """Adds all iterations of a loop; returns the values of its body's results.

    If iterations take different decisions, the values cover all branches.

    Args:
        counter: the interpreter.
        body: the loop's body.
        values: its inputs in the first iteration.
        groups: its iterations, grouped by their decisions.
        totals: where to add the work.
    """
    if len(groups) == 1:
        ((decided, times, _),) = groups
        results, _, work = _settle(counter, body, values, decided)
        totals.add(work, times)
        return results
    with counter.without_decisions():
        results, inputs, _ = _settle(counter, body, values, Decided())
    for decided, times, _ in groups:
        found, work = counter.walk(body.jaxpr, inputs, body.stack, decided)
        counter.use_scores(found)  # `results` has these scores under other numbers
        totals.add(work, times)
    return results


def _settle(
    counter: Interpreter, body: _Body, values: Sequence[AbstractValue], decided: Decided
) -> tuple[Values, Values, WorkTotals]:
    """Walks a loop's body with a carry that holds in every iteration.

    Returns:
        The body's results, its inputs, and the work of one run.
    """
    consts, slices = values[: body.consts], values[body.consts + body.carries :]
    widened = [value.without_value() for value in values[body.consts :][: body.carries]]
    passes = 0
    while True:
        carry, inputs = widened, [*consts, *widened, *slices]
        results, work = counter.walk(body.jaxpr, inputs, body.stack, decided)
        pairs = list(zip(carry, results, strict=False))
        changed = [value for pair in pairs if pair[0] != pair[1] for value in pair]
        counter.use_scores(changed)  # each walk numbers its scores anew, so none is carried
        widened = [_carried(*pair, keeps_pattern=not passes) for pair in pairs]
        if widened == carry:
            return results, inputs, work
        passes += 1


def _carried(before: AbstractValue, after: AbstractValue, *, keeps_pattern: bool) -> AbstractValue:
    """A carry that is one of two; its pattern could move on with every iteration."""
    if before == after:
        return before
    carried = either(before.without_scores(), after.without_scores())
    return carried if keeps_pattern else join([carried])
