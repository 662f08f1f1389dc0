"""Where a step's time differs from another's, and why, in seconds; of two profiles, or of a plan.

Ops are joined by name where both are of one program: where a scope, phase and kind has the same
instructions and the same work in both. Others are joined by scope, phase and kind, because XLA
renumbers instructions in each program. A group's extra time is divided exactly: growth of its work
at the old speed, and the rest, a change of speed. What neither side explains is a row of its own,
so that the rows sum to the difference of step times.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfu_jax.flops.executed.mesh_axes import kind_of
from mfu_jax.names import IDLE, LOWER_CLOCK, UNEXPLAINED, WAITING_HOST
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.breakdown.tables import WAITS
from mfu_jax.profiling.join.ops import DeviceWork
from mfu_jax.profiling.timeline.devices import ON_DEVICE
from mfu_jax.profiling.timeline.time_attribution import summed
from mfu_jax.verdict import largest_first

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile

LAUNCHES = "gaps between kernels"
EXPOSED, HIDDEN = "exposed transfer", "hidden transfer"
EXTRA, MISSING = "extra op", "missing op"
SLOWER, FASTER = "slower kernel", "faster kernel"
_MORE, _LESS = "more work", "less work"
_OPPOSITES = ((SLOWER, FASTER), (EXPOSED, HIDDEN), (EXTRA, MISSING), (_MORE, _LESS))
_LOOPS: GroupKey = ("(loops and calls)", "", "loop overhead")
_REST: GroupKey = (f"({UNEXPLAINED})", "", UNEXPLAINED)
_ROUNDING, _LEAST = 1e-12, 1e-9  # seconds: rounding
_FEW = 0.25  # of the time of matmuls, or of other kernels, that may be as fast as planned
_SLOW = 1.05  # times as long
_SLOW_UNREAD = 1.1  # the same without a reading of the clock: more than most plans' error
_SAME = 1e-3  # of the work of one program in two files


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """A group of ops, or idle time, per step and device, in both profiles.

    Attributes:
        scope: named scope; for idle time, ``(idle)``.
        phase: such as ``forward``; empty for idle time.
        kind: a kernel, a collective over its axis, or an opcode; ``idle``.
        before: seconds in the first profile.
        after: seconds in the second profile.
        why: seconds by reason; they sum to `seconds`.
        flops: matmul FLOPs, before and after.
        hbm_bytes: bytes to and from memory, before and after.
        runs: runs, before and after.
        op: the instruction, if it is one that both have under this name.
    """

    scope: str
    phase: str
    kind: str
    before: float
    after: float
    why: dict[str, float] = field(default_factory=dict)
    flops: tuple[int, int] = (0, 0)
    hbm_bytes: tuple[int, int] = (0, 0)
    runs: tuple[float, float] = (0.0, 0.0)
    op: str = ""

    @property
    def seconds(self) -> float:
        """Extra seconds of the group."""
        return self.after - self.before


def by_reason(changes: Iterable[TimeChange]) -> dict[str, float]:
    """Seconds by cause: those of their sum's own sign first, the largest first.

    A cause and its opposite are one: what errs in each op by another sign cancels in their sum.
    """
    found = summed((why, s) for change in changes for why, s in change.why.items())
    for cause, opposite in _OPPOSITES:
        net = found.pop(cause, 0.0) + found.pop(opposite, 0.0)
        found |= _whole(cause if net > 0 else opposite, net)
    return largest_first(found, sum(found.values()))


def by_scope(changes: Iterable[TimeChange]) -> dict[str, float]:
    """Seconds by scope, largest first."""
    sums = summed((change.scope, change.seconds) for change in changes)
    return dict(sorted(sums.items(), key=lambda item: -abs(item[1])))


def changes_json(changes: Sequence[TimeChange]) -> dict[str, Any]:
    """The changes and their sums as plain JSON values."""
    return {
        "by_reason": by_reason(changes),
        "by_scope": by_scope(changes),
        "changes": [{**asdict(c), "seconds": c.seconds} for c in changes],
    }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two profiles.

    Attributes:
        before: the first profile.
        after: the second profile.
        changes: largest first; their seconds sum to the difference of the step times.
    """

    before: Profile
    after: Profile
    changes: tuple[TimeChange, ...]

    @property
    def seconds(self) -> float:
        """Extra seconds per step."""
        return self.after.measured.step_seconds - self.before.measured.step_seconds

    def to_json(self) -> dict[str, Any]:
        """The whole comparison as plain JSON values."""
        return {
            "before": _head(self.before),
            "after": _head(self.after),
            "seconds": self.seconds,
            **changes_json(self.changes),
        }


def compare(before: Profile, after: Profile) -> Comparison:
    """Joins the ops of two profiles, and explains why each one's time changed.

    Another chip or dtype makes all matmuls slower, whatever its clock.
    """
    kinds = {(profile.measured.kind, profile.peaks.main.dtype) for profile in (before, after)}
    share = None if len(kinds) == 1 else 1.0
    rows = explained(step_of(before.measured), step_of(after.measured), share)
    return Comparison(before=before, after=after, changes=told(rows))


def _head(profile: Profile) -> dict[str, Any]:
    return {
        "source": profile.source,
        "step_time_seconds": profile.measured.step_seconds,
        "mfu": profile.mfu,
        "coverage": profile.coverage,
    }


GroupKey = tuple[str, str, str]
"""Scope, phase and kind."""


@dataclass(kw_only=True)
class OpSums:
    """Sums over the ops of one scope, phase and kind, or over one of them.

    Attributes:
        by_name: each instruction's part; of a plan, its seconds only.
        is_waiting: whether the device only waits in one of them.
        is_known: whether a program has all of them.
        is_callback: whether the device waits in one of them for Python.
    """

    seconds: float = 0.0
    runs: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    by_name: dict[str, OpSums] = field(default_factory=dict)
    is_waiting: bool = False
    is_known: bool = True
    is_callback: bool = False

    def add(self, op: OpTime) -> None:
        record = op.op.record
        self.seconds += op.seconds
        self.runs += op.runs
        self.flops += record.flops * op.runs if record else 0
        self.hbm_bytes += record.hbm_bytes * op.runs if record else 0
        self.is_waiting |= op.op.work in WAITS

    def has(self, measured: OpSums) -> bool:
        """Whether these are the same instructions with the same work: both of one program."""
        work = (self.flops, measured.flops), (self.hbm_bytes, measured.hbm_bytes)
        is_same = all(abs(a - b) <= _SAME * max(a, b) for a, b in work)
        return is_same and set() < measured.by_name.keys() <= self.by_name.keys()


class TimedStep(NamedTuple):
    """A step's time, planned or measured, in seconds.

    Attributes:
        seconds: the whole step.
        groups: its ops.
        waiting: idle between programs.
        gaps: idle within programs.
    """

    seconds: float
    groups: Mapping[GroupKey, OpSums]
    waiting: float = 0.0
    gaps: float = 0.0


def step_of(measured: MeasuredStep) -> TimedStep:
    """A measured step."""
    groups: dict[GroupKey, OpSums] = {}
    for op in measured.ops:
        record, group = op.op.start or op.op.record, groups.setdefault(_key(op), OpSums())
        name = record.name if record else op.op.name.name
        group.add(op)
        group.by_name.setdefault(name, OpSums()).add(op)
        group.is_known &= record is not None or op.op.work is not DeviceWork.COMPUTE
        group.is_callback |= record is not None and "callback" in record.shape.target
    idle = sum(measured.idle.values())
    gaps = min(idle, sum(measured.idle_within.values()))
    return TimedStep(measured.step_seconds, groups, idle - gaps, gaps)


def explained(was: TimedStep, now: TimedStep, clock_share: float | None = None) -> list[TimeChange]:
    """Rows that sum to the difference of two steps, those that are equal among them.

    Args:
        was: the first step.
        now: the second one.
        clock_share: the clock in the second one, as a share of that of the first; None: not read.
    """
    rows = [*_with_clock(_with_unknown(_rows(was.groups, now.groups)), clock_share)]
    for why, before, after in (
        (WAITING_HOST, was.waiting, now.waiting),
        (LAUNCHES, was.gaps, now.gaps),
    ):
        spent = OpSums(seconds=before), OpSums(seconds=after)
        rows.append(change_of((f"({IDLE})", "", IDLE), *spent, _whole(why, after - before)))
    before = was.seconds - sum(row.before for row in rows)
    after = now.seconds - sum(row.after for row in rows)
    rows.append(_row(_REST, OpSums(seconds=before), OpSums(seconds=after)))
    return rows


def told(rows: Iterable[TimeChange]) -> tuple[TimeChange, ...]:
    """The rows that have a cause, largest first."""
    return tuple(sorted((row for row in rows if row.why), key=lambda row: -abs(row.seconds)))


def _whole(reason: str, seconds: float) -> dict[str, float]:
    return {reason: seconds} if abs(seconds) > _ROUNDING else {}


def _key(op: OpTime) -> GroupKey:
    joined, record = op.op, op.op.start or op.op.record
    if joined.work is DeviceWork.CONTROL:
        return _LOOPS
    if record is None:
        return f"({joined.kind})", "", joined.kind
    kind = kind_of(record, joined.source.mesh if joined.source else {})
    return record.scope or f"({kind})", record.phase, kind


def _rows(
    planned: Mapping[GroupKey, OpSums], measured: Mapping[GroupKey, OpSums]
) -> Iterator[tuple[TimeChange, bool]]:
    """All ops, and whether a program has them."""
    for key in dict.fromkeys((*planned, *measured)):
        was, now = planned.get(key, OpSums()), measured.get(key, OpSums())
        if now.is_callback:
            why = _whole(WAITING_HOST, now.seconds - was.seconds)
            yield change_of(key, was, now, why), True
            continue
        if not was.has(now):
            yield _row(key, was, now), now.is_known
            continue
        for name, op in now.by_name.items():
            before = dataclasses.replace(op, seconds=was.by_name[name].seconds)
            yield _row(key, before, op, name), True
        # Such as the condition of a loop whose trips a GPU's host counts.
        rest = sum(was.by_name[name].seconds for name in was.by_name.keys() - now.by_name.keys())
        yield _row(key, OpSums(seconds=rest, runs=max(was.runs - now.runs, 1)), OpSums()), True


def _row(key: GroupKey, was: OpSums, now: OpSums, op: str = "") -> TimeChange:
    why = {why: s for why, s in _why(key, was, now).items() if abs(s) > _LEAST}
    return change_of(key, was, now, why, op)


def _why(key: GroupKey, was: OpSums, now: OpSums) -> dict[str, float]:
    """A group's extra seconds by cause."""
    more = now.seconds - was.seconds
    if key == _LOOPS:
        return _whole("loop overhead", more)
    if key == _REST or (was.seconds and not was.runs):  # of no instruction: a bound, a bubble
        return _whole(UNEXPLAINED, more)
    if now.is_waiting and key[2] != ON_DEVICE:
        return _whole(EXPOSED if more > 0 else HIDDEN, more)
    if not was.runs or not now.runs:
        return _whole(MISSING if was.runs else EXTRA, more)
    reasons = (EXTRA if now.runs > was.runs else _MORE, _LESS, SLOWER, FASTER)
    work_of = "flops" if was.flops and now.flops else "hbm_bytes"
    if not (getattr(was, work_of) and getattr(now, work_of)):
        work_of = "runs"
    # A launch's share in a short op makes its planned speed too low for more work.
    return _divided(was, now, operator.attrgetter(work_of), reasons)


def change_of(
    key: GroupKey, was: OpSums, now: OpSums, why: dict[str, float], op: str = ""
) -> TimeChange:
    """The change of a group (scope, phase and kind), or of an op of it."""
    return TimeChange(
        scope=key[0],
        phase=key[1],
        kind=key[2],
        before=was.seconds,
        after=now.seconds,
        why=why,
        flops=(round(was.flops), round(now.flops)),
        hbm_bytes=(round(was.hbm_bytes), round(now.hbm_bytes)),
        runs=(was.runs, now.runs),
        op=op,
    )


def _divided(
    was: OpSums,
    now: OpSums,
    work_of: Callable[[OpSums], float],
    reasons: Sequence[str],
) -> dict[str, float]:
    """Splits extra seconds into growth of the work at the old speed, and change of speed.

    Args:
        was: the first sums.
        now: the second ones.
        work_of: their work.
        reasons: for more and less work, for slower and faster work.
    """
    more = was.seconds * (work_of(now) / work_of(was) - 1) if work_of(was) else 0.0
    more = min(more, now.seconds)
    rest = now.seconds - was.seconds - more
    work, speed = reasons[0 if more > 0 else 1], reasons[2 if rest > 0 else 3]
    return {**_whole(work, more), **_whole(speed, rest)}


def _with_unknown(rows: Iterable[tuple[TimeChange, bool]]) -> Iterator[TimeChange]:
    """The rows; ops that no program has may be those of the plan that seem to be missing."""
    rows = list(rows)
    missing = -sum(row.why.get(MISSING, 0.0) for row, _ in rows)
    unknown = sum(row.after for row, is_known in rows if not is_known)
    is_unclear = missing > _FEW * unknown > 0
    for row, is_known in rows:
        if is_unclear and (MISSING in row.why or not is_known):
            row = dataclasses.replace(row, why=_whole(UNEXPLAINED, row.seconds))
        yield row


def _with_clock(rows: Iterable[TimeChange], clock_share: float | None) -> Iterator[TimeChange]:
    """The rows, with the slowdown that nearly all matmuls have in common as the clock's.

    Other kernels follow the clock as far as nearly all of them are slower, too: those that are
    bound by memory may not be. Nothing is slower by more than a reading of the clock allows.
    """
    rows = list(rows)
    least, most = (_SLOW_UNREAD, np.inf) if clock_share is None else (_SLOW, 1 / clock_share)
    clock = min(most, _common(row for row in rows if any(row.flops)))
    others = min(clock, _common(row for row in rows if not any(row.flops)))
    for row in rows:
        factor = clock if any(row.flops) else others
        if clock < least or factor <= 1 or not _is_comparable(row):
            yield row
            continue
        speed = row.why.get(SLOWER, 0.0) + row.why.get(FASTER, 0.0)
        part = (row.after - speed) * (factor - 1)
        rest = {why: s for why, s in row.why.items() if why not in (SLOWER, FASTER)}
        rest |= _whole(SLOWER if speed > part else FASTER, speed - part)
        yield dataclasses.replace(row, why={LOWER_CLOCK: part, **rest})


def _is_comparable(row: TimeChange) -> bool:
    """Whether both have the op, and it is no transfer."""
    return bool(row.before and row.after and not {EXPOSED, HIDDEN, WAITING_HOST} & row.why.keys())


def _common(rows: Iterable[TimeChange]) -> float:
    """How many times as long kernels take at the plan's work: the median, by time; 1 if not most.

    A slower kernel leaves others as they are; a clock slows nearly all.
    """
    both = list(filter(_is_comparable, rows))
    if len(both) < 2:
        return 1.0
    planned = np.array([r.after - r.why.get(SLOWER, 0) - r.why.get(FASTER, 0) for r in both])
    ratios = np.array([r.after for r in both]) / planned
    order = np.argsort(ratios)
    until = np.cumsum(planned[order]) / planned.sum()
    few, median = ratios[order][np.searchsorted(until, (_FEW, 0.5))].tolist()
    return float(median) if few >= _SLOW else 1.0
