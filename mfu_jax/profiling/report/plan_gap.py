"""A plan beside a profile: where a step's time differs from the plan's, and why, in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import find
from mfu_jax.names import LOWER_CLOCK, UNEXPLAINED
from mfu_jax.profiling.report.comparison import (
    GroupKey,
    OpSums,
    TimeChange,
    TimedStep,
    by_reason,
    changes_json,
    explained,
    step_of,
    told,
)
from mfu_jax.profiling.report.comparison_text import changes_table, sums
from mfu_jax.util.formatting import columns, percent, printable
from mfu_jax.verdict import NOTABLE, StepGap

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile


@dataclass(frozen=True, kw_only=True)
class PlanGap(StepGap):
    """What a step takes beyond its plan.

    Attributes:
        path: the plan's file.
        changes: largest first; their seconds sum to the gap.
    """

    path: str
    changes: tuple[TimeChange, ...]

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
        return {"file": self.path, **changes_json(self.changes), **super().to_json()}


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
    planned = TimedStep(float(plan["step_time_seconds"]), _planned(plan, path))
    measured, other = step_of(profile.measured), _other_hardware(profile, plan)
    rows = explained(planned, measured, 1.0 if other else clock_share)
    notes = other, *_notes(profile, rows, clock_share)
    return PlanGap(
        path=path,
        target=printable(str(plan.get("target", ""))),
        planned_seconds=planned.seconds,
        measured_seconds=measured.seconds,
        causes=by_reason(rows),
        changes=told(rows),
        notes=tuple(filter(None, notes)),
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
