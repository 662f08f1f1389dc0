"""Infers the op_name of an instruction that XLA left without one, from its neighbours.

Rewrites of batched matmuls drop their metadata. Users of such a result are in the same phase:
forward operations use forward results (and so does the backward pass, which keeps them),
rematerialised ones use rematerialised results, and only backward ones use backward results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from mfu_jax.flops.count import operation
from mfu_jax.flops.executed.hlo.module import (
    HloComputation,
    HloInstruction,
    HloModule,
    InstructionRef,
)
from mfu_jax.flops.scopes import FlopPhase, read_scope

_MAX_VISITS = 256
_USER_ORDER: Sequence[FlopPhase] = ("forward", "rematerialized", "backward")
_OPERAND_ORDER: Sequence[FlopPhase] = ("backward", "rematerialized", "forward")
# Backward work whose result may be a weight's gradient, not a cotangent of an activation.
_OF_WEIGHTS = ("/dot_general", "/conv_general_dilated", "/reduce_sum", "/scatter-add")

_NAMES = re.compile(r'op_name="([^"]+)"')

_Neighbours = Callable[[HloModule, HloComputation, HloInstruction], Iterator[InstructionRef]]


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
    users, operands = (list(of(module, computation, instruction)) for of in (_users, _operands))
    by_phase = _by_phase(module, users, _users)
    name = _first(by_phase, _USER_ORDER)
    if name and not _is_differentiated(name):
        makers = [next(_nearest_names(module, [ref], _operands), "") for ref in operands]
        cotangents = [maker for maker in makers if read_scope(maker).phase == "backward"]
        activations = [m for m in makers if m not in cotangents and _is_differentiated(m)]
        if cotangents and (activations or "backward" in by_phase):
            return cotangents[0]
        if len(cotangents) == 1 and "" in makers and not cotangents[0].endswith(_OF_WEIGHTS):
            return cotangents[0]
    return name or _first(_by_phase(module, operands, _operands), _OPERAND_ORDER)


def _by_phase(
    module: HloModule, refs: list[InstructionRef], neighbours: _Neighbours
) -> dict[FlopPhase, str]:
    """The nearest op_name of each phase; users are searched up to a differentiated forward one."""
    names: dict[FlopPhase, str] = {}
    for name in _nearest_names(module, refs, neighbours):
        phase = read_scope(name).phase
        names.setdefault(phase, name)
        if neighbours is _users and phase == "forward" and _is_differentiated(name):
            break
    return names


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
    refs = _operands(module, computation, instruction)
    makers = [next(_nearest_names(module, [ref], _operands), "") for ref in refs]
    cotangents = [name for name in makers if name and _is_cotangent(name)]
    return cotangents[0] if len(cotangents) == 1 else op_name


def _is_cotangent(op_name: str) -> bool:
    return read_scope(op_name).phase == "backward" and not op_name.endswith("/dot_general")


def _nearest_names(
    module: HloModule, refs: list[InstructionRef], neighbours: _Neighbours
) -> Iterator[str]:
    """The op_names of instructions, or of the nearest neighbours that have one."""
    seen: set[int] = set()
    queue = list(refs)
    for ref in queue:  # grows while it is walked
        if id(ref[1]) in seen or len(seen) > _MAX_VISITS:
            continue
        seen.add(id(ref[1]))
        if "/" in (op_name := ref[1].op_name):
            yield op_name
        else:
            queue += neighbours(module, *ref)


def _users(
    module: HloModule, computation: HloComputation, instruction: HloInstruction
) -> Iterator[InstructionRef]:
    """Users of a result: in its computation, inside fusions, and at its caller.

    A fusion has the name of its result; what it does with an operand has its own name.
    """
    for user in computation.users.get(instruction.name, []):
        if user.opcode != "fusion":
            yield computation, user
        else:
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
) -> Iterator[InstructionRef]:
    """Makers of the operands: in its computation, and at its caller."""
    for name in instruction.operands:
        yield computation, computation[name]
    if instruction.opcode == "parameter" and (caller := module.caller(computation.name)):
        text = instruction.operand_text
        if caller[1].opcode in ("fusion", "call") and text.isdecimal():
            operands = caller[1].operands
            if int(text) < len(operands):
                yield caller[0], caller[0][operands[int(text)]]
