"""Curves over the steps, and over the wall clock, with restarts marked."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mfu_jax.pages.charts import Curve, broken, curves, thinned
from mfu_jax.pages.document import section
from mfu_jax.pages.markup import Markup, tag
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import loss_text, percent, seconds_text, short

_CLOCK = "unix_seconds"


class _CurveMetric(NamedTuple):
    name: str
    title: str
    text: Callable[[float], str]
    has_zero: bool = False
    measured_only: bool = True
    is_unknown_at_zero: bool = True  # no curve where every value is 0


def _tick(seconds: float) -> str:
    """A time on an axis: a round value, so without trailing zeros."""
    number, unit = seconds_text(seconds).split()
    return f"{float(number):g} {unit}"


_METRICS = (
    _CurveMetric("perf/mfu", "MFU", percent, has_zero=True),
    _CurveMetric("perf/hfu", "HFU", percent, has_zero=True),
    _CurveMetric(STEP_SECONDS, "step time", _tick),
    _CurveMetric("perf/per_device_tokens_per_sec", "tokens/s/device", lambda v: f"{v:,.6g}"),
    _CurveMetric("learning/loss", "loss", loss_text, measured_only=False, is_unknown_at_zero=False),
    _CurveMetric("goodput/data_wait_seconds", "wait for data", _tick, has_zero=True),
    _CurveMetric("memory/peak_bytes_in_use", "peak memory", lambda v: f"{v / 2**30:.4g} GiB"),
)


def sections(runs: Sequence[RunData]) -> Iterator[Markup]:
    """Both sections.

    Args:
        runs: all drawn in the same charts.
    """
    charts = [chart for metric in _METRICS if (chart := _over_steps(metric, runs)) is not None]
    if charts:
        note = tag(
            "p",
            "Lines are means of neighbouring steps, bands their lowest and highest values. Compile "
            "and warm-up steps are left out; values far beyond the others are drawn at the edge.",
            class_="quiet",
        )
        yield section("Over steps", note, tag("div", *charts, class_="charts"))
    for run in runs:
        charts = [chart for metric in _METRICS[:4:2] if (chart := _over_time(metric, run))]
        if charts:
            title = "Over time" if len(runs) == 1 else f"Over time: {short(run.metrics.path)}"
            yield section(title, tag("div", *charts, class_="charts"))


def _over_steps(metric: _CurveMetric, runs: Sequence[RunData]) -> Markup | None:
    found = []
    for run in runs:
        places, values = _values(metric, run)
        if any(values) or (values and not metric.is_unknown_at_zero):
            numbers = run.columns.numbers
            points = thinned([numbers[i] for i in places], values)
            found.append(Curve(name=short(run.metrics.path), points=points))
    if not found:
        return None
    marks = [mark for run in runs for mark in _restarts_by_step(run)] if len(runs) == 1 else []
    return curves(
        metric.title,
        found,
        x_title="step",
        x_text=lambda step: f"{step:,.0f}",
        y_text=metric.text,
        marks=marks,
        has_zero=metric.has_zero,
    )


def _values(metric: _CurveMetric, run: RunData) -> tuple[Sequence[int], Sequence[float]]:
    if metric.measured_only:
        return run.columns.measured(metric.name)
    column = run.columns.values.get(metric.name, ())
    places = [i for i, value in enumerate(column) if math.isfinite(value)]
    return places, [column[i] for i in places]


def _restarts_by_step(run: RunData) -> Iterator[tuple[float, str]]:
    for attempt in run.time.attempts[1:]:
        if attempt.first_step is not None:
            yield attempt.first_step, f"restart before step {attempt.first_step}"


def _over_time(metric: _CurveMetric, run: RunData) -> Markup | None:
    clock = run.columns.values.get(_CLOCK)
    places, values = run.columns.measured(metric.name)
    if clock is None or len(values) < 2:
        return None
    times = [clock[i] for i in places]
    if not all(map(math.isfinite, times)):
        return None
    start = min([*times, *(attempt.start for attempt in run.time.attempts)])
    unit, size = _unit(max(times) - start)
    points = broken(thinned([(time - start) / size for time in times], values))
    marks = [
        ((attempt.start - start) / size, f"process {attempt.pid} started: {_when(attempt.start)}")
        for attempt in run.time.attempts[1:]
    ]
    return curves(
        metric.title,
        [Curve(name=short(run.metrics.path), points=points)],
        x_title=f"{unit} since {_when(start)}",
        x_text=lambda x: f"{x:.4g}",
        y_text=metric.text,
        marks=marks,
        has_zero=metric.has_zero,
    )


def _unit(seconds: float) -> tuple[str, float]:
    """The unit of a span, and its seconds."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next((unit for unit in units if seconds > 3 * unit[1]), ("seconds", 1.0))


def _when(seconds: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.0f} s"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
