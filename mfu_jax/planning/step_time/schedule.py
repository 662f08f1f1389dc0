"""Walks a program's schedule: what runs when, and what waits for what.

The text of a compiled program is its schedule. Instructions run one after another; those between
an asynchronous start and its done hide the transfer that the start began. A transfer waits for its
link, and the done for the transfer. Of copies to or from host memory, the one that the program
waits for first goes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts
from mfu_jax.planning.step_time.durations import HOST_LANES, Durations

_NOTHING: Mapping[str, float] = MappingProxyType({})


class Interval(NamedTuple):
    """A stretch of time on some lanes, or on the device's units.

    Attributes:
        lanes: as named by `links.lanes`; empty: the units.
        cause: what they do; for a wait, the transfer.
        start: seconds from the computation's start.
        end: the same.
        is_wait: whether the units wait for a transfer.
        name: the instruction whose work it is; of a wait, the one that began the transfer.
    """

    lanes: tuple[str, ...]
    cause: str
    start: float
    end: float
    is_wait: bool = False
    name: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


BUBBLE = "pipeline bubble"


class PipelineTicks(NamedTuple):
    """The ticks of a pipeline, in each of which every stage runs its layers.

    Attributes:
        total: number of ticks.
        idle: of these, ticks in which a stage runs them on zeros: the bubble.
    """

    total: int
    idle: int


@dataclass(kw_only=True)
class PredictedTime:
    """Seconds of one run of some instructions, by cause.

    Attributes:
        seconds: from the first instruction to the last.
        by_cause: seconds by what the device did or waited for; they sum to `seconds`.
        by_op: the same by instruction; what belongs to none is under its cause.
        transfers: seconds of transfers by cause, including hidden ones.
    """

    seconds: float = 0.0
    by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_op: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfers: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def spend(self, cause: str, seconds: float, name: str = "") -> None:
        """Adds time in which the device does, or waits for, `cause`, for an instruction."""
        self.by_cause[cause] += seconds
        self.by_op[name or cause] += seconds
        self.seconds += seconds

    def add(self, other: PredictedTime, times: float) -> None:
        """Appends another timeline this many times."""
        self.seconds += times * other.seconds
        pairs = (self.by_cause, other.by_cause), (self.transfers, other.transfers)
        for mine, theirs in (*pairs, (self.by_op, other.by_op)):
            for cause, seconds in theirs.items():
                mine[cause] += times * seconds


def predicted_time(
    costs: ProgramCosts, durations: Durations, pipeline: PipelineTicks | None = None
) -> PredictedTime:
    """The time of one call of a program, with its loops multiplied out.

    Each computation's own instructions are walked once; the program's time is the sum of that time
    × runs over its computations. A transfer is hidden by a loop or a branch between its start and
    its done, too, but not by the next iteration. With a `pipeline`, what layers do in idle ticks,
    transfers included, is the bubble.
    """
    total = PredictedTime()
    of_all_runs: dict[str, float] = {}  # a computation → seconds, with those of what it calls
    for records in reversed(list(by_computation(costs))):  # callers last
        runs = records[0].runs
        if runs:
            inside = {
                record.name: sum(of_all_runs.get(name, 0.0) for name in record.called) / runs
                for record in records
                if record.called
            }
            once, idle = _summed(records, durations, inside), _idle_runs(records, pipeline)
            of_all_runs[records[0].computation] = runs * (once.seconds + sum(inside.values()))
            total.add(once, runs - idle)
            if idle:
                total.spend(BUBBLE, idle * once.seconds)
    return total


def _idle_runs(records: list[InstructionRecord], pipeline: PipelineTicks | None) -> float:
    """How many of its runs a computation of layers spends in idle ticks of a pipeline."""
    runs = records[0].runs
    if pipeline is None or runs % pipeline.total or not any(map(_is_of_layers, records)):
        return 0.0
    return runs * pipeline.idle / pipeline.total


def _is_of_layers(record: InstructionRecord) -> bool:
    return any(part.startswith("layers") for part in record.scope.split("/"))


def by_computation(costs: ProgramCosts) -> Iterable[list[InstructionRecord]]:
    """The instructions of each computation, in scheduled order."""
    found: dict[str, list[InstructionRecord]] = defaultdict(list)
    for record in costs.records.values():
        found[record.computation].append(record)
    return found.values()


@dataclass(kw_only=True)
class _Copy:
    waited_for: int
    cause: str
    seconds: float


@dataclass(kw_only=True)
class HostBus:
    """One direction of the bus between HBM and host memory, simulated up to a time.

    Several copies are in flight at once. The program's text does not say which one gets the bus
    first; here it is the one that the program waits for first. A public profile of Llama-shaped
    layers with offloaded activations on a v6e (scripts/results) shows no wait for such copies,
    which together take nearly as long as a layer's forward pass: served in start order, they would
    make most of it waits.

    Attributes:
        lane: its name.
        now: the time up to which it is known what the bus carried.
        left: unfinished copies by name, with the seconds that each still takes.
    """

    lane: str
    now: float = 0.0
    left: dict[str, _Copy] = field(default_factory=dict)

    def begin(self, name: str, cause: str, seconds: float, waited_for: int) -> None:
        """Begins a copy at `now`; call `serve` first to advance it.

        Args:
            name: the copy's instruction.
            cause: the cause that its time is booked under.
            seconds: its time with nothing else on the bus.
            waited_for: position of the instruction that waits for it.
        """
        self.left[name] = _Copy(waited_for=waited_for, cause=cause, seconds=seconds)

    def serve(self, until: float) -> Iterator[Interval]:
        """What the bus carries up to a time."""
        while self.left and self.now < until:
            yield self._carry(until - self.now)
        self.now = max(self.now, until)

    def finish(self, name: str) -> Iterator[Interval]:
        """What the bus carries until a copy is done."""
        while name in self.left:
            yield self._carry(self.left[name].seconds)

    def _carry(self, most: float) -> Interval:
        name = min(self.left, key=lambda name: self.left[name].waited_for)
        copy, start = self.left[name], self.now
        if copy.seconds <= most:
            del self.left[name]
            self.now += copy.seconds
        else:
            copy.seconds -= most
            self.now += most
        return Interval((self.lane,), copy.cause, start, self.now)


def walk(
    records: Iterable[InstructionRecord],
    durations: Durations,
    inside: Mapping[str, float] = _NOTHING,
) -> Iterator[Interval]:
    """What the units and the lanes do while a computation runs once.

    Args:
        records: its instructions.
        durations: of each.
        inside: seconds of loops and branches, by instruction; what the units do there is left out.
    """
    records = list(records)
    places = {record.started_by: place for place, record in enumerate(records) if record.started_by}
    buses = {lane: HostBus(lane=lane) for lane in HOST_LANES}
    now = 0.0
    under_way: dict[
        str, tuple[Interval, list[Interval]]
    ] = {}  # a start → its transfer, and those before it
    carried: dict[str, list[Interval]] = defaultdict(list)  # what each lane carries, in order

    def wait_for(name: str) -> Iterator[Interval]:
        """The units wait until what an instruction started is done."""
        nonlocal now
        for bus in buses.values():
            if name in bus.left:
                yield from bus.serve(now)
                yield from _waits(bus, name, now)
                now = max(now, bus.now)
        if name in under_way:
            own, ahead = under_way.pop(name)
            yield from _waits_for(own, ahead, now)
            now = max(now, own.end)

    for record in records:
        now += inside.get(record.name, 0.0)
        only_waits = record.opcode.endswith(("-done", "-update"))
        for part in () if only_waits else durations.of(record):
            if bus := buses.get(part.lanes[0]) if part.lanes else None:
                yield from bus.serve(now)
                place = places.get(record.name, len(records)) if record.is_start else -1
                bus.begin(record.name, part.cause, part.seconds, place)
                if not record.is_start:
                    yield from wait_for(record.name)
                continue
            before = max((carried[lane] for lane in part.lanes), key=_ends, default=[])
            start = max(now, _ends(before))
            own = Interval(part.lanes, part.cause, start, start + part.seconds, name=record.name)
            yield own
            ahead = [work for work in before if work.end > now]
            for lane in part.lanes:
                carried[lane] = [*(work for work in carried[lane] if work.end > now), own]
            if part.lanes and record.is_start:
                under_way[record.name] = own, ahead
                continue
            if part.lanes:
                yield from _waits_for(own, ahead, now)
            now = own.end
        if not record.opcode.endswith("-update"):
            yield from wait_for(record.started_by)
    for name in [*(name for bus in buses.values() for name in bus.left), *under_way]:
        yield from wait_for(name)


def _ends(works: list[Interval]) -> float:
    """When a lane is free again."""
    return works[-1].end if works else 0.0


def _waits_for(own: Interval, ahead: list[Interval], now: float) -> Iterator[Interval]:
    """The units wait for a transfer; as long as its lane carries others, for those."""
    for work in (*ahead, own):
        if work.end > now:
            yield Interval((), work.cause, now, work.end, is_wait=True, name=work.name)
            now = work.end


def _waits(bus: HostBus, name: str, now: float) -> Iterator[Interval]:
    """The rest of a copy that the units wait for."""
    if name not in bus.left:
        return
    cause = bus.left[name].cause
    yield from bus.finish(name)
    yield Interval((), cause, now, bus.now, is_wait=True, name=name)


def _summed(
    records: Iterable[InstructionRecord], durations: Durations, inside: Mapping[str, float]
) -> PredictedTime:
    line = PredictedTime()
    for work in walk(records, durations, inside):
        if work.lanes:
            line.transfers[work.cause] += work.seconds
        else:
            line.spend(work.cause, work.seconds, work.name)
    return line
