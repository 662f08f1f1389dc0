"""A plan as one page: the answer, where a step goes, one layer's timeline, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mfu_jax.pages.bars import BarRow, bars
from mfu_jax.pages.charts import tick_label, ticks
from mfu_jax.pages.document import document, facts, notes, packaged, page_head, quiet, section
from mfu_jax.pages.markup import Markup, joined, key, number, tag
from mfu_jax.pages.svg import chart, line, text
from mfu_jax.pages.tables import Column, of_value, table
from mfu_jax.planning.result.plan import Plan
from mfu_jax.planning.result.rendering import size_text
from mfu_jax.planning.result.verdict import plan_verdict
from mfu_jax.planning.step_time.layer_timeline import LaneInterval, LayerTimeline
from mfu_jax.util.formatting import percent, seconds_text
from mfu_jax.verdict import share_text

_WIDTH, _LEFT, _RIGHT = 900, 84, 30
_LANE, _GAP, _BOTTOM = 22, 8, 24
_OWN = ("matmul", "kernel", "vector", "copy", "host", "waits")
_KEY = (
    ("matmul", "matmul"),
    ("kernel", "kernel"),
    ("vector", "vector"),
    ("copy", "copy"),
    ("transfer", "transfer"),
    ("waits", "waits for a transfer"),
)


def plan_page(plan: Plan) -> str:
    """The whole page's HTML."""
    verdict = plan_verdict(plan)
    body = [
        page_head(plan.target, verdict.sentence, {plan.target: verdict}, _about(plan)),
        facts(list(_numbers(plan))),
        notes(plan.notes),
        *_sections(plan),
    ]
    return document(
        f"Plan: {plan.target}", body, style=packaged("mfu_jax.planning.result", "style.css")
    )


def _about(plan: Plan) -> list[tuple[str, str]]:
    flops = plan.model_flops
    return [
        ("model", f"{flops / 1e12:,.4g} TFLOP per step and device" if flops else ""),
        ("chips", f"{plan.chips:,}"),
        ("compiled by", plan.compiled_by),
    ]


def _numbers(plan: Plan) -> Iterator[tuple[str, str, float | None]]:
    known: tuple[tuple[str, float | None, Callable[[float], str]], ...] = (
        ("lower bound", plan.step_time_bound_seconds, seconds_text),
        ("MFU at the bound", plan.mfu_ceiling, percent),
        ("HFU", plan.hfu, percent),
        ("tokens/s/chip", plan.tokens_per_sec_per_chip, "{:,.0f}".format),
        ("memory", plan.memory_peak_bytes, size_text),
        ("days", plan.days, "{:,.1f}".format),
        ("cost", plan.cost, "{:,.0f}".format),
    )
    for name, value, shown in known:
        if value is not None:
            yield name, shown(value), value


def _sections(plan: Plan) -> Iterator[Markup]:
    if plan.time_by_cause:
        causes = bars(list(_bars(plan.time_by_cause)), "seconds of a step by cause")
        yield section("Where a step goes", causes)
    if plan.changes:
        items = [
            tag("li", f"{c.change}: at most {share_text(c.gain_fraction, 'step', c.saves_seconds)}")
            for c in plan.changes
        ]
        yield section("What would help most", tag("ul", *items, class_="advice"))
    if plan.layer:
        about = (
            f"One of {plan.layer.runs} iterations of the largest loop, as the walk of the "
            "program's schedule predicts it."
        )
        yield section("One layer", layer_picture(plan.layer), quiet(about))
    if plan.collectives:
        yield section("Transfers", _transfers(plan.collectives))
    if plan.memory:
        yield section("Memory", _sizes(plan.memory))


def _bars(seconds_by_cause: Mapping[str, float]) -> Iterator[BarRow]:
    """A bar for each cause, largest first."""
    step = sum(seconds_by_cause.values())
    for cause, seconds in sorted(seconds_by_cause.items(), key=lambda pair: -pair[1]):
        if seconds:
            yield BarRow(
                name=cause,
                kind=cause if cause in _OWN else "transfer",
                points=100 * seconds / step,
                seconds=seconds,
                time=seconds_text(seconds),
            )


def _transfers(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Seconds of a step in each kind of transfer: in all, behind other work, and waited for."""

    def seconds(title: str, key: str) -> Column[Mapping[str, Any]]:
        return Column(title, lambda row: float(row[key]), lambda row: seconds_text(row[key]))

    columns = [
        seconds("total", "seconds"),
        seconds("hidden", "hidden_seconds"),
        seconds("exposed", "exposed_seconds"),
    ]
    return table("transfer", rows, lambda row: str(row["kind"]), columns, kind="rows shares")


def _sizes(bytes_by_kind: Mapping[str, float]) -> Markup:
    """Bytes by kind, with the shares of what is on the device."""
    total = sum(size for kind, size in bytes_by_kind.items() if kind != "host")

    def share(row: tuple[str, float]) -> float | None:
        return None if row[0] == "host" else row[1] / total

    rows = sorted(bytes_by_kind.items(), key=lambda pair: -pair[1])
    columns = [
        Column[tuple[str, float]]("size", lambda row: row[1], lambda row: size_text(row[1])),
        of_value("share", share, "{:.1%}".format),
    ]
    return table("kind", rows, lambda row: row[0], columns, kind="rows shares")


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
    for seconds in ticks(0.0, layer.seconds):
        x = _x(layer, seconds)
        yield line(x, 0, x, bottom, "grid")
        yield text(x, bottom + 16, tick_label(seconds_text(seconds)), "middle")


def _x(layer: LayerTimeline, seconds: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / layer.seconds
