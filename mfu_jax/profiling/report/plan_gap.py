"""A plan beside a profile: where a step's time differs from the plan's, and why, in seconds.

Groups of instructions are joined by scope, phase and kind, as the plan may be of another program of
the same step. Nothing else is in either sum, so the rows sum to the difference of the step times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.mesh_axes import kind_of
from mfu_jax.names import IDLE
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
from mfu_jax.profiling.timeline.devices import ON_DEVICE

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile

WAITING_HOST, LAUNCHES = "waiting host", "gaps between kernels"
EXPOSED, HIDDEN = "exposed transfer", "hidden transfer"
EXTRA, NOT_RUN = "extra op", "op that did not run"
SLOWER, FASTER, CLOCK = "slower kernel", "faster kernel", "lower clock"
_LOOPS: GroupKey = ("(loops and calls)", "", "loop overhead")
_LEAST = 1e-9  # seconds: rounding
_FEW = 0.25  # of the time of matmuls, or of other kernels, that may be as fast as planned
_SLOW = 1.05  # times as long: more than a plan's error


@dataclass(frozen=True, kw_only=True)
class PlanGap(TimeChanges):
    """What a step takes beyond its plan.

    Attributes:
        path: the plan's file.
        target: the chips planned for.
        planned_seconds: of a step.
        measured_seconds: the same.
    """

    path: str
    target: str
    planned_seconds: float
    measured_seconds: float

    def to_json(self) -> dict[str, Any]:
        """The gap as plain JSON values; in ``changes``, ``before`` is the plan's time."""
        return {
            "file": self.path,
            "target": self.target,
            "planned_seconds": self.planned_seconds,
            "measured_seconds": self.measured_seconds,
            "seconds": self.measured_seconds - self.planned_seconds,
            **super().to_json(),
        }


def plan_gap(profile: Profile, plan: Mapping[str, Any], path: str) -> PlanGap:
    """Joins a profile's ops with a plan's.

    Args:
        profile: of the planned step.
        plan: what ``mfu-jax plan … --json`` prints.
        path: of its file, for messages.

    Raises:
        UserError: the plan has no times by op.
    """
    planned, measured = _planned(plan, path), _measured(profile.measured)
    changes = [
        change_of(key, was, now, {w: s for w, s in _why(key, was, now).items() if abs(s) > _LEAST})
        for key in dict.fromkeys((*planned, *measured))
        for was, now in [(planned.get(key, OpSums()), measured.get(key, OpSums()))]
    ]
    changes = [*_idle(profile.measured), *_with_clock(changes)]
    changed = [change for change in changes if any(change.why.values())]
    return PlanGap(
        path=path,
        target=str(plan.get("target", "")),
        planned_seconds=float(plan["step_time_seconds"]),
        measured_seconds=profile.measured.step_seconds,
        changes=tuple(sorted(changed, key=lambda change: -abs(change.seconds))),
    )


def _planned(plan: Mapping[str, Any], path: str) -> dict[GroupKey, OpSums]:
    try:
        found = {}
        for row in plan["ops"]:
            key = str(row["scope"] or f"({row['kind']})"), str(row["phase"]), str(row["kind"])
            found[key] = OpSums(
                seconds=float(row["seconds"]),
                runs=float(row["runs"]),
                flops=float(row["flops"]),
                hbm_bytes=float(row["hbm_bytes"]),
            )
        return found
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path!r} has no times by op; expected what mfu-jax plan … --json prints",
            hint="usually an older version made it, or the plan does not fit; make it again",
        ) from None


def _measured(measured: MeasuredStep) -> dict[GroupKey, OpSums]:
    groups: dict[GroupKey, OpSums] = {}
    for op in measured.ops:
        groups.setdefault(_key(op), OpSums()).add(op)
    return groups


def _key(op: OpTime) -> GroupKey:
    joined, record = op.op, op.op.start or op.op.record
    if joined.work is DeviceWork.CONTROL:
        return _LOOPS
    if record is None:
        return f"({joined.kind})", "", joined.kind
    kind = kind_of(record, joined.source.mesh if joined.source else {})
    return record.scope or f"({kind})", record.phase, kind


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


def _why(key: GroupKey, was: OpSums, now: OpSums) -> dict[str, float]:
    """A group's extra seconds by cause."""
    more = now.seconds - was.seconds
    if key == _LOOPS:
        return whole("loop overhead", more)
    if now.is_waiting and key[2] != ON_DEVICE:
        return whole(EXPOSED if more > 0 else HIDDEN, more)
    if not was.runs or not now.runs:
        return whole(NOT_RUN if was.runs else EXTRA, more)
    reasons = (EXTRA if now.runs > was.runs else "more work", "less work", SLOWER, FASTER)
    if was.flops and now.flops:
        return divided(was, now, lambda group: group.flops, reasons)
    if was.hbm_bytes and now.hbm_bytes:
        return divided(was, now, lambda group: group.hbm_bytes, reasons)
    return divided(was, now, lambda group: group.runs, reasons)


def _with_clock(changes: Sequence[TimeChange]) -> Iterator[TimeChange]:
    """The changes, with the slowdown that nearly all matmuls have in common as the clock's.

    Other kernels follow the clock as far as nearly all of them are slower, too: those that are
    bound by memory may not be.
    """
    clock = _common(change for change in changes if any(change.flops))
    others = min(clock, _common(change for change in changes if not any(change.flops)))
    for change in changes:
        slower = change.why.get(SLOWER, 0.0)
        factor = clock if any(change.flops) else others
        if clock < _SLOW or factor <= 1 or not slower:
            yield change
            continue
        part = min(slower, (change.after - slower) * (factor - 1))
        rest = {why: seconds for why, seconds in change.why.items() if why != SLOWER}
        why = {CLOCK: part, **whole(SLOWER, slower - part), **rest}
        yield dataclasses.replace(change, why=why)


def _common(changes: Iterable[TimeChange]) -> float:
    """How many times as long kernels take at the plan's work: the median, by time; 1 if not most.

    A slower kernel leaves others as they are; a clock slows nearly all.
    """
    both = [c for c in changes if c.before and c.after and not {EXPOSED, HIDDEN} & c.why.keys()]
    if len(both) < 2:
        return 1.0
    planned = np.array([c.after - c.why.get(SLOWER, 0) - c.why.get(FASTER, 0) for c in both])
    ratios = np.array([c.after for c in both]) / planned
    order = np.argsort(ratios)
    until = np.cumsum(planned[order]) / planned.sum()
    few, median = ratios[order][np.searchsorted(until, (_FEW, 0.5))].tolist()
    return float(median) if few >= _SLOW else 1.0
