"""The purpose of undifferentiated work in a training step: optimizer, evaluation, or loss.

Names do not tell: a layer may be called ``optimizer``, and a forward pass after the update looks
like any other. What a value is computed from and what uses it do tell. `traced` and `executed` each
describe a program as a list of `ProgramValue`s; this module defines the purposes.

It is shared deliberately: two definitions of an evaluation could differ with neither count wrong.
A mistake here moves FLOPs between phases of both counts alike, never in or out of their totals;
the expected phases of the audit's programs are therefore written by hand. The search for a
program's operands, inputs and gradients, where a count can go wrong, is implemented twice.

`value_graph` in traced/ and executed/attribution/ describe programs to it; programs of the tests
are in tests/support/audit_programs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Purpose = Literal["forward", "evaluation", "optimizer"]

# If one matmul serves several purposes in different calls, the last of these counts.
_ORDER: tuple[Purpose, ...] = ("evaluation", "forward", "optimizer")


class ProgramValue(NamedTuple):
    """One value of a program, made by one operation.

    Attributes:
        operands: positions of the values that it is computed from, all before its own.
        size: its number of elements.
        site: identifies an undifferentiated matmul; 0 for everything else.
        is_input: whether it is an input of the program.
        is_moved: whether it holds its operands' elements, only moved, cast, or scaled.
        is_differentiated: made inside a function under differentiation, or by its backward pass.
        is_gradient: whether it is the result of a backward matmul.
    """

    operands: tuple[int, ...]
    size: int
    site: int = 0
    is_input: bool = False
    is_moved: bool = False
    is_differentiated: bool = False
    is_gradient: bool = False


def classify(values: Sequence[ProgramValue]) -> dict[int, Purpose]:
    """The purpose of each undifferentiated matmul of a program, by `ProgramValue.site`.

    - optimizer: it becomes part of a weight's update, or uses gradients and no updated weight;
    - forward: the differentiated function uses it (a rollout, a teacher), or nothing is
      differentiated;
    - evaluation: anything else, with the old weights or with the updated ones.

    A weight is an input that differentiated work uses; its update is computed from it, element by
    element, and from gradients. Scalars are not part of an update: a learning rate may depend on
    an evaluation's loss.
    """
    graph = _WeightUses(values)
    found: dict[int, Purpose] = {}
    for number, value in enumerate(values):
        if value.site:
            both = (graph.purpose(number), found.get(value.site, _ORDER[0]))
            found[value.site] = max(both, key=_ORDER.index)
    return found


class _WeightUses:
    """Follows weights and gradients forward, and what uses a value backward."""

    def __init__(self, values: Sequence[ProgramValue]) -> None:
        self.values = values
        self.trains = any(value.is_gradient for value in values)
        self.inputs = self._inputs()
        self.weights = self._weights()
        self.uses_gradients = [False] * len(values)
        self.updated = [False] * len(values)
        self.updates: set[int] = set()
        self._follow()
        self.is_used = [False] * len(values)  # by the differentiated function
        self.becomes_update = [False] * len(values)
        self._follow_back()

    def purpose(self, number: int) -> Purpose:
        if not self.trains:
            return "forward"
        only_gradients = self.uses_gradients[number] and not self.updated[number]
        if self.becomes_update[number] or only_gradients:
            return "optimizer"
        return "forward" if self.is_used[number] else "evaluation"

    def _inputs(self) -> list[int | None]:
        """The input that each value is a moved, cast or scaled copy of, if any."""
        inputs: list[int | None] = []
        for number, value in enumerate(self.values):
            of_operands = [inputs[o] for o in value.operands] if value.is_moved else []
            moved = next((i for i in of_operands if i is not None), None)
            inputs.append(number if value.is_input else moved)
        return inputs

    def _weights(self) -> set[int | None]:
        used = {
            self.inputs[operand]
            for value in self.values
            if value.is_differentiated
            for operand in value.operands
        }
        return used - {None}

    def _is_weight(self, number: int, size: int) -> bool:
        is_old = not self.uses_gradients[number]
        same_size = self.values[number].size == size
        return is_old and same_size and self.inputs[number] in self.weights

    def _follow(self) -> None:
        for number, value in enumerate(self.values):
            uses = [self.uses_gradients[o] for o in value.operands]
            self.uses_gradients[number] = value.is_gradient or any(uses)
            self.updated[number] = any(self.updated[o] for o in value.operands)
            if not any(uses) or value.is_differentiated or value.site:
                continue
            if any(self._is_weight(o, value.size) for o in value.operands):
                self.updated[number] = True
                self.updates.add(number)

    def _follow_back(self) -> None:
        for number in range(len(self.values) - 1, -1, -1):
            value = self.values[number]
            used = value.is_differentiated or self.is_used[number]
            updates = number in self.updates or self.becomes_update[number]
            for operand in value.operands:
                self.is_used[operand] |= used
                if updates and not value.is_differentiated and self.values[operand].size > 1:
                    self.becomes_update[operand] = True
