"""Collectives of a program: kind, bytes, group size, and runs per step."""

from __future__ import annotations

from mfu_jax.flops.executed.cost_types import Collective
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.replica_groups import groups_text, listed_groups

KINDS = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}
_LAST_LINK = "AsyncCollectiveDone"


def is_further_link(computation: HloComputation, instruction: HloInstruction) -> bool:
    """Whether a collective continues one that an earlier instruction started.

    TPU programs spread one collective over a chain of fusions that compute something else
    meanwhile: it appears in the first with ``AsyncCollectiveStart``, in the last with
    ``AsyncCollectiveDone``, and in those in between as well.
    """
    if "chain_id" not in instruction.attribute_text:  # most need no other attribute
        return False
    if "chain_id" not in instruction.attributes.get("frontend_attributes", ""):
        return False
    users = computation.users.get(instruction.name, ())
    targets = (user.attribute_string("custom_call_target") for user in users)
    return "AsyncCollectiveStart" not in targets


def carried_along(fused: HloComputation) -> frozenset[str]:
    """Instructions of a fusion that only pass on the arrays of a collective in flight.

    A fusion of such a chain takes the collective's arrays and returns them without reading or
    writing them: the links do. Empty for the fusion that starts a chain, and outside one.
    """
    links = {
        i.name
        for i in fused.instructions.values()
        if i.opcode.removesuffix("-start") in KINDS and is_further_link(fused, i)
    }
    if not links:
        return frozenset()
    root = fused.root
    done = {root.name} if root.attribute_string("custom_call_target") == _LAST_LINK else set()
    passes = links | {root.name} if root.opcode == "tuple" else links | done
    parameters = {
        parameter.name
        for parameter in fused.parameters.values()
        if all(user.name in passes for user in fused.users.get(parameter.name, ()))
    }
    return frozenset(links | done | parameters)


def read_collective(
    module: HloModule, computation: HloComputation, instruction: HloInstruction, op_name: str
) -> Collective:
    """The collective that an instruction starts."""
    shape = instruction.shape
    kind = instruction.opcode.removesuffix("-start")
    may_scatter = kind == "all-reduce" and computation.name in module.slicing
    if may_scatter and _is_scattered(computation, instruction):
        kind = "reduce-scatter"
    if instruction.opcode.endswith("-start") and kind != "all-reduce" and len(shape.elements) > 1:
        shape = shape.elements[1]  # (operands, results, …)
    sent = sum(operand.bytes for operand in computation.operand_shapes(instruction))
    return Collective(
        kind=kind,
        bytes=max(sent, shape.bytes),
        group_size=_group_size(module, instruction),
        op_name=op_name,
    )


def _is_scattered(computation: HloComputation, instruction: HloInstruction) -> bool:
    """Whether each device keeps only a slice: TPU fusions write a reduce-scatter that way."""
    users = computation.users.get(instruction.name, ())
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


def _group_size(module: HloModule, instruction: HloInstruction) -> int:
    if instruction.attribute("source_target_pairs"):
        return 2
    devices = module.header_int("num_partitions") * module.header_int("replica_count")
    groups = listed_groups(groups_text(instruction), devices)
    return len(groups[0]) if groups else 0
