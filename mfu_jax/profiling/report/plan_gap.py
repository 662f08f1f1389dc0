"""A plan beside a profile: where a step's time differs from the plan's, and why, in seconds.

Ops are joined by name where the plan is of the program that ran: where a scope, phase and kind has
the same instructions and the same work in both. Others are joined by scope, phase and kind. What
neither side explains is a row of its own, so that the rows sum to the difference of step times.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.mesh_axes import kind_of
from mfu_jax.hardware.chips import find
from mfu_jax.names import IDLE, LOWER_CLOCK, UNEXPLAINED, WAITING_HOST
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.join.ops import DeviceWork
from mfu_jax.profiling.report.comparison import (
    GroupKey,
    OpSums,
    TimeChange,
    TimeChanges,
    change_of,
    divided,
    whole,
)
from mfu_jax.profiling.report.comparison_text import changes_table, sums
from mfu_jax.profiling.timeline.devices import ON_DEVICE
from mfu_jax.util.formatting import columns, percent, printable
from mfu_jax.verdict import NOTABLE, StepGap, largest_first

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
_LEAST = 1e-9  # seconds: rounding
_FEW = 0.25  # of the time of matmuls, or of other kernels, that may be as fast as planned
_SLOW = 1.05  # times as long
_SLOW_UNREAD = 1.1  # the same without a reading of the clock: more than most plans' error
_SAME = 1e-3  # of the work of one program in two files


@dataclass(frozen=True, kw_only=True)
class PlanGap(StepGap, TimeChanges):
    """What a step takes beyond its plan.

    Attributes:
        path: the plan's file.
    """

    path: str

    def by_reason(self) -> dict[str, float]:
        """Seconds by cause: those of the gap's own sign first, the largest first.

        A cause and its opposite are one: what a plan errs in each op by cancels in their sum.
        """
        found = TimeChanges.by_reason(self)
        for cause, opposite in _OPPOSITES:
            net = found.pop(cause, 0.0) + found.pop(opposite, 0.0)
            found |= whole(cause if net > 0 else opposite, net)
        return largest_first(found, self.seconds)

    def render(self, *, top: int = 15) -> str:
        """The gap by cause and by op.

        Args:
            top: rows per table; 0: all.
        """
        causes = columns([("cause", "seconds"), *sums(self.by_reason(), top)])
        rows = changes_table(self.changes, top, ("planned", "measured"))
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"gap to the plan: {self.sentence}", *causes, "", *rows, *notes])

    def to_json(self) -> dict[str, Any]:
        """The gap as plain JSON values; in ``changes``, ``before`` is the plan's time."""
        return {"file": self.path, **TimeChanges.to_json(self), **StepGap.to_json(self)}


@dataclass(kw_only=True)
class _Group(OpSums):
    """Planned or measured time of the ops of one scope, phase and kind.

    Attributes:
        by_name: each instruction's part; of a plan, its seconds only.
        is_known: whether a program has all of these ops.
        is_callback: whether the device waits in them for Python.
    """

    by_name: dict[str, OpSums] = field(default_factory=dict)
    is_known: bool = True
    is_callback: bool = False

    def has(self, measured: _Group) -> bool:
        """Whether a plan has these instructions, and this work: it is of the program that ran."""
        work = (self.flops, measured.flops), (self.hbm_bytes, measured.hbm_bytes)
        is_same = all(abs(a - b) <= _SAME * max(a, b) for a, b in work)
        return is_same and set() < measured.by_name.keys() <= self.by_name.keys()


def plan_gap(
    profile: Profile, plan: Mapping[str, Any], path: str, clock_share: float | None = None
) -> PlanGap:
    """Joins a profile's ops with a plan's.

    Args:
        profile: of the planned step.
        plan: what ``mfu-jax plan … --json`` prints.
        path: of its file, for messages.
        clock_share: the devices' clock as read in the run, as a share of the one at which they
            reach their peak; None: no reading.

    Raises:
        UserError: the plan has no times by op.
    """
    planned, measured = _planned(plan, path), _measured(profile.measured)
    ops = _with_unknown(_rows(planned, measured))
    other = _other_hardware(profile, plan)
    rows = [*_with_clock(ops, 1.0 if other else clock_share), *_idle(profile.measured)]
    whole_plan, whole_step = float(plan["step_time_seconds"]), profile.measured.step_seconds
    before = whole_plan - sum(row.before for row in rows)
    after = whole_step - sum(row.after for row in rows)
    rows.append(_row(_REST, OpSums(seconds=before), OpSums(seconds=after)))
    notes = other, *_notes(profile, rows, clock_share)
    rows = [row for row in rows if row.why]
    return PlanGap(
        path=path,
        target=printable(str(plan.get("target", ""))),
        planned_seconds=whole_plan,
        measured_seconds=whole_step,
        changes=tuple(sorted(rows, key=lambda row: -abs(row.seconds))),
        notes=tuple(filter(None, notes)),
    )


def _planned(plan: Mapping[str, Any], path: str) -> dict[GroupKey, _Group]:
    try:
        found = {}
        for row in plan["ops"]:
            key = str(row["scope"] or f"({row['kind']})"), str(row["phase"]), str(row["kind"])
            found[key] = _Group(
                seconds=float(row["seconds"]),
                runs=float(row["runs"]),
                flops=float(row["flops"]),
                hbm_bytes=float(row["hbm_bytes"]),
                by_name={
                    str(name): OpSums(seconds=float(seconds))
                    for name, seconds in row.get("instructions", {}).items()
                },
            )
        return found
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path!r} has no times by op; expected what mfu-jax plan … --json prints",
            hint="usually an older version made it, or the plan does not fit; make it again",
        ) from None


def _measured(measured: MeasuredStep) -> dict[GroupKey, _Group]:
    groups: dict[GroupKey, _Group] = {}
    for op in measured.ops:
        record, group = op.op.start or op.op.record, groups.setdefault(_key(op), _Group())
        name = record.name if record else op.op.name.name
        group.add(op)
        group.by_name.setdefault(name, OpSums()).add(op)
        group.is_known &= record is not None or op.op.work is not DeviceWork.COMPUTE
        group.is_callback |= record is not None and "callback" in record.shape.target
    return groups


def _key(op: OpTime) -> GroupKey:
    joined, record = op.op, op.op.start or op.op.record
    if joined.work is DeviceWork.CONTROL:
        return _LOOPS
    if record is None:
        return f"({joined.kind})", "", joined.kind
    kind = kind_of(record, joined.source.mesh if joined.source else {})
    return record.scope or f"({kind})", record.phase, kind


def _rows(
    planned: Mapping[GroupKey, _Group], measured: Mapping[GroupKey, _Group]
) -> Iterator[tuple[TimeChange, bool]]:
    """All ops, and whether a program has them."""
    for key in dict.fromkeys((*planned, *measured)):
        was, now = planned.get(key, _Group()), measured.get(key, _Group())
        if now.is_callback:
            why = whole(WAITING_HOST, now.seconds - was.seconds)
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
        return whole("loop overhead", more)
    if key == _REST or (was.seconds and not was.runs):  # of no instruction: a bound, a bubble
        return whole(UNEXPLAINED, more)
    if now.is_waiting and key[2] != ON_DEVICE:
        return whole(EXPOSED if more > 0 else HIDDEN, more)
    if not was.runs or not now.runs:
        return whole(MISSING if was.runs else EXTRA, more)
    reasons = (EXTRA if now.runs > was.runs else _MORE, _LESS, SLOWER, FASTER)
    work_of = "flops" if was.flops and now.flops else "hbm_bytes"
    if not (getattr(was, work_of) and getattr(now, work_of)):
        work_of = "runs"
    # A launch's share in a short op makes its planned speed too low for more work.
    return divided(was, now, operator.attrgetter(work_of), reasons, most=now.seconds)


def _idle(measured: MeasuredStep) -> Iterator[TimeChange]:
    """Idle time within programs, and between them: no plan has any."""
    idle = sum(measured.idle.values())
    within = min(idle, sum(measured.idle_within.values()))
    for why, seconds in ((WAITING_HOST, idle - within), (LAUNCHES, within)):
        yield TimeChange(
            scope=f"({IDLE})",
            phase="",
            kind=IDLE,
            before=0.0,
            after=seconds,
            why=whole(why, seconds),
        )


def _with_unknown(rows: Iterable[tuple[TimeChange, bool]]) -> Iterator[TimeChange]:
    """The rows; ops that no program has may be those of the plan that seem to be missing."""
    rows = list(rows)
    missing = -sum(row.why.get(MISSING, 0.0) for row, _ in rows)
    unknown = sum(row.after for row, is_known in rows if not is_known)
    is_unclear = missing > _FEW * unknown > 0
    for row, is_known in rows:
        if is_unclear and (MISSING in row.why or not is_known):
            row = dataclasses.replace(row, why=whole(UNEXPLAINED, row.seconds))
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
        rest |= whole(SLOWER if speed > part else FASTER, speed - part)
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


def _other_hardware(profile: Profile, plan: Mapping[str, Any]) -> str:
    """A note if the plan is for other chips: that is then what all ops differ by, no clock."""
    kind, chip = profile.program.device_kind or profile.measured.kind, plan.get("hardware")
    if not (chip and kind) or chip in [found.name for found in find(kind)]:
        return ""
    return f"the plan is for {chip}, the profile of {kind}: other hardware"


def _notes(
    profile: Profile, rows: Sequence[TimeChange], clock_share: float | None
) -> Iterator[str]:
    """How sure the causes are."""
    busy = profile.measured.busy_seconds
    by_op = sum(row.after for row in rows if row.op)
    if by_op < (1 - NOTABLE) * busy:
        yield (
            f"{percent(by_op / busy)} of the time of ops is joined op by op, the rest by scope, "
            "phase and kind: the plan is of another program, or has no instructions"
        )
    slow = any(LOWER_CLOCK in row.why for row in rows)
    if clock_share is not None:
        yield f"the clock was read at {percent(clock_share)} of the one of the peak"
    elif slow:
        yield f"{LOWER_CLOCK}: inferred, as nearly all matmuls are slower; the run has no readings"
    unexplained = sum(row.why.get(UNEXPLAINED, 0.0) for row in rows)
    if abs(unexplained) > NOTABLE * profile.measured.step_seconds:
        yield (
            f"{UNEXPLAINED}: ops without an instruction, which may be the plan's that seem to be "
            "missing, and planned time of no op (a pipeline's bubble, a bound)"
        )
