"""A plan as one page: headline numbers, one layer's timeline, and the console's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mfu_jax.pages.document import (
    document,
    headlines,
    notes,
    packaged,
    quiet,
    section,
    verdict_line,
)
from mfu_jax.pages.markup import Markup, joined, key, number, tag
from mfu_jax.pages.svg import chart, line, text
from mfu_jax.pages.tables import Column, table, wide
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.result.verdict import plan_verdict
from mfu_jax.planning.step_time.layer_timeline import LaneInterval, LayerTimeline
from mfu_jax.util.formatting import percent, seconds_text
from mfu_jax.verdict import Verdict

_GIB = 2**30
_WIDTH, _LEFT, _RIGHT = 900, 64, 10
_LANE, _GAP, _BOTTOM = 22, 8, 24
_TICKS = 5
_OWN = ("matmul", "kernel", "vector", "copy", "host", "waits")
_KEY = (
    ("matmul", "matmul"),
    ("kernel", "kernel"),
    ("vector", "vector"),
    ("copy", "copy"),
    ("transfer", "transfer"),
    ("waits", "waits for a transfer"),
)


def plan_page(plan: Plan, verdict: Verdict | None = None) -> str:
    """The whole page's HTML.

    Args:
        plan: the plan.
        verdict: at the top; None: that of the plan alone.
    """
    body = [
        tag("h1", plan.target),
        verdict_line((verdict or plan_verdict(plan)).sentence),
        headlines(list(_numbers(plan))),
        notes(plan.notes),
        *_sections(plan),
    ]
    return document(
        f"Plan: {plan.target}", body, style=packaged("mfu_jax.planning.result", "style.css")
    )


def _numbers(plan: Plan) -> Iterator[tuple[str, str, float | None]]:
    known: tuple[tuple[str, float | None, Callable[[float], str]], ...] = (
        ("predicted step", plan.step_time_seconds, seconds_text),
        ("no run is faster than", plan.step_time_bound_seconds, seconds_text),
        ("MFU", plan.mfu, percent),
        ("tokens/s/chip", plan.tokens_per_sec_per_chip, "{:,.0f}".format),
        ("memory", plan.memory_peak_bytes, lambda size: f"{size / _GIB:.2f} GiB"),
        ("days", plan.days, "{:,.1f}".format),
        ("cost", plan.cost, "{:,.0f}".format),
    )
    for name, value, shown in known:
        if value is not None:
            yield name, shown(value), value


def _sections(plan: Plan) -> Iterator[Markup]:
    if plan.layer:
        about = (
            f"One of {plan.layer.runs} iterations of the largest loop, as the walk of the "
            "program's schedule predicts it."
        )
        yield section("One layer", layer_picture(plan.layer), quiet(about))
    if plan.time_by_cause:
        yield section("Seconds of a step", wide(_shares("cause", plan.time_by_cause, "s")))
    if plan.collectives:
        yield section("Transfers", wide(_transfers(plan.collectives)))
    if plan.changes:
        items = [
            tag("li", f"{c.change}: −{seconds_text(c.saves_seconds)} (+{percent(c.gain)}) at most")
            for c in plan.changes
        ]
        yield section("What would help most", tag("ul", *items, class_="advice"))
    if plan.memory:
        held = {kind: size / _GIB for kind, size in plan.memory.items()}
        yield section("Memory", wide(_shares("kind", held, "GiB")))
    if plan.activations_by_scope:
        saved = {scope: size / _GIB for scope, size in plan.activations_by_scope.items()}
        yield section("Activations", wide(_shares("scope", saved, "GiB")))


def _transfers(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Seconds of a step in each kind of transfer: in all, behind other work, and waited for."""

    def seconds(title: str, key: str) -> Column[Mapping[str, Any]]:
        return Column(title, lambda row: float(row[key]), lambda row: f"{row[key]:.4g}")

    columns = [
        seconds("total, s", "seconds"),
        seconds("hidden, s", "hidden_seconds"),
        seconds("exposed, s", "exposed_seconds"),
    ]
    return table("transfer", rows, lambda row: str(row["kind"]), columns, kind="rows shares")


def _shares(by: str, numbers: Mapping[str, float], unit: str) -> Markup:
    total = sum(numbers.values())
    rows = sorted(numbers.items(), key=lambda pair: -pair[1])
    columns = [
        Column[tuple[str, float]](unit, lambda row: row[1], lambda row: f"{row[1]:.4g}"),
        Column[tuple[str, float]](
            "share", lambda row: row[1] / total, lambda row: percent(row[1] / total)
        ),
    ]
    return table(by, rows, lambda row: row[0], columns, kind="rows shares")


def layer_picture(layer: LayerTimeline) -> Markup:
    """Draws one layer's timeline: lanes for the units, for each link, and for memory."""
    height = len(layer.lanes) * (_LANE + _GAP) + _BOTTOM
    picture = chart(
        *_ticks(layer, height - _BOTTOM),
        *(mark for row, lane in enumerate(layer.lanes) for mark in _lane(layer, lane, row)),
        width=_WIDTH,
        height=height,
        label="one layer: what the units, the links and the memory do over its time",
        kind="layer",
    )
    return joined([picture, key(_KEY)])


def _lane(layer: LayerTimeline, lane: str, row: int) -> Iterator[Markup]:
    top = row * (_LANE + _GAP) + _GAP / 2
    yield text(_LEFT - 8, top + _LANE * 0.7, lane, "end")
    for span in layer.spans:
        if span.lane == lane:
            yield _rectangle(layer, span, top)


def _rectangle(layer: LayerTimeline, span: LaneInterval, top: float) -> Markup:
    start, end = _x(layer, span.start), _x(layer, span.end)
    took = seconds_text(span.end - span.start)
    return tag(
        "rect",
        tag("title", f"{span.cause}, {took}, from {seconds_text(span.start)}"),
        x=number(start, 1),
        y=number(top, 1),
        width=number(end - start, 1),
        height=number(_LANE, 1),
        class_=span.cause if span.cause in _OWN else "transfer",
    )


def _ticks(layer: LayerTimeline, bottom: float) -> Iterator[Markup]:
    for tick in range(_TICKS + 1):
        seconds = layer.seconds * tick / _TICKS
        x = _x(layer, seconds)
        yield line(x, 0, x, bottom, "grid")
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        yield text(x, bottom + 16, seconds_text(seconds) if tick else "0", anchor)


def _x(layer: LayerTimeline, seconds: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / layer.seconds
