"""Causes in work without matmuls: arrays that make a round trip through memory."""

from __future__ import annotations

import itertools
import math

from mfu_jax.flops.count import dtype_bits
from mfu_jax.flops.executed.records import ArrayShape, InstructionRecord
from mfu_jax.profiling.advice.stats import (
    ProfileStats,
    largest_names,
    milliseconds,
    record_of,
    seconds_of,
)
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.util.formatting import counted

_BUSY = 0.3  # of the memory bandwidth, above which an op is memory-bound


def chain(stats: ProfileStats) -> tuple[float, str] | None:
    """Elementwise ops write results that other elementwise ops read.

    On CPUs, caches keep the results, and the first touch of a result costs more: fusing was seen to
    gain nothing.
    """
    ops = {
        record_of(op).name: op
        for op in stats.compute()
        if record_of(op).shape.is_elementwise and op.runs
    }
    users = _users(stats)
    links = {name: found for name, op in ops.items() if (found := _next(stats, op, ops, users))}
    if not links or stats.is_cpu:
        return None
    chains = _joined(links)
    saved = sum(_saved(stats, one, links, ops, users) for one in chains)
    members = [ops[name] for one in chains for name in one]
    times = sum(len(set(found)) for found in links.values())  # an op may read one array twice
    return saved, (
        f"{len(members)} elementwise ops pass arrays on through memory, "
        f"{counted(times, 'time')}, and take {milliseconds(seconds_of(members))}: "
        f"{largest_names(members)}"
    )


def _users(stats: ProfileStats) -> dict[str, list[str]]:
    """The readers of each result, including those of a copy of it in another memory."""
    records = stats.program.costs.records
    users: dict[str, list[str]] = {}
    for record in records.values():
        is_copy = record.opcode.startswith("copy")
        for operand in () if is_copy or "barrier" in record.opcode else record.shape.operands:
            while (source := records.get(operand)) and source.opcode.startswith("copy"):
                operand = source.shape.operands[0]
            users.setdefault(operand, []).append(record.name)
    return users


def _next(
    stats: ProfileStats, op: OpTime, ops: dict[str, OpTime], users: dict[str, list[str]]
) -> list[str]:
    """The readers of a result that XLA could have fused: elementwise ops on as many elements.

    A result with other readers, such as one that is saved for the backward pass, is written in any
    case. Then a reader that needs the outcome of one of those can share no fusion with this op.
    """
    record = record_of(op)
    found = users.get(record.name, [])
    size = _elements(record)
    alike = [name for name in found if name in ops and _elements(record_of(ops[name])) == size]
    others = set(found) - set(alike)
    behind = _behind(stats, record, others, alike) if alike and others else set()
    return [name for name in alike if name not in behind]


def _behind(
    stats: ProfileStats, record: InstructionRecord, others: set[str], until: list[str]
) -> set[str]:
    """What depends on `others`, which read a result, up to the last of `until` in the schedule."""
    behind, waiting = set(others), set(until)
    schedule = iter(stats.program.computations[record.computation])
    for later in itertools.dropwhile(lambda r: r is not record, schedule):
        if not behind.isdisjoint(later.shape.operands):
            behind.add(later.name)
        waiting.discard(later.name)
        if not waiting:
            break
    return behind


def _joined(links: dict[str, list[str]]) -> list[set[str]]:
    """The groups of ops connected by links."""
    chains: list[set[str]] = []
    for name, following in links.items():
        one = {name, *following}
        apart = [other for other in chains if not other & one]
        chains = [*apart, one.union(*(other for other in chains if other & one))]
    return chains


def _saved(
    stats: ProfileStats,
    members: set[str],
    links: dict[str, list[str]],
    ops: dict[str, OpTime],
    users: dict[str, list[str]],
) -> float:
    """Time to write and read what is between members; all their time if a TPU matmul absorbs them.

    On TPUs, XLA fuses elementwise ops into an adjacent matmul; on GPUs, a library runs the matmul.
    What has other readers is written in any case.
    """
    records = stats.program.costs.records
    written = {name for name in links if set(users[name]) - set(links[name])}
    readers = {reader for name in members for reader in users.get(name, ())}
    is_tpu = stats.measured.platform == "tpu" and not written & members
    if is_tpu and any(records[name].shape.matmul for name in readers):
        return seconds_of(ops[name] for name in members)
    saved = 0.0
    for name in [name for name in links if name in members]:
        size = record_of(ops[name]).shape.result_bytes
        less = links[name] if name in written else (name, *links[name])
        saved += sum(_time_of(stats, ops[other], size) for other in less)
    return saved


def _elements(record: InstructionRecord) -> tuple[int, ...]:
    return record.shape.results[0].dims if record.shape.results else ()


def _time_of(stats: ProfileStats, op: OpTime, size: int) -> float:
    """The time that an op takes for `size` of its bytes; 0 if it is not memory-bound."""
    moving, total = stats.moving(op), record_of(op).hbm_bytes
    if not total or (moving is not None and moving < _BUSY * op.seconds):
        return 0.0
    return op.seconds * min(1.0, size / total)


def logits(stats: ProfileStats) -> tuple[float, str] | None:
    """The largest activations, the logits before the loss, are in float32."""
    found = stats.logits
    if found is None or stats.is_cpu:
        return None
    ops = [
        op
        for op in stats.compute()
        if not record_of(op).flops and _float32_share(record_of(op), found) > 0
    ]
    gain = sum(op.seconds * _float32_share(record_of(op), found) / 2 for op in ops)
    if not ops:
        return None
    return gain, (
        f"{milliseconds(seconds_of(ops))} of a step go over logits of "
        f"{'×'.join(map(str, found))} in float32, {largest_names(ops)}"
    )


def _float32_share(record: InstructionRecord, dims: tuple[int, ...]) -> float:
    """The share of an op's bytes that are float32 arrays of this size."""
    arrays = (*record.shape.results, *record.shape.operand_arrays)
    size = sum(
        _bytes(a) for a in arrays if a.dtype == "f32" and math.prod(a.dims) == math.prod(dims)
    )
    total = max(record.hbm_bytes, sum(map(_bytes, arrays)))
    return size / total if total else 0.0


def _bytes(array: ArrayShape) -> int:
    return math.prod(array.dims) * dtype_bits(array.dtype) // 8
