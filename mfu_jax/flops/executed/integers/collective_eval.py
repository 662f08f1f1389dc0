"""Integers that devices exchange in all-reduces, all-gathers and collective permutes.

The traced count has its own, `traced.integers.exchanges`. Programs: tests/support/program_rings.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from mfu_jax.flops.executed.hlo.module import HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.replica_groups import device_pairs, groups_text, replica_groups
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.integers.arithmetic import ARITHMETIC, elementwise
from mfu_jax.flops.executed.integers.by_device import joined, of_device
from mfu_jax.flops.executed.integers.values import (
    ByDevice,
    Compute,
    Value,
    elements_of,
    make_value,
    wrap_of,
)

COLLECTIVES = frozenset({"all-gather", "all-reduce", "collective-permute"})
_COMBINED = frozenset({"add", "minimum", "maximum"})

_Receive = Callable[[Sequence[Value]], list[Value]]  # of what all devices send


def compile_collective(
    module: HloModule, instruction: HloInstruction, opcode: str, sent: Shape, received: Shape
) -> Compute | None:
    """A function from the devices' numbers, and what each sends, to what each receives.

    Args:
        module: the program.
        instruction: the collective.
        opcode: its kind.
        sent: the shape of what a device sends.
        received: the shape of what it receives.

    Returns:
        The function; None if such a collective is not evaluated.

    Raises:
        HloParseError: the collective lacks an attribute.
    """
    if (module.header_int("num_partitions") > 1) != bool(instruction.attribute("channel_id")):
        return None  # a channel means partitions, none means replicas: there is only one of those
    receive = _RECEIVE[opcode](module, instruction, sent, received)
    if receive is None:
        return None

    def compute(values: Sequence[Value]) -> Value:
        numbers, value = values
        if not isinstance(numbers, ByDevice):
            return None  # one device alone does not know what others send
        parts = [None if n is None else of_device(value, d) for d, n in enumerate(numbers.values)]
        return joined(receive(parts))

    return compute


def _permuted(
    module: HloModule, instruction: HloInstruction, sent: Shape, received: Shape
) -> _Receive | None:
    """Each device receives what one other sends, or zeros if none sends to it."""
    sources = {target: source for source, target in device_pairs(instruction)}
    if "slice_sizes" in instruction.attributes or sent.size != received.size:
        return None  # it moves parts of arrays
    nothing = make_value([0] * received.size)

    def receive(parts: Sequence[Value]) -> list[Value]:
        devices = range(len(parts))
        known = {d: parts[source] if source in devices else None for d, source in sources.items()}
        return [known.get(device, nothing) for device in devices]

    return receive


def _reduced(
    module: HloModule, instruction: HloInstruction, sent: Shape, received: Shape
) -> _Receive | None:
    """Each device receives the sum, minimum or maximum over its group."""
    reducer = module.reducer_opcode(instruction)
    if reducer not in _COMBINED or sent.size != received.size:
        return None
    combine = elementwise(ARITHMETIC[reducer], wrap_of(received.dtype))

    def of_group(parts: list[Value]) -> Value:
        return functools.reduce(lambda a, b: combine([a, b]), parts)

    return _in_groups(module, instruction, of_group)


def _gathered(
    module: HloModule, instruction: HloInstruction, sent: Shape, received: Shape
) -> _Receive | None:
    """Each device receives the values of its group, side by side in one dimension."""
    dims = instruction.integers("dimensions")
    if len(dims) != 1:
        raise instruction.error("all-gather without its dimension")
    run = math.prod(sent.dims[dims[0] :])  # contiguous elements of one device

    def of_group(parts: list[Value]) -> Value:
        rows = [elements_of(part) for part in parts]
        if not all(rows) or sum(map(len, rows)) != received.size:
            return None
        starts = range(0, sent.size, run)
        return make_value([e for start in starts for row in rows for e in row[start : start + run]])

    return _in_groups(module, instruction, of_group)


def _in_groups(
    module: HloModule, instruction: HloInstruction, of_group: Callable[[list[Value]], Value]
) -> _Receive | None:
    """Every device of a group receives the same."""
    devices = module.header_int("num_partitions") * module.header_int("replica_count")
    groups = replica_groups(groups_text(instruction), devices)
    if groups is None:
        return None

    def receive(parts: Sequence[Value]) -> list[Value]:
        received: list[Value] = [None] * devices
        for group in groups:
            members = [parts[device] for device in group]
            value = None if None in members else of_group(members)
            for device in group:
                received[device] = value
        return received

    return receive


_RECEIVE: dict[str, Callable[[HloModule, HloInstruction, Shape, Shape], _Receive | None]] = {
    "all-gather": _gathered,
    "all-reduce": _reduced,
    "collective-permute": _permuted,
}
