"""Integers that devices exchange: their sums, and what they pass on."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from mfu_jax.flops.executed.collectives import groups_text
from mfu_jax.flops.executed.hlo import HloInstruction, HloModule
from mfu_jax.flops.executed.integers.arithmetic import ARITHMETIC
from mfu_jax.flops.executed.integers.values import Value, wrap_of
from mfu_jax.flops.executed.replication import replica_groups

EXCHANGES = frozenset({"all-reduce", "collective-permute"})
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_COMBINED = frozenset({"add", "minimum", "maximum"})


def received(
    module: HloModule,
    instruction: HloInstruction,
    opcode: str,
    device: Sequence[Value],
    sent: Sequence[Value],
) -> Value:
    """What a device receives of an integer.

    Args:
        module: the program.
        instruction: the collective.
        opcode: its kind.
        device: the device's number, alone.
        sent: what each device sends.
    """
    (number,) = device
    if not isinstance(number, int):
        return None
    if opcode == "collective-permute":
        pairs = _PAIR.findall(instruction.attributes.get("source_target_pairs", ""))
        sources = [int(a) for a, b in pairs if int(b) == number]
        return next((sent[a] for a in sources if a < len(sent)), None if sources else 0)
    groups = replica_groups(groups_text(instruction), len(sent))
    names = instruction.computations("to_apply")
    root = module[names[0]].root if len(names) == 1 else instruction
    if groups is None or root.opcode not in _COMBINED:
        return None
    (group,) = (group for group in groups if number in group)
    values = [value for member in group if isinstance(value := sent[member], int)]
    if len(values) < len(group):
        return None
    return wrap_of(root.shape.dtype)(functools.reduce(ARITHMETIC[root.opcode], values))  # type: ignore[arg-type]
