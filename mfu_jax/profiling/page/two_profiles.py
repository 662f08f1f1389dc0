"""The page of two profiles: what got slower, why, and the two waterfalls side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.pages.document import document, headlines, notes, packaged, quiet, section
from mfu_jax.pages.markup import Markup, joined, key, tag
from mfu_jax.pages.tables import Column, Word, rest_row, table, wide
from mfu_jax.profiling.page.bars import bar_chart, bar_row, kind_of
from mfu_jax.profiling.profile import Profile
from mfu_jax.profiling.report.comparison import Change, Comparison
from mfu_jax.profiling.report.comparison_text import pair, signed
from mfu_jax.util.formatting import percent, seconds_text, short

_SLOWER, _FASTER = "other", "model"  # style-sheet classes


def page_of_two(comparison: Comparison) -> str:
    """The whole page's HTML.

    Args:
        comparison: the comparison to show.
    """
    before, after = comparison.before, comparison.after
    title = f"a step takes {signed(comparison.seconds)}"
    body = [
        tag("h1", f"Two profiles: {title}"),
        _headlines(comparison),
        _sources(before, after),
        notes(tuple(dict.fromkeys((*before.notes, *after.notes)))),
        section("Why", _legend_of_reasons(), _reasons(comparison)),
        section("Where the peak went", _waterfalls(before, after)),
        section("Advice", _advice(before, after)),
        section("Scopes", _scopes(comparison)),
        section("Ops", _ops(comparison.changes)),
    ]
    return document(title, body, style=packaged("mfu_jax.profiling.page", "style.css"))


def _headlines(comparison: Comparison) -> Markup:
    before, after = comparison.before, comparison.after
    was, now = before.measured.step_seconds, after.measured.step_seconds
    return headlines(
        [
            ("step time before", seconds_text(was), was),
            ("step time after", seconds_text(now), now),
            ("difference", f"{signed(comparison.seconds)}", comparison.seconds),
            ("MFU before", percent(before.mfu), before.mfu),
            ("MFU after", percent(after.mfu), after.mfu),
            (
                "points of MFU more",
                f"{100 * (after.mfu - before.mfu):+z.2f}",
                after.mfu - before.mfu,
            ),
        ]
    )


def _sources(before: Profile, after: Profile) -> Markup:
    named = (("Before", before), ("After", after))
    return joined(
        [quiet(f"{name}: {profile.source}, {profile.peaks.main}") for name, profile in named]
    )


def _legend_of_reasons() -> Markup:
    words = "From the step before to the step after, every second with its reason."
    return joined([quiet(words), key([(_SLOWER, "slower"), (_FASTER, "faster")])])


def _reasons(comparison: Comparison) -> Markup:
    """One bar per reason, starting where the last one ended, on the same scale as both steps."""
    was = comparison.before.measured.step_seconds
    steps = [("before", 0.0, was)]
    for reason, seconds in comparison.by_reason().items():
        begin = steps[-1][2]
        steps.append((reason, begin, begin + seconds))
    now = comparison.after.measured.step_seconds
    most = max(now, *(end for _, _, end in steps))
    rows = [_reason("before", "peak", (0.0, was, most), seconds_text(was), f"{1:.1%}")]
    for reason, begin, end in steps[1:]:
        kind, share = _SLOWER if end > begin else _FASTER, f"{(end - begin) / was:+z.1%}"
        rows.append(_reason(reason, kind, (begin, end, most), signed(end - begin), share))
    rows.append(_reason("after", "peak", (0.0, now, most), seconds_text(now), f"{now / was:.1%}"))
    return bar_chart(rows, "reasons")


def _reason(
    name: str, kind: str, place: tuple[float, float, float], text: str, share: str
) -> Markup:
    """A bar; `place` is its begin, its end, and the end of the scale, in seconds."""
    begin, end, most = place
    cells = [
        tag("span", text, class_="n", role="cell", data_seconds=end - begin),
        tag("span", share, class_="n", role="cell"),
    ]
    return bar_row(name, [(kind, 100 * begin / most, 100 * end / most)], cells)


class _Span(NamedTuple):
    """A bar of a waterfall: its two ends in points of MFU, and its seconds."""

    begin: float
    end: float
    seconds: float


_NO_BAR = _Span(0.0, 0.0, 0.0)


def _waterfalls(before: Profile, after: Profile) -> Markup:
    """Both waterfalls, bar by bar: the upper track is before, the lower one after."""
    old, new = _spans(before), _spans(after)
    ends = {name: max(old.get(name, _NO_BAR).end, new.get(name, _NO_BAR).end) for name in old | new}
    rows = []
    for name in sorted(ends, key=lambda name: ends[name]):
        was, now = old.get(name, _NO_BAR), new.get(name, _NO_BAR)
        more, rise = now.seconds - was.seconds, (now.end - now.begin) - (was.end - was.begin)
        cells = [
            tag("span", signed(more), class_="n", role="cell", data_seconds=more),
            tag("span", f"{rise:+z.2f}", class_="n", role="cell", data_points=rise),
        ]
        tracks = [
            (kind_of(name), spans[name].begin, spans[name].end) if name in spans else None
            for spans in (old, new)
        ]
        remark = f"{was.end - was.begin:.2f} → {now.end - now.begin:.2f} points"
        rows.append(bar_row(name, tracks, cells, remark))
    words = (
        "The upper bar is before, the lower one after, each in points of its own step. What it "
        "takes more: in seconds of a step, and in points."
    )
    return joined([quiet(words), bar_chart(rows, "waterfalls")])


def _spans(profile: Profile) -> dict[str, _Span]:
    done, spans = 0.0, {}
    for bar in profile.waterfall:
        spans[bar.name] = _Span(done, done + bar.mfu_points, bar.seconds)
        done += bar.mfu_points
    return spans


def _advice(before: Profile, after: Profile) -> Markup:
    was, now = ({a.cause: a.gain_seconds for a in profile.advice} for profile in (before, after))
    causes = list(dict.fromkeys((*now, *was)))
    if not causes:
        return quiet("None, before or after.")
    columns = [
        Column[str]("gain before", was.get, lambda cause: _gain(was.get(cause))),
        Column[str]("gain after", now.get, lambda cause: _gain(now.get(cause))),
    ]
    return wide(table("cause", causes, lambda cause: cause, columns))


def _gain(seconds: float | None) -> str:
    return "–" if seconds is None else seconds_text(seconds)


class _Scope(NamedTuple):
    """A scope, and its seconds per step in either profile."""

    name: str
    before: float
    after: float

    @property
    def seconds(self) -> float:
        """Extra seconds of the scope."""
        return self.after - self.before


def _scopes(comparison: Comparison) -> Markup:
    sums: dict[str, _Scope] = {}
    for change in comparison.changes:
        _, was, now = sums.get(change.scope, _Scope(change.scope, 0.0, 0.0))
        sums[change.scope] = _Scope(change.scope, was + change.before, now + change.after)
    rows = sorted(sums.values(), key=lambda row: -abs(row.seconds))
    step = comparison.before.measured.step_seconds
    columns: list[Column[_Scope] | Word[_Scope]] = [
        Column[_Scope]("before", lambda r: r.before, lambda r: seconds_text(r.before)),
        Column[_Scope]("after", lambda r: r.after, lambda r: seconds_text(r.after)),
        Column[_Scope]("change", lambda r: r.seconds, lambda r: signed(r.seconds)),
        Word[_Scope]("of the step before", lambda r: f"{r.seconds / step:+z.1%}"),
    ]
    body = table(
        "scope", rows, lambda row: row.name or "(no scope)", columns, foot=_rest, kind="rows paths"
    )
    return wide(body)


def _ops(changes: Sequence[Change]) -> Markup:
    columns: list[Column[Change] | Word[Change]] = [
        Column[Change]("before", lambda c: c.before, lambda c: seconds_text(c.before)),
        Column[Change]("after", lambda c: c.after, lambda c: seconds_text(c.after)),
        Column[Change]("change", lambda c: c.seconds, lambda c: signed(c.seconds)),
        Word[Change]("why", lambda c: ", ".join(f"{w} {signed(s)}" for w, s in c.why.items())),
        Column[Change]("GFLOP", lambda c: c.flops[1], lambda c: pair(c.flops, 1e9)),
        Column[Change]("MB", lambda c: c.hbm_bytes[1], lambda c: pair(c.hbm_bytes, 1e6)),
        Word[Change]("op", lambda c: short(" ".join(filter(None, (c.phase, c.kind))))),
    ]
    body = table(
        "scope of ops",
        changes,
        lambda c: c.scope or "(no scope)",
        columns,
        foot=_rest,
        kind="rows paths",
    )
    return wide(body)


def _rest(rows: Sequence[Change | _Scope]) -> Markup:
    """One row for all rows that are not shown: times before and after, and the difference."""
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    cells = [
        tag("td", seconds_text(before), data_value=before),
        tag("td", seconds_text(after), data_value=after),
        tag("td", signed(after - before), data_value=after - before),
    ]
    return rest_row(len(rows), *cells)
