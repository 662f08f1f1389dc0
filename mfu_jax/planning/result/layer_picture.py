"""One layer's timeline as a picture: lanes for the units, for each link, and for memory."""

from __future__ import annotations

from collections.abc import Iterator

from mfu_jax.pages.markup import Markup, joined, key, number, tag
from mfu_jax.pages.svg import chart, line, text
from mfu_jax.planning.step_time.layer_timeline import Layer, Span
from mfu_jax.util.formatting import seconds_text

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


def layer_picture(layer: Layer) -> Markup:
    """Draws the lanes of a layer."""
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


def _lane(layer: Layer, lane: str, row: int) -> Iterator[Markup]:
    top = row * (_LANE + _GAP) + _GAP / 2
    yield text(_LEFT - 8, top + _LANE * 0.7, lane, "end")
    for span in layer.spans:
        if span.lane == lane:
            yield _rectangle(layer, span, top)


def _rectangle(layer: Layer, span: Span, top: float) -> Markup:
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


def _ticks(layer: Layer, bottom: float) -> Iterator[Markup]:
    for tick in range(_TICKS + 1):
        seconds = layer.seconds * tick / _TICKS
        x = _x(layer, seconds)
        yield line(x, 0, x, bottom, "grid")
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        yield text(x, bottom + 16, seconds_text(seconds) if tick else "0", anchor)


def _x(layer: Layer, seconds: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / layer.seconds
