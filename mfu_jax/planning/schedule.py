"""Walks a program's schedule: what runs when, and what waits for what.

The text of a compiled program is its schedule. Instructions run one after another; what stands
between an asynchronous start and its done hides the transfer that the start began. A transfer
waits for its link, and the done for the transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mfu_jax.flops.executed.instruction_costs import InstructionRecord, ProgramCosts
from mfu_jax.planning.durations import Duration, Durations


class Transfer(NamedTuple):
    """A transfer under way: when it ends, and how long it takes alone."""

    ends: float
    seconds: float
    cause: str


@dataclass(kw_only=True)
class Timeline:
    """Seconds of one run of the instructions that it was made of, by cause.

    Attributes:
        seconds: from the first to the last.
        by_cause: seconds in which the device did, or waited for, something, by what it was; sums
            to `seconds`.
        transfers: seconds of transfers by cause, hidden ones included.
    """

    seconds: float = 0.0
    by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfers: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def spend(self, cause: str, seconds: float) -> None:
        """The device is busy with `cause`."""
        self.by_cause[cause] += seconds
        self.seconds += seconds

    def add(self, other: Timeline, times: float) -> None:
        """Appends another timeline, so many times."""
        self.seconds += times * other.seconds
        for mine, theirs in ((self.by_cause, other.by_cause), (self.transfers, other.transfers)):
            for cause, seconds in theirs.items():
                mine[cause] += times * seconds


def timeline(costs: ProgramCosts, durations: Durations) -> Timeline:
    """The time of one call of a program, its loops multiplied out.

    A computation's own instructions are walked once; the program's time is the sum over its
    computations of runs × that. Transfers do not reach from one computation into another.
    """
    total = Timeline()
    for records in _by_computation(costs.records.values()):
        runs = records[0].runs
        if runs:
            total.add(_walk(records, durations), runs)
    return total


def _by_computation(records: Iterable[InstructionRecord]) -> Iterable[list[InstructionRecord]]:
    found: dict[str, list[InstructionRecord]] = defaultdict(list)
    for record in records:
        found[record.computation].append(record)
    return found.values()


def _walk(records: Iterable[InstructionRecord], durations: Durations) -> Timeline:
    line = Timeline()
    under_way: dict[str, Transfer] = {}
    free: dict[str, float] = defaultdict(float)  # when each lane is free again
    for record in records:
        for work in () if _only_waits(record) else durations.of(record):
            if work.lanes and record.is_start:
                _start(line, under_way, free, record.name, work)
            else:
                _run(line, free, work)
        if record.started_by and not record.opcode.endswith("-update"):
            _finish(line, under_way, record.started_by)
    for name in list(under_way):
        _finish(line, under_way, name)
    return line


def _only_waits(record: InstructionRecord) -> bool:
    return record.opcode.endswith(("-done", "-update"))


def _start(
    line: Timeline,
    under_way: dict[str, Transfer],
    free: dict[str, float],
    name: str,
    work: Duration,
) -> None:
    ends = max(line.seconds, *(free[lane] for lane in work.lanes)) + work.seconds
    free.update(dict.fromkeys(work.lanes, ends))
    line.transfers[work.cause] += work.seconds
    under_way[name] = Transfer(ends, work.seconds, work.cause)


def _run(line: Timeline, free: Mapping[str, float], work: Duration) -> None:
    if work.lanes:
        line.transfers[work.cause] += work.seconds
        idle_at = max(free.get(lane, 0.0) for lane in work.lanes)
        line.spend(work.cause, max(0.0, idle_at - line.seconds))
    line.spend(work.cause, work.seconds)


def _finish(line: Timeline, under_way: dict[str, Transfer], name: str) -> None:
    transfer = under_way.pop(name, None)
    if transfer and transfer.ends > line.seconds:
        line.spend(transfer.cause, transfer.ends - line.seconds)
