"""Where a value of a program goes, and where it comes from: through tuples, fusions and loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule

_MOST_VISITS = 4000
_PASSED_ON = ("parameter", "fusion", "call", "get-tuple-element")
_MOST_DEPTH = 60
_INTEGER = re.compile(r"-?\d+")
_INSIDE = ("fusion", "call", "async-start")
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
            elif user.opcode in _INSIDE and user.callees:
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
        elif (caller := module.caller(computation.name)) and caller[1].opcode in _INSIDE:
            yield Value(*caller, path)


def followed(module: HloModule, value: Value, passes: Callable[[Use], bool]) -> Iterator[Use]:
    """All uses of a value, and of the results of those uses that `passes` accepts."""
    queue = [value]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for current in queue:  # grows while it is walked
        key = (id(current.instruction), current.path)
        if key in seen or len(seen) > _MOST_VISITS:
            continue
        seen.add(key)
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
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for current in queue:
        key = (id(current.instruction), current.path)
        if key in seen or len(seen) > _MOST_VISITS:
            continue
        seen.add(key)
        if current is not value:
            yield current
            if stops(current):
                continue
        queue += made_of(module, current)


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
    elif opcode in _INSIDE and instruction.callees:
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
        elif caller and caller[1].opcode in _INSIDE:
            number = int(instruction.operand_text)
            if number < len(caller[1].operands):
                yield Value(caller[0], caller[0].operand(caller[1], number), path)
    else:
        for name in instruction.operands:
            yield Value(computation, computation[name])


def numbers_by_device(module: HloModule, value: Value, devices: int) -> np.ndarray | None:
    """The integer that each device computes from its own number, [devices]; None if not known."""
    found = _by_device(module, value, devices, 0)
    return None if found is None else np.broadcast_to(found, (devices,))


def _by_device(module: HloModule, value: Value, devices: int, depth: int) -> np.ndarray | None:
    """A scalar on each device, [devices], or a table, [1, entries]."""
    instruction = value.instruction
    if instruction.opcode == "partition-id":
        return np.arange(devices)
    if instruction.opcode == "constant":
        known = re.fullmatch(r"[-\d, {}]+", instruction.operand_text)
        numbers = [int(n) for n in _INTEGER.findall(instruction.operand_text)] if known else []
        return np.array([numbers] if len(numbers) > 1 else numbers) if numbers else None
    made = [
        _by_device(module, operand, devices, depth + 1) if depth < _MOST_DEPTH else None
        for operand in made_of(module, value)
    ]
    if any(one is None for one in made) or not made:
        return None
    rule = _ARITHMETIC.get(instruction.opcode)
    return rule(*made) if rule else None


def _looked_up(table: np.ndarray, *places: np.ndarray) -> np.ndarray | None:
    if table.ndim != 2 or len(places) != 1:
        return None
    return table[0][np.clip(places[0], 0, table.size - 1)]


def _same(*values: np.ndarray) -> np.ndarray | None:
    """The value; of several, as before a loop and after its body, none is sure."""
    return values[0] if len(values) == 1 else None


_ARITHMETIC: dict[str, Callable[..., np.ndarray | None]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": lambda a, b: a // np.where(b == 0, 1, b),
    "remainder": lambda a, b: a % np.where(b == 0, 1, b),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "clamp": lambda low, value, high: np.clip(value, low, high),
    "dynamic-slice": _looked_up,
    **dict.fromkeys(
        ("convert", "bitcast", "reshape", "copy", "copy-start", "copy-done", *_PASSED_ON), _same
    ),
}
