"""Proves the trip count of a while loop that compares a counter, however large the count is.

The body adds to a counter, or subtracts from it, what no iteration changes. In iteration k it is
start + k·step, if that leaves its dtype's range in no iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfu_jax.flops.traced.integers.arithmetic import typed
from mfu_jax.flops.traced.integers.known_values import Known
from mfu_jax.flops.traced.jaxprs import While

if TYPE_CHECKING:
    from mfu_jax.flops.traced.integers.evaluation import IntegerEvaluator
    from mfu_jax.flops.traced.integers.needs import Need


class LinearValue(NamedTuple):
    """An integer that grows by a constant: start + k·step in iteration k.

    Both are Python ints, or arrays of them with one per program of a kernel's grid.
    """

    start: Any
    step: Any

    def at(self, k: Any) -> Any:
        return self.start + k * self.step


_SIGNS = {"add": 1, "sub": -1}
_COMPARISONS = {"lt", "le", "gt", "ge", "ne"}


def prove(
    integers: IntegerEvaluator, loop: While, test: Need, body: Need, operands: Sequence[Known]
) -> tuple[Known, dict[int, Known]] | None:
    """The trip count, and the final values of what the condition depends on.

    Args:
        integers: reads constants.
        loop: the parts of the loop.
        test: the need of its condition.
        body: the need of its body.
        operands: values of the loop's operands.

    Returns:
        None if the condition is no comparison of counters and of what never changes.
    """
    condition = next((s.eqn for s in test.steps if _makes(s.eqn, loop.condition.outvars[0])), None)
    if condition is None or condition.primitive.name not in _COMPARISONS:
        return None
    fixed, consts, start = loop.split(operands)
    carried = loop.body.invars[loop.body_consts :]
    unchanged = {i: start[i] for i, v in enumerate(carried) if loop.body.outvars[i] is v}
    same = dict(zip(loop.body.invars, consts, strict=False))
    same |= {carried[i]: value for i, value in unchanged.items()}
    lines: dict[Any, Any] = {
        carried[i]: _line(integers, body, carried[i], loop.body.outvars[i], start[i], same)
        for i in body.wanted
        if i not in unchanged
    }
    tested = loop.condition.invars
    known = dict(zip(tested, fixed, strict=False))
    of_carry = zip(tested[loop.cond_consts :], carried, strict=True)
    known |= {variable: lines.get(of, same.get(of)) for variable, of in of_carry}
    sides: list[Any] = [_as_line(integers.read(known, atom), atom) for atom in condition.invars]
    if None in (*lines.values(), *sides):
        return None
    count = _first_failure(condition.primitive.name, *sides)
    if count is None or not all(_stays_in_range(*pair, count) for pair in lines.items()):
        return None
    final = {i: lines[carried[i]].at(count) for i in body.wanted if i not in unchanged}
    ends = {i: typed(_as_known(v), loop.body.outvars[i].aval) for i, v in final.items()}
    return _as_known(count), {i: ends.get(i, start[i]) for i in body.wanted}


def _makes(eqn: Any, variable: Any) -> bool:
    return any(made is variable for made in eqn.outvars)


def _line(
    integers: IntegerEvaluator,
    body: Need,
    before: Any,
    after: Any,
    start: Known,
    same: Mapping[Any, Known],
) -> LinearValue | None:
    """A carry entry to which the body adds what never changes; None for any other.

    Args:
        integers: reads constants.
        body: the need of the loop's body.
        before, after: its variables at the body's start and end.
        start: its value before the loop.
        same: values of the body's inputs that never change.
    """
    eqn = next((step.eqn for step in body.steps if _makes(step.eqn, after)), None)
    first = _as_line(start, before)
    if eqn is None or first is None or eqn.primitive.name not in _SIGNS:
        return None
    a, b = eqn.invars
    if b is before and eqn.primitive.name == "add":
        a, b = b, a
    by = _as_line(integers.read(same, b), b)
    if a is not before or by is None:
        return None
    return LinearValue(first.start, _SIGNS[eqn.primitive.name] * by.start)


def _as_line(value: Any, atom: Any) -> LinearValue | None:
    """A known integer in Python ints, which do not overflow."""
    if value is None or isinstance(value, LinearValue):
        return value
    if atom.aval.shape or atom.aval.dtype.kind not in "iu":
        return None
    return LinearValue(np.asarray(value).astype(object) if np.ndim(value) else int(value), 0)


def _stays_in_range(variable: Any, line: LinearValue, count: Any) -> bool:
    """Whether a counter stays in its dtype's range until the condition fails."""
    limits, last = np.iinfo(variable.aval.dtype), line.at(count)
    return bool(np.all((last >= limits.min) & (last <= limits.max)))


def _first_failure(name: str, a: LinearValue, b: LinearValue) -> Any:
    """The first k for which a comparison of two lines fails; None if it never does somewhere."""
    start, step = a.start - b.start, a.step - b.step
    if not (np.ndim(start) or np.ndim(step)):
        return _fails(name, start, step)
    found = np.frompyfunc(lambda start, step: _fails(name, start, step), 2, 1)(start, step)
    return None if any(count is None for count in found.flat) else found


def _fails(name: str, start: int, step: int) -> int | None:
    if name in ("gt", "ge"):
        return _fails({"gt": "lt", "ge": "le"}[name], -start, -step)
    if name == "ne":
        is_met = start == 0 or (step != 0 and start % step == 0 and -start // step > 0)
        return (-start // step if start else 0) if is_met else None
    bound = 0 if name == "lt" else 1  # fails from the first value ≥ bound
    if start >= bound:
        return 0
    return -((start - bound) // step) if step > 0 else None


def _as_known(count: Any) -> Known:
    return count.astype(np.int64) if np.ndim(count) else int(count)
