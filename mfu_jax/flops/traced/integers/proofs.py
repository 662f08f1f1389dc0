"""Proves the trip count of a while loop whose counters grow by constants, however large it is.

The first iteration suggests a step for each carry entry that the condition depends on. It is
proved by induction: given `start + k·step`, the body's own equations give `start + (k + 1)·step`,
and no intermediate value leaves its dtype's range before the condition fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfu_jax.flops.traced.integers.arithmetic import typed
from mfu_jax.flops.traced.integers.known_values import Known, is_float
from mfu_jax.flops.traced.jaxprs import InlinedCall, Scan, While

if TYPE_CHECKING:
    from mfu_jax.flops.traced.integers.evaluation import IntegerEvaluator
    from mfu_jax.flops.traced.integers.needs import EvaluationStep, Need


class LinearValue(NamedTuple):
    """An integer that grows by a constant: start + k·step in iteration k.

    Both are Python ints, or arrays of them with one per program of a kernel's grid.
    """

    start: Any
    step: Any

    def at(self, k: Any) -> Any:
        return self.start + k * self.step


class Until(NamedTuple):
    """A condition that holds in iterations 0 … count − 1 and fails in iteration `count`."""

    count: Any


_NEVER = None  # `Until.count` of a condition that never fails
_LINEAR = {"add", "sub", "mul", "neg"}
_SAME = {"convert_element_type", "copy", "copy_p", "multiple_of", "name", "pvary", "squeeze",
         "reshape"}  # fmt: skip
_COMPARISONS = {"lt", "le", "gt", "ge", "ne"}


def prove(
    integers: IntegerEvaluator, loop: While, test: Need, body: Need, operands: Sequence[Known]
) -> tuple[Known, dict[int, Known]] | None:
    """The trip count, and the final values of what the condition depends on.

    Args:
        integers: evaluates whatever does not change.
        loop: the parts of the loop.
        test: the need of its condition.
        body: the need of its body.
        operands: values of the loop's operands.

    Returns:
        None if the condition does not follow from counters that grow by constants.
    """
    if any(isinstance(step.inner, Scan | While) for step in body.steps):
        return None  # a nested loop yields no line, and may be long
    fixed, consts, start = loop.split(operands)
    lines = _suggested_lines(integers, loop, body, consts, start)
    if lines is None:
        return None
    carry = [lines.get(i) for i in range(len(start))]
    before, after = _Proof(integers), _Proof(integers)
    for i, found in before.outputs(body, [*consts, *carry]).items():
        if not _is_next(found, lines[i]):
            return None
    holds = after.outputs(test, [*fixed, *carry])[0]
    if not isinstance(holds, Until) or holds.count is _NEVER:
        return None
    count = holds.count
    if not (before.stays_in_range(_map(lambda n: max(n - 1, 0), count))
            and after.stays_in_range(count)):  # fmt: skip
        return None
    final = {i: _final(line, count, loop.body.outvars[i].aval) for i, line in lines.items()}
    return _as_known(count), final


def _suggested_lines(
    integers: IntegerEvaluator, loop: While, body: Need, consts: list[Known], start: list[Known]
) -> dict[int, Any] | None:
    """Each needed carry entry as a line, from its first two values."""
    if any(start[i] is None for i in body.wanted):
        return None
    after = integers.outputs(body, [*consts, *start])
    lines: dict[int, Any] = {}
    for i in body.wanted:
        aval = loop.body.outvars[i].aval
        first, second = typed(start[i], aval), after[i]
        if first is None or second is None:
            return None
        if np.array_equal(first, second):
            lines[i] = first
        elif aval.shape == () and aval.dtype.kind in "iu":
            lines[i] = LinearValue(_exact(first), _exact(second) - _exact(first))
        else:
            return None
    return lines


class _Proof:
    """Follows lines through a jaxpr and remembers each one, to check that it stays in its dtype."""

    def __init__(self, integers: IntegerEvaluator) -> None:
        self.integers = integers
        self.lines: list[tuple[LinearValue, Any]] = []

    def outputs(self, need: Need, known: Sequence[Any]) -> dict[int, Any]:
        """The wanted results: known values, lines, conditions, or None."""
        values: dict[Any, Any] = {need.jaxpr.invars[i]: known[i] for i in need.inputs}
        for step in need.steps:
            operands = [self.integers.read(values, atom) for atom in step.eqn.invars]
            found = self._results(step, operands)
            values.update(zip(step.variables, found, strict=True))
        return {i: self.integers.read(values, need.jaxpr.outvars[i]) for i in need.wanted}

    def stays_in_range(self, last: Any) -> bool:
        """Whether every line stays in its dtype's range in iterations 0 … `last`."""
        return all(
            np.all((line.at(k) >= limits.min) & (line.at(k) <= limits.max))
            for line, dtype in self.lines
            for limits in [np.iinfo(dtype)]
            for k in (0, last)
        )

    def _results(self, step: EvaluationStep, operands: list[Any]) -> list[Any]:
        if not any(isinstance(v, LinearValue | Until) for v in operands):
            return self.integers.results(step, operands)
        if isinstance(step.inner, InlinedCall):
            found = self.outputs(self.integers.needs.of(step.inner.jaxpr, step.results), operands)
            return [found[i] for i in step.results]
        if len(step.eqn.outvars) != 1 or any(v is None for v in operands):
            return [None] * len(step.results)
        found = _apply(step.eqn, operands)
        if isinstance(found, LinearValue):
            self.lines.append((found, step.eqn.outvars[0].aval.dtype))
        return [found]


def _apply(eqn: Any, operands: list[Any]) -> Any:
    """The result of an equation on lines and conditions."""
    name = eqn.primitive.name
    aval = eqn.outvars[0].aval
    if aval.shape != () or any(is_float(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return None
    if name in _SAME and (isinstance(operands[0], Until) == (aval.dtype == bool)):
        return operands[0]
    if name == "and" and aval.dtype == bool:
        return _both(*operands)
    if any(isinstance(v, Until) for v in operands):
        return None
    lines = [v if isinstance(v, LinearValue) else LinearValue(_exact(v), 0) for v in operands]
    if name in _COMPARISONS:
        return _first_failure(name, LinearValue(*(a - b for a, b in zip(*lines, strict=True))))
    return _combine(name, lines) if name in _LINEAR else None


def _combine(name: str, lines: list[LinearValue]) -> LinearValue | None:
    a, b = lines if len(lines) == 2 else (LinearValue(0, 0), *lines)
    if name == "add":
        return LinearValue(a.start + b.start, a.step + b.step)
    if name in ("sub", "neg"):
        return LinearValue(a.start - b.start, a.step - b.step)
    if np.any(a.step != 0) and np.any(b.step != 0):
        return None
    return LinearValue(a.start * b.start, a.step * b.start + a.start * b.step)


def _both(a: Any, b: Any) -> Any:
    """The conjunction of two conditions: it fails as soon as one of them does."""
    counts = [v.count if isinstance(v, Until) else _map(_from_bool, v) for v in (a, b)]
    present = [count for count in counts if count is not _NEVER]
    if len(present) < 2:
        return Until(present[0] if present else _NEVER)
    return Until(_map(min, *present))


def _from_bool(value: Any) -> int | None:
    return _NEVER if value else 0


def _first_failure(name: str, difference: LinearValue) -> Until | None:
    """The first k for which the comparison `name` of start + k·step with 0 fails."""
    found = _map(lambda start, step: _fails(name, start, step), *difference)
    if np.ndim(found) and any(count is _NEVER for count in found.flat):
        return None
    return Until(found)


def _fails(name: str, start: int, step: int) -> int | None:
    if name in ("gt", "ge"):
        return _fails({"gt": "lt", "ge": "le"}[name], -start, -step)
    if name == "ne":
        is_met = start == 0 or (step != 0 and start % step == 0 and -start // step > 0)
        return (-start // step if start else 0) if is_met else _NEVER
    bound = 0 if name == "lt" else 1  # fails from the first value ≥ bound
    if start >= bound:
        return 0
    return -((start - bound) // step) if step > 0 else _NEVER


def _is_next(found: Any, line: Any) -> bool:
    """Whether a result is the expected value of a carry entry one iteration later."""
    if isinstance(line, LinearValue):
        return isinstance(found, LinearValue) and bool(
            np.all(found.start == line.at(1)) and np.all(found.step == line.step)
        )
    return not isinstance(found, LinearValue | Until | None) and np.array_equal(found, line)


def _final(line: Any, count: Any, aval: Any) -> Known:
    return typed(_as_known(line.at(count)), aval) if isinstance(line, LinearValue) else line


def _exact(value: Any) -> Any:
    """Converts to Python ints, which do not overflow."""
    return np.asarray(value).astype(object) if np.ndim(value) else int(value)


def _as_known(count: Any) -> Known:
    return count.astype(np.int64) if np.ndim(count) else int(count)


def _map(function: Any, *values: Any) -> Any:
    """Applies a function of ints to ints, or elementwise to arrays of them."""
    if not any(np.ndim(v) for v in values):
        return function(*values)
    return np.frompyfunc(function, len(values), 1)(*values)
