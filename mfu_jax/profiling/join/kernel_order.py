"""Names kernels that a trace leaves unnamed, by order: library kernels in GPU command buffers.

Between two known kernels, the device runs the instructions between theirs, in the order of the
scheduled text. If the number of unknown kernels there equals that of instructions not seen
elsewhere, they are matched in order; else they stay unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mfu_jax.profiling.join.command_buffers import named_in_buffers
from mfu_jax.profiling.join.ops import DeviceWork, Join, JoinedOp
from mfu_jax.profiling.timeline.devices import DeviceTimeline, OpName, OpTable

if TYPE_CHECKING:
    from mfu_jax.flops.executed.records import InstructionRecord
    from mfu_jax.profiling.join.programs import KnownProgram


def with_instructions(timeline: DeviceTimeline, join: Join) -> DeviceTimeline:
    """The timeline with the names that follow from the kernels' order."""
    return _named_by_order(named_in_buffers(timeline, join), join)


def _named_by_order(timeline: DeviceTimeline, join: Join) -> DeviceTimeline:
    joined = join.ops(timeline.names)
    is_unknown = np.array([_is_unknown(op) for op in joined], bool)[timeline.ops]
    if not is_unknown.any():
        return timeline
    is_known = np.array([op.record is not None for op in joined], bool)[timeline.ops]
    table, ops = OpTable(), timeline.ops.copy()
    for name in timeline.names:
        table.number(name)
    order = _Order(joined)
    for lane in np.unique(timeline.lanes[is_unknown]).tolist():
        events = np.flatnonzero((timeline.lanes == lane) & (is_known | is_unknown))
        events = events[np.argsort(timeline.starts[events], kind="stable")]
        known = np.flatnonzero(is_known[events])
        for left, right in pairwise(known.tolist()):
            between = events[left + 1 : right]
            ends = (joined[ops[events[left]]], joined[ops[events[right]]])
            for event, name in zip(between, order.between(*ends, len(between)), strict=False):
                ops[event] = table.number(name)
    return dataclasses.replace(timeline, names=table.names, ops=ops)


def _is_unknown(op: JoinedOp) -> bool:
    return op.name.is_kernel and op.record is None and op.work is DeviceWork.COMPUTE


class _Order:
    """The instructions of programs that the trace does not name, by their position.

    Args:
        joined: the ops of a timeline.
    """

    def __init__(self, joined: Sequence[JoinedOp]) -> None:
        self._seen = {id(op.record) for op in joined if op.record is not None}
        self._lists: dict[tuple[int, str], list[InstructionRecord]] = {}

    def between(self, left: JoinedOp, right: JoinedOp, count: int) -> list[OpName]:
        """`count` names between two ops; none if the program has a different number of them."""
        source, first, last = left.source, left.record, right.record
        if not count or source is None or source is not right.source or not first or not last:
            return []
        records = self._records(source, first.computation)
        if first.computation != last.computation:
            return []
        begin, end = records.index(first), records.index(last)
        inner = records[begin + 1 : end] if begin < end else [*records[begin + 1 :], *records[:end]]
        unseen = [record for record in inner if id(record) not in self._seen and _runs(record)]
        program = left.name.program
        return [OpName(program, r.name) for r in unseen] if len(unseen) == count else []

    def _records(self, source: KnownProgram, computation: str) -> list[InstructionRecord]:
        key = (id(source), computation)
        if key not in self._lists:
            records = source.costs.records.values()
            self._lists[key] = [r for r in records if r.computation == computation]
        return self._lists[key]


def _runs(record: InstructionRecord) -> bool:
    """Whether it may be a kernel on the same stream as its neighbours."""
    return not (record.is_control or record.is_async or record.collective or record.started_by)
