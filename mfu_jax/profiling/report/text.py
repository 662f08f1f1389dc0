"""A profile as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mfu_jax.profiling.breakdown.program_times import ProgramTime
from mfu_jax.profiling.breakdown.tables import COLUMNS, TableRow
from mfu_jax.profiling.breakdown.waterfall import Bar
from mfu_jax.util.formatting import (
    MOST_COLUMNS,
    columns,
    counted,
    percent,
    printable,
    seconds_text,
    short,
)

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile
    from mfu_jax.profiling.report.plan_gap import PlanGap


def render(
    profile: Profile,
    *,
    by: Sequence[str],
    depth: int = 0,
    sort: str = "time",
    top: int = 15,
    gap: PlanGap | None = None,
) -> str:
    """The verdict and the advice, the waterfall and the tables.

    Args:
        profile: the profile.
        by: which tables.
        depth: as in `Profile.table`.
        sort: as in `Profile.table`.
        top: rows per table; 0: all.
        gap: to a plan.
    """
    verdict = "\n".join(map(printable, profile.verdict.render().splitlines()))
    parts = [verdict, _head(profile), "\n".join(_advice(profile))]
    parts += [gap.render(top=top)] if gap else []
    parts.append("\n".join(_waterfall(profile.waterfall)))
    if "program" in by:
        parts += ["\n".join(_program(program)) for program in profile.programs]
    for kind in by:
        parts.append("\n".join(_table(kind, profile.table(kind, depth=depth, sort=sort), top)))
    if len(profile.programs) > 1 and "program" not in by:
        parts.append(f"a step runs {len(profile.programs)} programs; by=program shows each alone")
    return "\n\n".join([*parts, *(f"note: {printable(note)}" for note in profile.notes)])


def _head(profile: Profile) -> str:
    measured, count = profile.measured, len(profile.measured.devices)
    kind = profile.program.device_kind or measured.kind or measured.platform
    where = f" on each of {count} devices" if count > 1 else ""
    mean = f"mean of {counted(measured.steps, 'step')}{where}"
    lines = [
        ("trace", profile.source),
        ("program", f"{measured.main.module} on {count} × {kind}"),
        ("step time", f"{seconds_text(measured.step_seconds)}, {mean}"),
        ("MFU", f"{percent(profile.mfu)} of {profile.peaks.main}"),
        ("coverage", f"{percent(profile.coverage)} of device time has its instruction"),
    ]
    executed = max(profile.program.ledger.executed, 1)
    for line in profile.beyond:
        share = f"{line.flops / executed:.2%} of executed"
        lines.append(("beyond executed", f"{line.label}: {line.flops:,} FLOPs a step, {share}"))
    return "\n".join(columns(lines, "<", width=MOST_COLUMNS, fold=1))


def _waterfall(bars: Sequence[Bar]) -> list[str]:
    rows = [("where the peak went", "time", "pts", "most of it")]
    left = 100.0
    rows.append(("peak", "", f"{left:.2f}", ""))
    names = [*(f"- {printable(bar.name)}" for bar in bars[:-1]), f"= {bars[-1].name}"]
    for name, bar in zip(names, bars, strict=True):
        rows.append((name, seconds_text(bar.seconds), f"{bar.mfu_points:.2f}", bar.largest))
    return columns(rows, "<>><", width=MOST_COLUMNS, fold=3)


def _program(program: ProgramTime) -> list[str]:
    """The waterfall of one program."""
    return [f"{program}; pts are of this time", *_waterfall(program.waterfall)]


def _advice(profile: Profile) -> list[str]:
    if not profile.advice:
        return textwrap.wrap(f"advice: {profile.no_advice}", MOST_COLUMNS, break_on_hyphens=False)
    lines = ["advice, the largest gain first; gains do not add up"]
    for advice in profile.advice:
        lines.append(f"{advice.cause}: {profile.gain_of(advice)}")
        lines.append(f"  do: {advice.remedy}")
        text = printable(advice.evidence)
        lines += textwrap.wrap(text, MOST_COLUMNS, initial_indent="  ", subsequent_indent="  ")
    return lines


def _table(kind: str, rows: Sequence[TableRow], top: int) -> list[str]:
    shown = rows[:top] if top else rows
    head = (f"by {kind}", *(column.title for column in COLUMNS), "bound")
    cells = [head, *(_cells(row) for row in shown)]
    lines = columns(cells, "<>>>>>>>><", width=MOST_COLUMNS)
    if len(shown) < len(rows):
        rest = sum(row.seconds for row in rows[len(shown) :])
        lines.append(f"and {len(rows) - len(shown)} more, {seconds_text(rest)}; top=0 shows all")
    return lines


def _cells(row: TableRow) -> tuple[str, ...]:
    return (
        short(row.name) or "(no scope)",
        *(column.text(row) for column in COLUMNS),
        row.bound_by,
    )
