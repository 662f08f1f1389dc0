"""Infers the op_name of an instruction that XLA left without one, from its neighbours.

Rewrites of batched matmuls drop their metadata. Users of such a result are in the same phase:
forward operations use forward results (and so does the backward pass, which keeps them),
rematerialised ones use rematerialised results, and only backward ones use backward results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mfu_jax.flops.executed.hlo import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.scopes import read_scope

_MAX_VISITS = 256
_USER_ORDER = ("forward", "rematerialized", "backward")
_OPERAND_ORDER = ("backward", "rematerialized", "forward")

_Place = tuple[HloComputation, HloInstruction]
_Neighbours = Callable[[HloModule, HloComputation, HloInstruction], Iterator[_Place]]


def inferred_op_name(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> str:
    """The op_name of the nearest users that have one, or of the nearest operands."""
    for neighbours, order in ((_users, _USER_ORDER), (_operands, _OPERAND_ORDER)):
        names = _nearest_names(module, computation, instruction, neighbours)
        by_phase = {read_scope(name).phase: name for name in reversed(names)}
        for phase in order:
            if phase in by_phase:
                return by_phase[phase]
    return ""


def _nearest_names(
    module: HloModule,
    computation: HloComputation,
    instruction: HloInstruction,
    neighbours: _Neighbours,
) -> list[str]:
    names: list[str] = []
    seen: set[int] = set()
    queue: list[_Place] = list(neighbours(module, computation, instruction))
    for place in queue:  # grows while it is walked
        if id(place[1]) in seen or len(seen) > _MAX_VISITS:
            continue
        seen.add(id(place[1]))
        if "/" in place[1].op_name:
            names.append(place[1].op_name)
        else:
            queue += neighbours(module, *place)
    return names


def _users(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> Iterator[_Place]:
    """Users of a result: in its computation, inside fusions, and at its caller."""
    for user in computation.users.get(instruction.name, []):
        yield computation, user
        if user.opcode == "fusion" and not user.op_name:
            for fused in map(module.__getitem__, user.callees):
                for number, operand in enumerate(user.operands):
                    if operand == instruction.name and number in fused.parameters:
                        parameter = fused.parameters[number]
                        yield from ((fused, inner) for inner in fused.users.get(parameter.name, []))
    if instruction is computation.root:
        caller = module.caller(computation.name)
        if caller and caller[1].opcode in ("fusion", "call"):
            yield caller


def _operands(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> Iterator[_Place]:
    """Makers of the operands: in its computation, and at its caller."""
    for name in instruction.operands:
        yield computation, computation[name]
    if instruction.opcode == "parameter" and (caller := module.caller(computation.name)):
        text = instruction.operand_text
        if caller[1].opcode in ("fusion", "call") and text.isdecimal():
            operands = caller[1].operands
            if int(text) < len(operands):
                yield caller[0], caller[0][operands[int(text)]]
