"""One layer of a step in the walk of its schedule: when the units, each link and HBM are busy.

A layer is one iteration of the loop in which the step spends most of its time; without loops, it is
the whole step. To be drawable, each lane is divided into a fixed number of slots, and a slot shows
what takes most of it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts
from mfu_jax.planning.step_time.durations import Durations
from mfu_jax.planning.step_time.schedule import by_computation, walk

UNITS = "units"  # the lane of the device's own computation, and its waits
WAITS = "waits"
_SLOTS = 240


@dataclass(frozen=True, kw_only=True)
class LaneInterval:
    """A stretch of one lane.

    Attributes:
        lane: ``units``, a link, ``hbm``, ``host up`` or ``host down``.
        cause: what the lane does; ``waits`` where the units wait for a transfer.
        start: seconds from the layer's start.
        end: the same.
    """

    lane: str
    cause: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class LayerTimeline:
    """One iteration of the step's largest loop.

    Attributes:
        computation: its name in the program.
        runs: iterations per step.
        seconds: time of one iteration.
        spans: by lane, then by time; gaps are idle.
    """

    computation: str
    runs: int
    seconds: float
    spans: tuple[LaneInterval, ...]

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes, the units first."""
        return tuple(dict.fromkeys([UNITS, *(span.lane for span in self.spans)]))


def largest_layer(costs: ProgramCosts, durations: Durations) -> LayerTimeline | None:
    """The layer to draw; None if the program takes no time."""
    walked = [
        (records[0], list(_spans(records, durations)))
        for records in by_computation(costs)
        if records[0].runs
    ]
    ends = [max((span.end for span in spans), default=0.0) for _, spans in walked]
    loops = [i for i, (record, _) in enumerate(walked) if record.runs > 1]
    chosen = max(
        loops or range(len(walked)), key=lambda i: ends[i] * walked[i][0].runs, default=None
    )
    if chosen is None or not ends[chosen]:
        return None
    record, spans = walked[chosen]
    return LayerTimeline(
        computation=record.computation,
        runs=record.runs,
        seconds=ends[chosen],
        spans=tuple(_drawable(spans, ends[chosen])),
    )


def _spans(records: Iterable[InstructionRecord], durations: Durations) -> Iterator[LaneInterval]:
    """The walk of the schedule, lane by lane."""
    for work in walk(records, durations):
        cause = WAITS if work.is_wait else work.cause
        for lane in work.lanes or (UNITS,):
            yield LaneInterval(lane=lane, cause=cause, start=work.start, end=work.end)


def _drawable(spans: Sequence[LaneInterval], seconds: float) -> Iterator[LaneInterval]:
    """Spans by slot: each slot shows what takes most of it, and equal neighbours are joined."""
    slots: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    width = seconds / _SLOTS
    for span in spans:
        for slot in range(int(span.start / width), min(int(span.end / width), _SLOTS - 1) + 1):
            share = min(span.end, (slot + 1) * width) - max(span.start, slot * width)
            slots[span.lane, slot][span.cause] += max(share, 0.0)
    for lane in dict.fromkeys([UNITS, *sorted(span.lane for span in spans)]):
        causes = (_main_cause(slots.get((lane, slot), {}), width) for slot in range(_SLOTS))
        end = 0
        for cause, equal in itertools.groupby(causes):
            start, end = end, end + len(list(equal))
            if cause:
                yield LaneInterval(lane=lane, cause=cause, start=start * width, end=end * width)


def _main_cause(slot: dict[str, float], width: float) -> str:
    """What takes most of a slot; empty (idle) if less than half of it is busy."""
    if sum(slot.values()) < width / 2:
        return ""
    return max(slot, key=lambda cause: slot[cause])
