"""Where a value of a program goes, and where it comes from: through tuples, fusions and loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mfu_jax.flops.executed.hlo.module import (
    INSIDE,
    HloComputation,
    HloInstruction,
    HloModule,
)
from mfu_jax.flops.executed.hlo.shapes import Shape

_MOST_VISITS = 4000
_BARRIERS = ("opt-barrier", "optimization-barrier")
# Collectives that XLA combines: each result is of the operand at its place. The tuple of those
# that start has the operands first, but for an all-reduce's.
_WITH_OPERANDS = ("all-gather-start", "reduce-scatter-start", "collective-permute-start")
_COMBINED = frozenset(
    "all-reduce all-reduce-start all-gather reduce-scatter collective-permute".split()
).union(_WITH_OPERANDS)
RESULT = "program result"


class Use(NamedTuple):
    """One use of a value.

    Attributes:
        computation: of the user.
        user: the instruction; at the program's end its root, with `operand` −1.
        operand: which of its operands the value is.
        path: indices to the value in the operand, if that is a tuple.
    """

    computation: HloComputation
    user: HloInstruction
    operand: int
    path: tuple[int, ...] = ()


class Value(NamedTuple):
    """An instruction's result, or the array at `path` of its tuple."""

    computation: HloComputation
    instruction: HloInstruction
    path: tuple[int, ...] = ()

    @property
    def array(self) -> Shape:
        """Its shape; of a tuple, that of the first array."""
        shape = self.instruction.shape
        for index in self.path:
            shape = shape.elements[index] if index < len(shape.elements) else shape
        return next(shape.leaves(), shape)


def uses(module: HloModule, value: Value) -> Iterator[Use | Value]:
    """The direct uses of a value; where it only changes its place, the value there."""
    computation, instruction, path = value
    for user in computation.users.get(instruction.name, ()):
        for number, name in enumerate(user.operands):
            if name != instruction.name:
                continue
            if user.opcode == "tuple":
                yield Value(computation, user, (number, *path))
            elif user.opcode == "get-tuple-element":
                index = int(user.attribute("index") or 0)
                if not path or path[0] == index:
                    yield Value(computation, user, path[1:])
            elif user.opcode in INSIDE and user.callees:
                inner = module[user.callees[0]]
                if number in inner.parameters:
                    yield Value(inner, inner.parameters[number], path)
            elif user.opcode == "while":
                body = module[user.loop_computations[0]]
                yield Value(body, body.parameters[0], path)
            else:
                yield Use(computation, user, number, path)
    if instruction is computation.root:
        if computation is module.entry:
            yield Use(computation, instruction, -1, path)
        elif (caller := module.caller(computation.name)) and caller[1].opcode in INSIDE:
            yield Value(*caller, path)


def only_use(module: HloModule, value: Value) -> Use | None:
    """The one instruction that uses a value; None if several do, or the program returns it."""
    for _ in range(_MOST_VISITS):
        users = value.computation.users.get(value.instruction.name, ())
        if any(user.opcode == "while" for user in users):
            break  # the condition may read it, too, and without iterations it is the result
        found = list(itertools.islice(uses(module, value), 2))
        if len(found) != 1:
            break
        (use,) = found
        if isinstance(use, Use):
            return use if use.operand >= 0 else None
        value = use
    return None


def followed(module: HloModule, value: Value, passes: Callable[[Use], bool]) -> Iterator[Use]:
    """All uses of a value, and of the results of those uses that `passes` accepts."""
    queue = [value]
    for current in _unseen(queue):
        for use in uses(module, current):
            if isinstance(use, Value):
                queue.append(use)
                continue
            yield use
            if use.operand >= 0 and passes(use):
                queue.append(Value(use.computation, use.user))


def sources(module: HloModule, value: Value, stops: Callable[[Value], bool]) -> Iterator[Value]:
    """The values that a value is made of, nearest first, up to those at which `stops` is true."""
    queue = [value]
    for current in _unseen(queue):
        if current is not value:
            yield current
            if stops(current):
                continue
        queue += made_of(module, current)


def _unseen(queue: list[Value]) -> Iterator[Value]:
    """Each value once, of a queue that grows while it is walked."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for current in queue:
        key = (id(current.instruction), current.path)
        if key not in seen and len(seen) <= _MOST_VISITS:
            seen.add(key)
            yield current


def made_of(module: HloModule, value: Value) -> Iterator[Value]:
    """The operands of a value; where it only changed its place, the value at its other place."""
    computation, instruction, path = value
    opcode = instruction.opcode
    if opcode == "get-tuple-element":
        index = int(instruction.attribute("index") or 0)
        yield Value(computation, computation.operand(instruction, 0), (index, *path))
    elif opcode == "tuple" and path:
        operand = computation.operand(instruction, path[0])
        yield Value(computation, operand, path[1:])
    elif opcode in INSIDE and instruction.callees:
        inner = module[instruction.callees[0]]
        yield Value(inner, inner.root, path)
    elif opcode == "while":
        body = module[instruction.loop_computations[0]]
        yield Value(body, body.root, path)
        yield Value(computation, computation.operand(instruction, 0), path)
    elif opcode == "parameter":
        caller = module.caller(computation.name)
        if caller and caller[1].opcode == "while":
            yield Value(caller[0], caller[0].operand(caller[1], 0), path)
            yield Value(computation, computation.root, path)
        elif caller and caller[1].opcode in INSIDE:
            number = int(instruction.operand_text)
            if number < len(caller[1].operands):
                yield Value(caller[0], caller[0].operand(caller[1], number), path)
    elif opcode in _BARRIERS:
        yield Value(computation, computation.operand(instruction, 0), path)
    elif opcode.endswith("-done"):
        start = computation.operand(instruction, 0)
        yield Value(computation, start, (1, *path) if start.opcode in _WITH_OPERANDS else path)
    else:
        operands = instruction.operands
        if path and len(operands) > 1 and opcode in _COMBINED:
            operands = operands[path[-1] : path[-1] + 1]
        for name in operands:
            yield Value(computation, computation[name])
