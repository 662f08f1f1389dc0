"""Two profiles as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from mfu_jax.profiling.report.comparison import Comparison, TimeChange, by_reason, by_scope
from mfu_jax.util.formatting import MOST_COLUMNS, columns, percent, readable, seconds_text, short


def render_comparison(comparison: Comparison, *, top: int = 15) -> str:
    """What changed, why, and where.

    Args:
        comparison: the two profiles.
        top: rows per table; 0: all.
    """
    reasons = [("why", "seconds"), *sums(by_reason(comparison.changes), top)]
    scopes = [("by scope", "seconds"), *sums(by_scope(comparison.changes), top)]
    changes = changes_table(comparison.changes, top)
    parts = [_head(comparison), columns(reasons), columns(scopes), changes]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(comparison: Comparison) -> list[str]:
    before, after = comparison.before, comparison.after
    was, now = before.measured.step_seconds, after.measured.step_seconds
    rows = [
        ("", "before", "after", "difference"),
        ("step time", seconds_text(was), seconds_text(now), signed(comparison.seconds)),
        ("MFU", percent(before.mfu), percent(after.mfu), _points(after.mfu - before.mfu)),
    ]
    sources = columns([("before", before.source), ("after", after.source)], "<<")
    return [*sources, "", *columns(rows, "<>>>"), "", _change(now - was, was)]


def _change(seconds: float, before: float) -> str:
    """How much longer a step is."""
    if not seconds:
        return "a step takes the same time"
    size = f"{seconds_text(abs(seconds))} ({percent(abs(seconds) / before)})"
    return f"a step is {size} {'longer' if seconds > 0 else 'shorter'}"


def _points(difference: float) -> str:
    return f"{100 * difference:+z.2f} pts"


def signed(seconds: float) -> str:
    """Seconds with their sign.

    >>> signed(0.002), signed(-0.002)
    ('+2.000 ms', '-2.000 ms')
    """
    return f"{'+' if seconds > 0 else ''}{seconds_text(seconds)}"


def sums(by_name: dict[str, float], top: int) -> Iterator[tuple[str, str]]:
    """Rows of seconds by name, with their total."""
    shown = list(by_name.items())[: top or None]
    yield from ((short(name), signed(seconds)) for name, seconds in shown)
    rest = sum(by_name.values()) - sum(seconds for _, seconds in shown)
    if len(shown) < len(by_name):
        yield f"{len(by_name) - len(shown)} more", signed(rest)
    yield "total", signed(sum(by_name.values()))


def changes_table(
    changes: Sequence[TimeChange], top: int, times: tuple[str, str] = ("before", "after")
) -> list[str]:
    """A table of ops, below each what it is and why; `times` names its two columns of seconds."""
    shown = changes[: top or None]
    head = ("scope", "phase", *times, "change")
    details = iter([["    op: why; GFLOP, MB"], *map(_details, shown)])
    lines: list[str] = []
    for line in columns([head, *map(_cells, shown)], "<<>>>", width=MOST_COLUMNS):
        if lines and not line.startswith(" "):  # the row before ends here
            lines += next(details)
        lines.append(line)
    lines += next(details)
    if len(shown) < len(changes):
        rest = sum(change.seconds for change in changes[len(shown) :])
        lines.append(f"and {len(changes) - len(shown)} more, {signed(rest)}; top=0 shows all")
    return lines


def _cells(change: TimeChange) -> tuple[str, ...]:
    return (
        short(change.scope) or "(no scope)",
        change.phase,
        seconds_text(change.before),
        seconds_text(change.after),
        signed(change.seconds),
    )


def _details(change: TimeChange) -> list[str]:
    why = ", ".join(f"{why} {signed(seconds)}" for why, seconds in change.why.items())
    work = {"GFLOP": pair(change.flops, 1e9), "MB": pair(change.hbm_bytes, 1e6)}
    known = ", ".join(f"{text} {unit}" for unit, text in work.items() if text != "-")
    text = f"{short(change.op or change.kind)}: {'; '.join(filter(None, (why, known)))}"
    return textwrap.wrap(text, MOST_COLUMNS, initial_indent="    ", subsequent_indent="      ")


def pair(numbers: tuple[int, int], unit: float) -> str:
    """A number before and after, in multiples of `unit`; only once if both print the same.

    >>> pair((10**9, 2 * 10**9), 1e9), pair((0, 0), 1.0)
    ('1.000 → 2.000', '-')
    """
    before, after = (readable(number / unit) for number in numbers)
    if not any(numbers):
        return "-"
    return before if before == after else f"{before} → {after}"
