"""Charts as SVG: curves whose spikes survive thinning, and histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mfu_jax.pages import svg
from mfu_jax.pages.document import COLORS
from mfu_jax.pages.markup import Markup, number, tag

_WIDTH, _HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 14, 12, 44
_TICKS = 5
_X_TICKS = 4  # their labels stand side by side
_ZEROS = re.compile(r"(?<=\d)(?:\.0+|(\.\d*?[1-9])0+)(?!\d)")
MOST_POINTS = 360
_AXIS_QUANTILE = 0.99  # values beyond are drawn at the edge: one spike must not flatten a curve
_HEADROOM = 0.35
_FEW_POINTS = 10  # none of fewer is called a spike
_CONSTANT = 1e-4  # relative: ticks of a narrower axis would read the same


class ChartPoint(NamedTuple):
    """All values of one stretch of x."""

    x: float
    low: float
    mean: float
    high: float
    values: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve of a chart.

    Attributes:
        name: shown in the legend; empty where the title says all.
        points: from left to right.
        kind: style-sheet class of its colour.
    """

    name: str
    points: Sequence[ChartPoint]
    kind: str = COLORS[0]


def thinned(
    xs: Sequence[float], ys: Sequence[float], *, most: int = MOST_POINTS
) -> list[ChartPoint]:
    """Thins a curve to at most `most` points, keeping each stretch's lowest and highest values.

    Args:
        xs: x values, in any order.
        ys: as many y values; those that are not finite are left out.
        most: number of stretches of equal width.

    >>> thinned([0, 1, 2, 3], [5.0, 1.0, 2.0, 2.0], most=2)
    [ChartPoint(x=0.5, low=1.0, mean=3.0, high=5.0, values=2), \
ChartPoint(x=2.5, low=2.0, mean=2.0, high=2.0, values=2)]
    """
    if not xs:
        return []
    first, last = min(xs), max(xs)
    scale = most / (last - first) if last > first else 0.0
    stretches: dict[int, list[tuple[float, float]]] = {}
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            stretches.setdefault(min(int((x - first) * scale), most - 1), []).append((x, y))
    return [_point(stretches[i]) for i in sorted(stretches)]


def _point(pairs: Sequence[tuple[float, float]]) -> ChartPoint:
    ys = [y for _, y in pairs]
    x = math.fsum(x for x, _ in pairs) / len(pairs)
    return ChartPoint(x, min(ys), math.fsum(ys) / len(ys), max(ys), len(ys))


class _Axes(NamedTuple):
    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        share = (value - self.left) / ((self.right - self.left) or 1.0)
        return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return _HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    def place(self, x: float, y: float) -> str:
        return f"{number(self.x(x), 1)},{number(self.y(y), 1)}"

    def x_labels(self, text: Callable[[float], str]) -> Iterator[Markup]:
        for value, label in _labelled(self.left, self.right, text, _X_TICKS):
            x = self.x(value)
            anchor = "end" if x > _WIDTH - _RIGHT - 20 else "middle"  # none leaves the picture
            yield svg.text(x, _HEIGHT - _BOTTOM + 17, label, anchor)


def curves(
    title: str,
    series: Sequence[Curve],
    *,
    x_title: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
    has_zero: bool = False,
    possible: float = math.inf,
) -> Markup:
    """Curves in one chart: the mean of each stretch as a line, its extremes as a band.

    Args:
        title: what the y axis shows.
        series: the curves, at least one of which has a point.
        x_title: title of the x axis.
        x_text: formats a value of x.
        y_text: formats a value of y.
        marks: x and label of vertical lines, such as restarts.
        has_zero: whether the y axis begins at 0.
        possible: the y axis is that of values up to here, unless most are higher.
    """
    axes = _axes(series, marks, has_zero, possible)
    picture = svg.chart(
        *_grid(axes, x_text, y_text),
        svg.text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_title, "middle"),
        *(_mark(axes, x, words) for x, words in marks),
        *(part for curve in series for part in _curve(axes, curve, x_text, y_text)),
        tag("line", y1=str(_TOP), y2=str(_HEIGHT - _BOTTOM), class_="guide"),
        width=_WIDTH,
        height=_HEIGHT,
        label=f"{title} over {x_title}",
        kind="curves",
    )
    names = [tag("span", tag("i", class_=c.kind), c.name, class_="label") for c in series if c.name]
    caption = [tag("b", title), *names, tag("output")]
    return tag("figure", tag("figcaption", *caption), picture, data_x=x_title)


def _axes(
    series: Sequence[Curve], marks: Sequence[tuple[float, str]], has_zero: bool, possible: float
) -> _Axes:
    points = [point for curve in series for point in curve.points]
    xs = [point.x for point in points] + [x for x, _ in marks]
    likely = [point for point in points if point.mean <= possible]
    low, high = _range(likely if 2 * len(likely) > len(points) else points, has_zero)
    return _Axes(min(xs), max(xs), low, high)


def _range(points: Sequence[ChartPoint], has_zero: bool) -> tuple[float, float]:
    """The ends of the y axis: all values if similar, else most points plus some headroom."""
    lowest, highest = min(p.low for p in points), max(p.high for p in points)
    ordered = sorted(point.mean for point in points)
    bottom = ordered[int((1 - _AXIS_QUANTILE) * (len(ordered) - 1))]
    top = ordered[int(_AXIS_QUANTILE * (len(ordered) - 1))]
    room = _HEADROOM * max(top - bottom, 0.02 * abs(top))
    low, high = max(lowest, bottom - room), min(highest, top + room)
    if (
        len(points) < _FEW_POINTS or low == high
    ):  # else the few that differ are what there is to see
        low, high = lowest, highest
    if has_zero:
        low = min(0.0, low)
    if high - low <= _CONSTANT * max(abs(low), abs(high)):
        low, high = low - 0.5 * abs(low), high + 0.5 * (abs(high) or 1.0)
    return low, high


def _grid(
    axes: _Axes, x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> Iterator[Markup]:
    for value, label in _labelled(axes.low, axes.high, y_text, _TICKS):
        y = axes.y(value)
        yield svg.line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")
        yield svg.text(_LEFT - 6, y + 4, label, "end")
    for value, _ in _labelled(axes.left, axes.right, x_text, _X_TICKS):
        x = axes.x(value)
        yield svg.line(x, _TOP, x, _HEIGHT - _BOTTOM, "grid")
    yield from axes.x_labels(x_text)


def tick_label(text: str) -> str:
    """A tick's label: its value is round, so its last zeros say nothing."""
    return _ZEROS.sub(r"\1", text)


def _labelled(
    low: float, high: float, text: Callable[[float], str], most: int
) -> list[tuple[float, str]]:
    """Ticks and their labels; fewer ticks where two labels would read the same, as half steps."""
    found: list[tuple[float, str]] = []
    for count in range(most, 0, -1):
        found = [(value, tick_label(text(value))) for value in ticks(low, high, count)]
        if len({label for _, label in found}) == len(found):
            break
    return found


def ticks(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Round values between two ends, about `most`.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + i) * step, 12) for i in range(count)]


def _curve(
    axes: _Axes, curve: Curve, x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> Iterator[Markup]:
    """A curve; its marks carry the values that the script shows under the pointer."""
    values = {
        "data_name": curve.name,
        "data_x": "|".join(x_text(p.x) for p in curve.points),
        "data_y": "|".join(_values(p, y_text) for p in curve.points),
    }
    highs = [axes.place(p.x, p.high) for p in curve.points]
    lows = [axes.place(p.x, p.low) for p in reversed(curve.points)]
    means = [axes.place(p.x, p.mean) for p in curve.points]
    if any(p.low < p.high for p in curve.points):
        yield tag("polygon", points=" ".join([*highs, *lows]), class_=f"band {curve.kind}")
    if len(curve.points) == 1:
        x, y = means[0].split(",")
        yield tag("circle", cx=x, cy=y, r="2.5", class_=f"dot {curve.kind}", **values)
    elif curve.points:
        yield tag("polyline", points=" ".join(means), class_=f"curve {curve.kind}", **values)


def _values(point: ChartPoint, y_text: Callable[[float], str]) -> str:
    if point.low == point.high:
        return y_text(point.mean)
    return f"{y_text(point.mean)} ({y_text(point.low)} to {y_text(point.high)})"


def _mark(axes: _Axes, x: float, words: str) -> Markup:
    at = number(axes.x(x), 1)
    line = tag("line", x1=at, x2=at, y1=str(_TOP), y2=str(_HEIGHT - _BOTTOM))
    return tag("g", tag("title", words), line, class_="mark")


@dataclass(frozen=True, kw_only=True)
class Bin:
    """One bar of a histogram: how many values are in [low, high)."""

    low: float
    high: float
    count: int


def histogram(
    title: str, bins: Sequence[Bin], *, x_title: str, x_text: Callable[[float], str]
) -> Markup:
    """Bars of counts; the height is logarithmic if one bar dwarfs the others.

    Args:
        title: what is counted.
        bins: from left to right, at least one.
        x_title: title of the x axis.
        x_text: formats a value of x.
    """
    most = max(b.count for b in bins)
    axes = _Axes(bins[0].low, bins[-1].high, 0.0, math.log1p(most))
    rows = [_bar(axes, b, x_text) for b in bins]
    heights = sorted({1, *(10**i for i in range(1, int(math.log10(most)) + 1))})
    grid = []
    for count in heights:
        y = axes.y(math.log1p(count))
        grid += [svg.line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")]
        grid += [svg.text(_LEFT - 6, y + 4, f"{count:,}", "end")]
    picture = svg.chart(
        *grid,
        *axes.x_labels(x_text),
        svg.text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_title, "middle"),
        *rows,
        width=_WIDTH,
        height=_HEIGHT,
        label=title,
        kind="histogram",
    )
    return tag("figure", tag("figcaption", tag("b", title)), picture)


def _bar(axes: _Axes, found: Bin, x_text: Callable[[float], str]) -> Markup:
    left, right, top = axes.x(found.low), axes.x(found.high), axes.y(math.log1p(found.count))
    words = f"{x_text(found.low)} to {x_text(found.high)}: {found.count:,}"
    return tag(
        "rect",
        tag("title", words),
        x=number(left, 1),
        y=number(top, 1),
        width=number(max(0.5, right - left - 0.6), 1),
        height=number(_HEIGHT - _BOTTOM - top, 1),
        class_="model",
        data_count=found.count,
    )
