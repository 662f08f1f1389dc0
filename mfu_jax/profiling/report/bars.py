"""The waterfall: from the peak down, each bar begins where the last one ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mfu_jax.pages.document import quiet
from mfu_jax.pages.markup import Markup, number, tag
from mfu_jax.profiling.breakdown.waterfall import MFU, Bar
from mfu_jax.util.formatting import seconds_text, short

# The class of a bar, by the start of its name; all others are work that is not the model's.
_KINDS = (
    ("idle", "idle"),
    ("exposed communication", "communication"),
    ("ops without", "unknown"),
    ("loops and calls", "memory"),
    ("exposed copies", "memory"),
    ("memory-bound", "memory"),
    ("matmuls below peak", "below"),
    (MFU, "model"),
)


def waterfall_bars(bars: Sequence[Bar], title: str) -> Markup:
    """The bars as rows.

    Args:
        bars: as returned by `waterfall`.
        title: for screen readers.
    """
    rows = [_row("peak", "peak", 0.0, 100.0, None, ""), *_rows(bars)]
    return tag("div", *rows, class_="waterfall", role="table", aria_label=title)


def _rows(bars: Sequence[Bar]) -> Iterator[Markup]:
    done = 0.0
    for bar in bars:
        most = ", ".join(f"{short(s)} {seconds_text(t)}" for s, t in bar.scopes.items())
        yield _row(bar.name, _kind_of(bar.name), done, bar.mfu_points, bar.seconds, most)
        done += bar.mfu_points


def _kind_of(name: str) -> str:
    """A bar's style-sheet class."""
    return next((kind for start, kind in _KINDS if name.startswith(start)), "other")


def _row(
    name: str, kind: str, start: float, points: float, seconds: float | None, most: str
) -> Markup:
    """A row: its name, its track, and its numbers, with a remark below."""
    time = "" if seconds is None else seconds_text(seconds)
    return tag(
        "div",
        tag("span", name, class_="name", role="cell"),
        tag("span", _mark(kind, start, start + points), class_="track", aria_hidden="true"),
        tag("span", time, class_="n", role="cell", data_seconds=seconds),
        tag("span", f"{points:.2f}", class_="n", role="cell", data_points=points),
        tag("small", most, role="cell", class_="most") if most else None,
        class_="bar",
        role="row",
        data_bar=name,
    )


def _mark(kind: str, start: float, end: float) -> Markup:
    """A bar between its two ends, which are percentages of the track."""
    left, right = sorted((max(0.0, min(100.0, start)), max(0.0, min(100.0, end))))
    return tag("i", class_=kind, style=f"left:{number(left)}%;width:{number(right - left)}%")


def legend() -> Markup:
    """Explains the columns."""
    return quiet("Seconds of a step, and points of MFU: percent of the step. They sum to the step.")
