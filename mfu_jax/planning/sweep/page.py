"""A sweep as one page: memory against time, and every point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mfu_jax.pages.document import document, headlines, notes, packaged, quiet, section
from mfu_jax.pages.markup import Markup, joined, key, number, tag
from mfu_jax.pages.svg import chart, line, text
from mfu_jax.pages.tables import Column, Word, table, wide
from mfu_jax.planning.sweep.running import SweepResult, SweepRow, fastest_first
from mfu_jax.util.formatting import percent

_GIB = 2**30
_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 24, 28, 44
_TICKS = 5
_KEY = (("compiled", "compiled"), ("estimated", "estimated"), ("front", "none is better"))


def sweep_page(result: SweepResult) -> str:
    """The whole page's HTML."""
    body = [
        tag("h1", f"{result.target}: {len(result.rows)} points"),
        headlines(list(_numbers(result))),
        notes(result.notes),
        section("The fastest that fits", tag("p", tag("code", result.flags or "no point fits"))),
        section("Memory against time", _picture(result)),
        section("Points", wide(_table(result))),
    ]
    style = packaged("mfu_jax.planning.result", "style.css")
    return document(f"Sweep: {result.target}", body, style=style)


def _numbers(result: SweepResult) -> Iterator[tuple[str, str, float | None]]:
    compiled = sum(row.source == "compiled" for row in result.rows)
    yield "compiled", f"{compiled} of {len(result.rows)}", compiled
    winner = result.winner
    if winner and winner.tokens_per_sec_per_chip:
        rate = winner.tokens_per_sec_per_chip
        yield "tokens/s/chip", f"{rate:,.0f}", rate
    if winner and winner.mfu is not None:
        yield "MFU", percent(winner.mfu), winner.mfu
    if winner and winner.memory_peak_bytes:
        peak = winner.memory_peak_bytes
        yield "memory", f"{peak / _GIB:.2f} GiB", peak


def _picture(result: SweepResult) -> Markup:
    """The chart of memory against time; lower left is better."""
    rows = [r for r in result.rows if r.fits and r.memory_peak_bytes and r.tokens_per_sec_per_chip]
    if not rows:
        return quiet("No point that fits has a time.")
    places = _places(rows)
    front = sorted(place for row, place in zip(rows, places, strict=True) if row.pareto)
    line_of_front = " ".join(f"{number(x, 1)},{number(y, 1)}" for x, y in front)
    picture = chart(
        *_axes(rows),
        tag("polyline", points=line_of_front, class_="front"),
        *(_dot(row, place) for row, place in zip(rows, places, strict=True)),
        width=_WIDTH,
        height=_HEIGHT,
        label="memory of a device against the time of a token on a chip",
        kind="pareto",
    )
    return joined([picture, key(_KEY)])


def _x(row: SweepRow) -> float:
    return (row.memory_peak_bytes or 0) / _GIB


def _y(row: SweepRow) -> float:
    return 1e6 / (row.tokens_per_sec_per_chip or 1.0)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or high * 0.1 or 1.0
    return low - margin, high + margin


def _places(rows: Sequence[SweepRow]) -> list[tuple[float, float]]:
    (left, right), (low, high) = _ends([_x(r) for r in rows]), _ends([_y(r) for r in rows])
    return [
        (
            _LEFT + (_x(row) - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (_y(row) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM),
        )
        for row in rows
    ]


def _dot(row: SweepRow, place: tuple[float, float]) -> Markup:
    named = " ".join(f"{key}={text}" for key, text in row.values.items())
    about = f"{named}: {_x(row):.2f} GiB, {row.tokens_per_sec_per_chip:,.0f} tokens/s/chip"
    kind = "compiled" if row.source == "compiled" else "estimated"
    return tag(
        "circle",
        tag("title", f"{about} ({kind})"),
        cx=number(place[0], 1),
        cy=number(place[1], 1),
        r=5,
        class_=kind,
    )


def _axes(rows: Sequence[SweepRow]) -> Iterator[Markup]:
    (left, right), (low, high) = _ends([_x(r) for r in rows]), _ends([_y(r) for r in rows])
    bottom, end = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in range(_TICKS + 1):
        x = _LEFT + tick / _TICKS * (end - _LEFT)
        y = bottom - tick / _TICKS * (bottom - _TOP)
        yield line(x, _TOP, x, bottom, "grid")
        yield line(_LEFT, y, end, y, "grid")
        yield text(x, bottom + 16, f"{left + tick / _TICKS * (right - left):.4g}", "middle")
        yield text(_LEFT - 6, y + 4, f"{low + tick / _TICKS * (high - low):.4g}", "end")
    yield text((_LEFT + end) / 2, _HEIGHT - 8, "GiB of a device", "middle")
    yield text(_LEFT, _TOP - 12, "µs of a chip for a token", "start")


def _table(result: SweepResult) -> Markup:
    def shown(value: float | None, words: str) -> str:
        return "" if value is None else words.format(value)

    first, *others = result.rows[0].values
    columns: list[Column[SweepRow] | Word[SweepRow]] = [
        *(Word[SweepRow](key, lambda row, key=key: row.values[key]) for key in others),  # type: ignore[misc]
        Word("fits", lambda row: {True: "fits", False: "too large", None: "?"}[row.fits]),
        Column(
            "GiB",
            lambda row: row.memory_peak_bytes,
            lambda row: shown(_x(row) if row.memory_peak_bytes else None, "{:.2f}"),
        ),
        Column(
            "s",
            lambda row: row.step_time_seconds,
            lambda row: shown(row.step_time_seconds, "{:.4g}"),
        ),
        Column(
            "tokens/s/chip",
            lambda row: row.tokens_per_sec_per_chip,
            lambda row: shown(row.tokens_per_sec_per_chip, "{:,.0f}"),
        ),
        Column("MFU", lambda row: row.mfu, lambda row: "" if row.mfu is None else percent(row.mfu)),
        Word("from", lambda row: f"{row.source}{': ' if row.note else ''}{row.note}"),
    ]
    return table(first, fastest_first(result.rows), lambda row: row.values[first], columns)
