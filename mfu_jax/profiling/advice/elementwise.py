"""Causes in work without matmuls: arrays that go to memory and back."""

from __future__ import annotations

from mfu_jax.flops.executed.hlo_shapes import dtype_bits
from mfu_jax.flops.executed.instruction_costs import InstructionRecord
from mfu_jax.flops.executed.instruction_shapes import Array
from mfu_jax.profiling.advice.facts import (
    Facts,
    largest_names,
    milliseconds,
    record_of,
    seconds_of,
)
from mfu_jax.profiling.measured import OpTime

_BUSY = 0.3  # of the memory's bandwidth, from which on an op is bound by it


def chain(facts: Facts) -> tuple[float, str] | None:
    """Elementwise ops write what only the next one reads.

    On CPUs caches keep it, and the first touch of a result costs more: fusing was seen to gain
    nothing.
    """
    ops = {
        record_of(op).name: op
        for op in facts.compute()
        if record_of(op).shape.is_elementwise and op.runs
    }
    links = list(_links(facts, ops))
    saved = sum(gain for _, _, gain in links)
    if not links or facts.is_cpu:
        return None
    members = [ops[name] for name in {n for first, second, _ in links for n in (first, second)}]
    return saved, (
        f"{len(members)} elementwise ops pass arrays on through memory, {len(links)} times, and "
        f"take {milliseconds(seconds_of(members))}: {largest_names(members)}; one fusion would keep"
        f" them in registers; look for an optimization_barrier, a checkpoint or a callback between "
        f"them"
    )


def _links(facts: Facts, ops: dict[str, OpTime]) -> list[tuple[str, str, float]]:
    """Pairs of ops, with the time of writing and reading what is between them."""
    users: dict[str, list[str]] = {}
    for record in facts.program.costs.records.values():
        for operand in record.shape.operands if "barrier" not in record.opcode else ():
            users.setdefault(operand, []).append(record.name)
    found = []
    for name, op in ops.items():
        following = users.get(name, [])
        if len(following) == 1 and (after := ops.get(following[0])) is not None:
            size = record_of(op).shape.result_bytes
            if _elements(record_of(op)) == _elements(record_of(after)):
                gain = _time_of(facts, op, size) + _time_of(facts, after, size)
                found.append((name, following[0], gain))
    return found


def _elements(record: InstructionRecord) -> tuple[int, ...]:
    return record.shape.results[0].dims if record.shape.results else ()


def _time_of(facts: Facts, op: OpTime, size: int) -> float:
    """The time that an op takes for some of its bytes; 0 if memory does not bind it."""
    moving, total = facts.moving(op), record_of(op).hbm_bytes
    if not total or (moving is not None and moving < _BUSY * op.seconds):
        return 0.0
    return op.seconds * min(1.0, size / total)


def logits(facts: Facts) -> tuple[float, str] | None:
    """The largest activations, before the loss, take 32 bits."""
    found = _logits(facts)
    if found is None or facts.is_cpu:
        return None
    ops = [
        op
        for op in facts.compute()
        if not record_of(op).flops and _float32_share(record_of(op), found) > 0
    ]
    gain = sum(op.seconds * _float32_share(record_of(op), found) / 2 for op in ops)
    if not ops:
        return None
    return gain, (
        f"{milliseconds(seconds_of(ops))} of a step go over logits of "
        f"{'×'.join(map(str, found))} in float32, {largest_names(ops)}; keep them in bfloat16 and "
        f"sum in float32, or compute the loss in pieces"
    )


def _logits(facts: Facts) -> tuple[int, ...] | None:
    """The dimensions of the widest result of a forward matmul, if it is wider than its input."""
    wide = [
        record.shape.results[0].dims
        for record in facts.program.costs.records.values()
        if record.shape.matmul
        and record.phase in ("forward", "evaluation")
        and record.shape.results
        and record.shape.matmul.batch == 1
        and record.shape.matmul.n >= 8 * record.shape.matmul.k
    ]
    return max(wide, key=lambda dims: dims[-1], default=None)


def _float32_share(record: InstructionRecord, dims: tuple[int, ...]) -> float:
    """The part of an op's bytes that are float32 arrays of this size."""
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    size = sum(_bytes(a) for a in arrays if a.dtype == "f32" and _size(a.dims) == _size(dims))
    total = max(record.hbm_bytes, sum(map(_bytes, arrays)))
    return size / total if total else 0.0


def _size(dims: tuple[int, ...]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


def _bytes(array: Array) -> int:
    return _size(array.dims) * dtype_bits(array.dtype) // 8
