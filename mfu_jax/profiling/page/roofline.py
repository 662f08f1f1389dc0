"""The roofline: FLOP/s over FLOPs per byte, both logarithmic, with the chip's roofs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mfu_jax.pages.document import quiet
from mfu_jax.pages.markup import Markup, joined, key, number, tag
from mfu_jax.pages.svg import chart, line, text
from mfu_jax.profiling.breakdown.peaks import Peaks
from mfu_jax.profiling.breakdown.tables import Row
from mfu_jax.profiling.page.labels import Box, Disc, Label, placed
from mfu_jax.util.formatting import percent, seconds_text, short

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 16, 44
_MOST_DOTS, _MOST_SCOPES, _MOST_NAMES = 250, 40, 14
_LEAST_DECADES = 2.5
_NAME = 30  # longest name, in characters
_PIECES = 20


class _Axes(NamedTuple):
    """Powers of ten at the ends of the axes."""

    left: float
    right: float
    low: float
    high: float

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.left) / (self.right - self.left)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, flops_per_second: float) -> float:
        share = (math.log10(flops_per_second) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def roofline(peaks: Peaks, by: Mapping[str, Sequence[Row]]) -> Markup:
    """Kinds of op and scopes as circles with names, single ops as dots.

    Args:
        peaks: peaks of one device.
        by: the rows by ``kernel``, ``scope`` and ``op``.
    """
    kinds = _with_matmuls(by["kernel"])
    scopes = _with_matmuls(by["scope"])[:_MOST_SCOPES]
    ops = _with_matmuls(by["op"])[:_MOST_DOTS]
    if not kinds:
        return quiet("No op with a matmul took time.")
    axes = _axes([*kinds, *scopes, *ops], peaks)
    roofs = list(_roofs(axes, peaks))
    picture = chart(
        *_grid(axes),
        *(line(*roof[:4], "roof") for roof in roofs),
        *(_dot(row, axes, "op") for row in ops),
        *(_dot(row, axes, "scope") for row in scopes),
        *(_dot(row, axes, "kind") for row in kinds),
        *(label.mark for label in _names(kinds, scopes, axes, roofs)),
        width=_WIDTH,
        height=_HEIGHT,
        label="roofline: FLOP/s over FLOPs per byte",
        kind="roofline",
    )
    note = "Rings are kinds of op, discs scopes, dots single ops; the larger, the more of the step."
    return joined([picture, key(_KEY), quiet(note)])


_KEY = (
    ("model", "bound by matmuls"),
    ("memory", "by memory"),
    ("communication", "by communication"),
    ("other", "by neither"),
    ("unbound", "unknown"),
)


def without_matmuls(kinds: Sequence[Row]) -> list[Row]:
    """The kinds of op missing from a matmul roofline; their share of the bandwidth says it all."""
    return [row for row in kinds if not _is_on(row)]


def _is_on(row: Row) -> bool:
    return row.flops > 0 and row.hbm_bytes > 0 and row.seconds > 0


def _with_matmuls(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if _is_on(row)]


def _intensity(row: Row) -> float:
    return row.flops / row.hbm_bytes


def _speed(row: Row) -> float:
    return row.flops / row.seconds


def _axes(rows: Sequence[Row], peaks: Peaks) -> _Axes:
    xs = [_intensity(row) for row in rows]
    ys = [_speed(row) for row in rows]
    top = max([peaks.main.flops_per_sec, *peaks.by_dtype.values(), *ys])
    if peaks.bytes_per_second:
        xs.append(top / peaks.bytes_per_second)
    left, right = math.log10(min(xs)) - 0.2, math.log10(max(xs)) + 0.4
    center = (left + right) / 2
    left, right = min(left, center - _LEAST_DECADES / 2), max(right, center + _LEAST_DECADES / 2)
    high = math.log10(top) + 0.25
    low = min(math.log10(min(ys)) - 0.2, high - _LEAST_DECADES)
    return _Axes(left, right, low, high)


def _grid(axes: _Axes) -> Iterator[Markup]:
    bottom = _HEIGHT - _BOTTOM
    for power in range(math.ceil(axes.left), math.floor(axes.right) + 1):
        x = axes.x(10.0**power)
        yield line(x, _TOP, x, bottom, "grid")
        yield text(x, bottom + 16, _power(power), "middle")
    for power in range(math.ceil(axes.low), math.floor(axes.high) + 1):
        y = axes.y(10.0**power)
        yield line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")
        yield text(_LEFT - 6, y + 4, _flops_per_second(power), "end")
    yield text(_LEFT - 6, _TOP, "FLOP/s", "end")
    yield text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, "matmul FLOPs per byte of HBM", "middle")


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else f"1e{power}"


def _flops_per_second(power: int) -> str:
    """A power of ten as text: 10¹³ is ``10 T``."""
    unit = max(0, min(6, power // 3))
    return f"{10.0 ** (power - 3 * unit):g} {' kMGTPE'[unit]}".strip()


class _Roof(NamedTuple):
    """A piece of a roof: its ends and its label."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: Label | None

    @property
    def box(self) -> Box:
        """The box around it."""
        return Box(self.x1, min(self.y1, self.y2), self.x2, max(self.y1, self.y2) + 1)


def _roofs(axes: _Axes, peaks: Peaks) -> Iterator[_Roof]:
    """The roofs: the peak of each dtype and of the memory."""
    bandwidth, right = peaks.bytes_per_second, 10.0**axes.right
    roofs = dict(peaks.by_dtype) or {peaks.main.dtype: peaks.main.flops_per_sec}
    for peak in sorted(set(roofs.values())):
        names = "/".join(sorted(dtype for dtype, value in roofs.items() if value == peak))
        ridge = max(peak / bandwidth, 10.0**axes.left) if bandwidth else 10.0**axes.left
        y = axes.y(peak)
        label = Label(axes.x(right), y - 5, f"{names} {peak / 1e12:.4g} TFLOP/s", "end")
        yield _Roof(axes.x(ridge), y, axes.x(right), y, label)
    if bandwidth:
        x = max(10.0**axes.left, 10.0**axes.low / bandwidth)
        ridge = max(roofs.values()) / bandwidth
        if ridge > x:
            yield from _slope(bandwidth, axes, math.log10(x), math.log10(ridge))


def _slope(bandwidth: float, axes: _Axes, begin: float, end: float) -> Iterator[_Roof]:
    """The memory's roof, in pieces so that names can be placed beside it.

    Args:
        bandwidth: its peak, bytes per second.
        axes: the chart's axes.
        begin: log₁₀ of FLOPs per byte.
        end: the same.
    """
    points = [begin + (end - begin) * n / _PIECES for n in range(_PIECES + 1)]
    for n, (at, after) in enumerate(itertools.pairwise(points)):
        x1, y1 = axes.x(10.0**at), axes.y(bandwidth * 10.0**at)
        words = f"{bandwidth / 1e9:.4g} GB/s"
        label = Label(x1 - 8, y1 - 6, words, "end") if n == _PIECES // 2 else None
        yield _Roof(x1, y1, axes.x(10.0**after), axes.y(bandwidth * 10.0**after), label)


def _dot(row: Row, axes: _Axes, kind: str) -> Markup:
    about = (
        f"{short(row.name)}: {seconds_text(row.seconds)}, {percent(row.share_of_step)} of the "
        f"step, {_intensity(row):.3g} FLOPs per byte, {_speed(row) / 1e12:.3g} TFLOP/s, "
        f"{row.bound_by}"
    )
    return tag(
        "circle",
        tag("title", about),
        cx=number(axes.x(_intensity(row)), 1),
        cy=number(axes.y(_speed(row)), 1),
        r=number(2.5 if kind == "op" else _radius(row), 1),
        class_=f"{kind} {row.bound_by}",
        data_flops=row.flops if kind == "kind" else None,
        data_bytes=row.hbm_bytes if kind == "kind" else None,
    )


def _names(
    kinds: Sequence[Row], scopes: Sequence[Row], axes: _Axes, roofs: Sequence[_Roof]
) -> list[Label]:
    """Labels of the roofs, and of the longest rows where their names cover nothing."""
    labels = [roof.label for roof in roofs if roof.label]
    rows = [(row, True) for row in kinds] + [(row, False) for row in scopes]
    rows.sort(key=lambda row: (not row[1], -row[0].seconds))
    discs = [_disc(row, axes, is_kind) for row, is_kind in rows]
    marks = [disc.box for disc in discs] + [roof.box for roof in roofs]
    plot = Box(_LEFT, 0, _WIDTH, _HEIGHT - _BOTTOM)
    return labels + placed(discs[:_MOST_NAMES], marks=marks, beside=labels, within=plot)


def _disc(row: Row, axes: _Axes, is_kind: bool) -> Disc:
    name = row.name if len(row.name) <= _NAME else f"…{row.name[1 - _NAME :]}"
    x, y = axes.x(_intensity(row)), axes.y(_speed(row))
    return Disc(x, y, _radius(row), name, is_needed=is_kind)


def _radius(row: Row) -> float:
    return 4 + 14 * math.sqrt(min(1.0, max(0.0, row.share_of_step)))
