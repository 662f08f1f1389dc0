"""Curves over the steps.

What follows from another curve is not drawn again: HFU and MFU of one program are in one ratio, and
step time and tokens/s follow from MFU where every step does the same work.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mfu_jax.pages.charts import MOST_POINTS, Curve, curves, thinned
from mfu_jax.pages.document import color, section
from mfu_jax.pages.markup import Markup, tag
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import percent, seconds_text


class _CurveMetric(NamedTuple):
    name: str
    title: str
    text: Callable[[float], str]
    has_zero: bool = False
    measured_only: bool = True
    is_unknown_at_zero: bool = True  # no curve where every value is 0
    unit: float = 1.0  # that the text is of


_MFU = _CurveMetric("perf/mfu", "MFU", percent, has_zero=True)
_LEARNED = {"measured_only": False, "is_unknown_at_zero": False}
_EVALS = ("eval/avg_loss", "eval/loss")
# The first of each tuple that a run has, and that does not follow from MFU.
_METRICS = (
    (_MFU,),
    (_CurveMetric("perf/hfu", "HFU", percent, has_zero=True),),
    (
        _CurveMetric(STEP_SECONDS, "step time", seconds_text, has_zero=True),
        _CurveMetric("perf/per_device_tokens_per_sec", "tokens/s/device", lambda v: f"{v:,.6g}"),
    ),
    (_CurveMetric("learning/loss", "loss", "{:.4g}".format, **_LEARNED),),
    tuple(_CurveMetric(name, "evaluation loss", "{:.4g}".format, **_LEARNED) for name in _EVALS),
    (_CurveMetric("learning/grad_norm", "gradient norm", "{:.4g}".format, **_LEARNED),),
    (_CurveMetric("learning/current_learning_rate", "learning rate", "{:.4g}".format, **_LEARNED),),
    (_CurveMetric("goodput/data_wait_seconds", "wait for data", seconds_text, has_zero=True),),
    (_CurveMetric("memory/peak_bytes_in_use", "peak memory", "{:.4g} GiB".format, unit=2.0**30),),
)
_BY_WORK = ("perf/hfu", STEP_SECONDS, "perf/per_device_tokens_per_sec")
_FEWEST_POINTS = 60
_SAME = 1e-3  # relative


def sections(runs: Mapping[str, RunData]) -> Iterator[Markup]:
    """The section.

    Args:
        runs: by name; all drawn in the same charts.
    """
    charts = [chart for some in _METRICS if (chart := _first(some, runs)) is not None]
    if charts:
        note = tag(
            "p",
            "Lines are means of neighbouring steps, bands their lowest and highest values. Compile "
            "and warm-up steps are left out; values far beyond the others are drawn at the edge.",
            class_="quiet",
        )
        yield section("Over steps", note, tag("div", *charts, class_="charts"))


def _first(metrics: Sequence[_CurveMetric], runs: Mapping[str, RunData]) -> Markup | None:
    """The chart of the first metric that tells something that MFU does not."""
    if metrics[0].name in _BY_WORK and all(map(_is_told_by_mfu, runs.values())):
        return None
    return next((chart for each in metrics if (chart := _over_steps(each, runs)) is not None), None)


def _is_told_by_mfu(run: RunData) -> bool:
    """Whether every step does the same work, as far as MFU, HFU and the step times tell."""
    places, mfus = run.columns.measured(_MFU.name)
    hfus, seconds = (run.columns.values.get(name) for name in ("perf/hfu", STEP_SECONDS))
    if not places or seconds is None:
        return False
    works = [mfu * seconds[i] for i, mfu in zip(places, mfus, strict=True)]
    pairs = zip(places, mfus, strict=True)
    ratios = [hfus[i] / mfu for i, mfu in pairs if hfus is not None and mfu > 0]
    return all(max(values) <= (1 + _SAME) * min(values) for values in (works, ratios) if values)


def _over_steps(metric: _CurveMetric, runs: Mapping[str, RunData]) -> Markup | None:
    found = []
    for i, (name, run) in enumerate(runs.items()):
        places, values = _values(metric, run)
        if any(values) or (values and not metric.is_unknown_at_zero):
            numbers = run.columns.numbers
            ys = [value / metric.unit for value in values]
            most = max(MOST_POINTS // len(runs), _FEWEST_POINTS)  # of all runs as large as of one
            points = thinned([numbers[i] for i in places], ys, most=most)
            of = name if len(runs) > 1 else ""
            found.append(Curve(name=of, points=points, kind=color(i)))
    if not found:
        return None
    marks = [mark for run in runs.values() for mark in _restarts_by_step(run)]
    return curves(
        metric.title,
        found,
        x_title="step",
        x_text=lambda step: f"{step:,.0f}",
        y_text=metric.text,
        marks=marks if len(runs) == 1 else [],
        has_zero=metric.has_zero,
        possible=1.0 if metric.text is percent else math.inf,
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


def when(seconds: float) -> str:
    """A moment for a reader.

    Args:
        seconds: since 1970.
    """
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.0f} s"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
