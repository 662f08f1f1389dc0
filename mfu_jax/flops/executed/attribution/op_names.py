"""Infers the op_name of an instruction that XLA left without one, from its neighbours.

Rewrites of batched matmuls drop their metadata. Users of such a result are in the same phase:
forward operations use forward results (and so does the backward pass, which keeps them),
rematerialised ones use rematerialised results, and only backward ones use backward results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mfu_jax.flops.count import operation
from mfu_jax.flops.executed.hlo.module import (
    HloComputation,
    HloInstruction,
    HloModule,
)
from mfu_jax.flops.executed.hlo.uses import Value, followed, made_of, sources
from mfu_jax.flops.scopes import FlopPhase, read_scope

_USER_ORDER: Sequence[FlopPhase] = ("forward", "rematerialized", "backward")
_OPERAND_ORDER: Sequence[FlopPhase] = ("backward", "rematerialized", "forward")
# Backward work whose result may be a weight's gradient, not a cotangent of an activation.
_OF_WEIGHTS = ("/dot_general", "/conv_general_dilated", "/reduce_sum", "/scatter-add")

_NAMES = re.compile(r'op_name="([^"]+)"')


def named_operations(text: str) -> dict[str, int]:
    """How many instructions have the name of each operation, keyed as `FlopCount.by_operation`.

    Args:
        text: of a whole program. XLA joins the names of instructions that it merges.
    """
    found: Counter[str] = Counter()
    for names, times in Counter(_NAMES.findall(text)).items():
        for name in names.split(";"):
            found[operation_of(name)] += times
    return dict(found)


def operation_of(op_name: str) -> str:
    """The key of `FlopCount.by_operation` for an op_name."""
    phase, scope = read_scope(op_name)
    return operation(phase, scope, op_name.rpartition("/")[2])


def inferred_op_name(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> str:
    """The op_name of the nearest users that have one, or of the nearest operands.

    A user that is not differentiated may be an update. The instruction is then a gradient if one
    operand is a cotangent and either the other is an activation or a program input, or the
    backward pass uses the result as well.
    """
    value = Value(computation, instruction)
    by_phase = _by_phase(_users(module, value))
    name = _first(by_phase, _USER_ORDER)
    if name and not _is_differentiated(name):
        makers = _makers(module, value)
        cotangents = [maker for maker in makers if read_scope(maker).phase == "backward"]
        activations = [m for m in makers if m not in cotangents and _is_differentiated(m)]
        if cotangents and (activations or "backward" in by_phase):
            return cotangents[0]
        if len(cotangents) == 1 and "" in makers and not cotangents[0].endswith(_OF_WEIGHTS):
            return cotangents[0]
    return name or _first(_by_phase(_operands(module, value)), _OPERAND_ORDER)


def _by_phase(names: Iterable[str]) -> dict[FlopPhase, str]:
    """The first op_name of each phase."""
    found: dict[FlopPhase, str] = {}
    for name in names:
        found.setdefault(read_scope(name).phase, name)
    return found


def _first(by_phase: Mapping[FlopPhase, str], order: Sequence[FlopPhase]) -> str:
    return next((by_phase[phase] for phase in order if phase in by_phase), "")


def _is_differentiated(op_name: str) -> bool:
    return "jvp(" in op_name


def unfolded_op_name(
    module: HloModule, computation: HloComputation, instruction: HloInstruction, op_name: str
) -> str:
    """A matmul's op_name; if XLA folded a user's transpose into it, a name of its own phase.

    Such a matmul has the transpose's name, which for a gradient may be outside the differentiated
    function. One operand of a backward matmul is a cotangent, the result of backward elementwise
    work; products of gradients (Muon, Shampoo) use the results of backward matmuls.
    """
    if not op_name.endswith("/transpose") or read_scope(op_name).phase != "forward":
        return op_name
    makers = _makers(module, Value(computation, instruction))
    cotangents = [name for name in makers if name and _is_cotangent(name)]
    return cotangents[0] if len(cotangents) == 1 else op_name


def _is_cotangent(op_name: str) -> bool:
    return read_scope(op_name).phase == "backward" and not op_name.endswith("/dot_general")


def _users(module: HloModule, value: Value) -> Iterator[str]:
    """The op_names of a value's nearest users that have one, up to a differentiated forward one.

    A fusion has the name of its result; what it does with an operand has its own name.
    """
    for use in followed(module, value, lambda use: not _is_named(use.user)):
        if use.operand >= 0 and _is_named(use.user):
            name = use.user.op_name
            yield name
            if _is_differentiated(name) and read_scope(name).phase == "forward":
                return


def _operands(module: HloModule, value: Value) -> Iterator[str]:
    """The op_names of the nearest values that one is made of and that have one."""
    for made in sources(module, value, lambda made: _is_named(made.instruction)):
        if _is_named(made.instruction):
            yield made.instruction.op_name


def _makers(module: HloModule, value: Value) -> list[str]:
    """The op_name of each operand, or the nearest one that it is made of; empty for none."""
    return [
        operand.instruction.op_name
        if _is_named(operand.instruction)
        else next(_operands(module, operand), "")
        for operand in made_of(module, value)
    ]


def _is_named(instruction: HloInstruction) -> bool:
    return "/" in instruction.op_name
