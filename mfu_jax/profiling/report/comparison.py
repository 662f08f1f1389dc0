"""Two profiles side by side: what got slower, in seconds per step, and why.

Ops of two programs are joined by scope, phase and kind, because XLA renumbers instructions in each.
A group's extra time is divided exactly: growth of its work (FLOPs, bytes or runs) at the old speed,
and the rest, which is a change of speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mfu_jax.names import IDLE
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.breakdown.ops import kernel_of, scope_of
from mfu_jax.profiling.breakdown.tables import WAITS
from mfu_jax.profiling.timeline.time_attribution import summed

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile

_LEAST = 1e-12  # seconds: rounding


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """A group of ops, or idle time, per step and device, in both profiles.

    Attributes:
        scope: named scope; for idle time, where the host was.
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


@dataclass(frozen=True, kw_only=True)
class TimeChanges:
    """What a step's extra time consists of.

    Attributes:
        changes: largest first; their seconds sum to the difference of the step times.
    """

    changes: tuple[TimeChange, ...]

    def by_reason(self) -> dict[str, float]:
        """Seconds of all changes by reason, largest first."""
        return _sums((why, s) for change in self.changes for why, s in change.why.items())

    def by_scope(self) -> dict[str, float]:
        """Seconds of all changes by scope, largest first."""
        return _sums((change.scope, change.seconds) for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """The changes and their sums as plain JSON values."""
        return {
            "by_reason": self.by_reason(),
            "by_scope": self.by_scope(),
            "changes": [{**asdict(c), "seconds": c.seconds} for c in self.changes],
        }


@dataclass(frozen=True, kw_only=True)
class Comparison(TimeChanges):
    """Two profiles.

    Attributes:
        before: the first profile.
        after: the second profile.
    """

    before: Profile
    after: Profile

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
            **super().to_json(),
        }


def compare(before: Profile, after: Profile) -> Comparison:
    """Joins the ops of two profiles, and explains why each group's time changed."""
    changes = [*_idle(before.measured, after.measured), *_ops(before.measured, after.measured)]
    changed = [change for change in changes if any(change.why.values())]
    return Comparison(
        before=before,
        after=after,
        changes=tuple(sorted(changed, key=lambda change: -abs(change.seconds))),
    )


def _head(profile: Profile) -> dict[str, Any]:
    return {
        "source": profile.source,
        "step_time_seconds": profile.measured.step_seconds,
        "mfu": profile.mfu,
        "coverage": profile.coverage,
    }


def _sums(pairs: Iterator[tuple[str, float]]) -> dict[str, float]:
    return dict(sorted(summed(pairs).items(), key=lambda item: -abs(item[1])))


def _idle(before: MeasuredStep, after: MeasuredStep) -> Iterator[TimeChange]:
    for where in dict.fromkeys((*before.idle, *after.idle)):
        was, now = before.idle.get(where, 0.0), after.idle.get(where, 0.0)
        reason = f"{IDLE}: {where}" if where else IDLE
        why = whole(reason, now - was)
        yield TimeChange(scope=f"({reason})", phase="", kind=IDLE, before=was, after=now, why=why)


def whole(reason: str, seconds: float) -> dict[str, float]:
    return {reason: seconds} if abs(seconds) > _LEAST else {}


@dataclass(kw_only=True)
class OpSums:
    """Sums over the ops of one scope, phase and kind."""

    seconds: float = 0.0
    durations: float = 0.0
    runs: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    is_waiting: bool = False

    def add(self, op: OpTime) -> None:
        record = op.op.record
        self.seconds += op.seconds
        self.durations += op.self_seconds
        self.runs += op.runs
        self.flops += record.flops * op.runs if record else 0
        self.hbm_bytes += record.hbm_bytes * op.runs if record else 0
        self.is_waiting |= op.op.work in WAITS


GroupKey = tuple[str, str, str]


def _groups(measured: MeasuredStep) -> dict[GroupKey, OpSums]:
    groups: dict[GroupKey, OpSums] = {}
    for op in measured.ops:
        phase = op.op.record.phase if op.op.record else ""
        groups.setdefault((scope_of(op), phase, kernel_of(op)), OpSums()).add(op)
    return groups


def _ops(before: MeasuredStep, after: MeasuredStep) -> Iterator[TimeChange]:
    old, new = _groups(before), _groups(after)
    for key in dict.fromkeys((*old, *new)):
        was, now = old.get(key, OpSums()), new.get(key, OpSums())
        yield change_of(key, was, now, _why(was, now))


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


def _why(was: OpSums, now: OpSums) -> dict[str, float]:
    """A group's extra seconds by reason."""
    if not was.runs:
        return whole("new op", now.seconds)
    if not now.runs:
        return whole("gone op", -was.seconds)
    if was.is_waiting and now.is_waiting:
        return divided(was, now, lambda g: g.durations, _WAITING)
    if was.flops and now.flops:
        return divided(was, now, lambda g: g.flops, _reasons("FLOPs", "FLOP"))
    if was.hbm_bytes and now.hbm_bytes:
        return divided(was, now, lambda g: g.hbm_bytes, _reasons("bytes", "byte"))
    return divided(was, now, lambda g: g.runs, _reasons("runs", "run"))


# More work, less work, slower work, faster work.
_WAITING = (
    *("longer communication", "shorter communication"),
    *("less hidden communication", "more hidden communication"),
)


def _reasons(work: str, unit: str) -> tuple[str, ...]:
    return f"more {work}", f"fewer {work}", f"more time per {unit}", f"less time per {unit}"


def divided(
    was: OpSums,
    now: OpSums,
    work_of: Callable[[OpSums], float],
    reasons: Sequence[str],
    most: float = math.inf,
) -> dict[str, float]:
    """Splits extra seconds into growth of the work at the old speed, and change of speed.

    Args:
        was: the first sums.
        now: the second ones.
        work_of: their work.
        reasons: for more and less work, for slower and faster work.
        most: seconds that more work may take.
    """
    more = was.seconds * (work_of(now) / work_of(was) - 1) if work_of(was) else 0.0
    more = min(more, most)
    rest = now.seconds - was.seconds - more
    work, speed = reasons[0 if more > 0 else 1], reasons[2 if rest > 0 else 3]
    return {**whole(work, more), **whole(speed, rest)}
