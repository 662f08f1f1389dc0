"""Two profiles, or a plan and a profile, as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mfu_jax.profiling.report.comparison import Comparison, TimeChange
from mfu_jax.util.formatting import columns, percent, readable, seconds_text, short

if TYPE_CHECKING:
    from mfu_jax.profiling.report.plan_gap import PlanGap


def render_comparison(comparison: Comparison, *, top: int = 15) -> str:
    """What changed, why, and where.

    Args:
        comparison: the two profiles.
        top: rows per table; 0: all.
    """
    reasons = [("why", "seconds"), *_sums(comparison.by_reason(), top)]
    scopes = [("by scope", "seconds"), *_sums(comparison.by_scope(), top)]
    changes = _changes(comparison.changes, top)
    parts = [_head(comparison), columns(reasons), columns(scopes), changes]
    return "\n\n".join("\n".join(part) for part in parts)


def render_gap(gap: PlanGap, *, top: int = 15) -> str:
    """What a step takes beyond its plan, by cause and by op.

    Args:
        gap: the plan beside the profile.
        top: rows per table; 0: all.
    """
    causes = columns([("cause", "seconds"), *_sums(gap.by_reason(), top)])
    rows = _changes(gap.changes, top, ("planned", "measured"))
    notes = [f"note: {note}" for note in gap.notes]
    return "\n".join([f"gap to the plan: {gap.sentence}", *causes, "", *rows, *notes])


def _head(comparison: Comparison) -> list[str]:
    before, after = comparison.before, comparison.after
    was, now = before.measured.step_seconds, after.measured.step_seconds
    rows = [
        ("", "before", "after", "difference"),
        ("step time", seconds_text(was), seconds_text(now), signed(comparison.seconds)),
        ("MFU", percent(before.mfu), percent(after.mfu), _points(after.mfu - before.mfu)),
    ]
    sources = columns([("before", before.source), ("after", after.source)], "<<")
    more = f"a step takes {signed(comparison.seconds)} ({now / was - 1:+z.1%})"
    return [*sources, "", *columns(rows, "<>>>"), "", more]


def _points(difference: float) -> str:
    return f"{100 * difference:+z.2f} points"


def signed(seconds: float) -> str:
    """Seconds with their sign.

    >>> signed(0.002), signed(-0.002)
    ('+2.000 ms', '-2.000 ms')
    """
    return f"{'+' if seconds > 0 else ''}{seconds_text(seconds)}"


def _sums(sums: dict[str, float], top: int) -> Iterator[tuple[str, str]]:
    shown = list(sums.items())[: top or None]
    yield from ((short(name), signed(seconds)) for name, seconds in shown)
    rest = sum(sums.values()) - sum(seconds for _, seconds in shown)
    if len(shown) < len(sums):
        yield f"{len(sums) - len(shown)} more", signed(rest)
    yield "total", signed(sum(sums.values()))


def _changes(
    changes: Sequence[TimeChange], top: int, times: tuple[str, str] = ("before", "after")
) -> list[str]:
    head = ("scope", "phase", "op", *times, "change", "GFLOP", "MB", "why")
    shown = changes[: top or None]
    lines = columns([head, *map(_cells, shown)], "<<<>>>>><")
    if len(shown) < len(changes):
        rest = sum(change.seconds for change in changes[len(shown) :])
        lines.append(f"and {len(changes) - len(shown)} more, {signed(rest)}; top=0 shows all")
    return lines


def _cells(change: TimeChange) -> tuple[str, ...]:
    return (
        short(change.scope),
        change.phase,
        short(change.op or change.kind),
        seconds_text(change.before),
        seconds_text(change.after),
        signed(change.seconds),
        pair(change.flops, 1e9),
        pair(change.hbm_bytes, 1e6),
        ", ".join(f"{why} {signed(seconds)}" for why, seconds in change.why.items()),
    )


def pair(numbers: tuple[int, int], unit: float) -> str:
    """A number before and after, in multiples of `unit`; only once if both print the same.

    >>> pair((10**9, 2 * 10**9), 1e9), pair((0, 0), 1.0)
    ('1.000 → 2.000', '-')
    """
    before, after = (readable(number / unit) for number in numbers)
    if not any(numbers):
        return "-"
    return before if before == after else f"{before} → {after}"
