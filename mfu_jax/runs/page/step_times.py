"""The histogram of step times, and outliers with what is known about them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mfu_jax.logger.records.summary import percentile
from mfu_jax.pages.charts import Bin, histogram
from mfu_jax.pages.document import quiet, section
from mfu_jax.pages.markup import Markup, tag
from mfu_jax.pages.tables import Column, Word, of_value, table
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import counted, seconds_text

_BINS = 60
_MOST_OUTLIERS = 30
_FAR = 6.0  # median absolute deviations
_LEAST = 0.1  # of the median
_CAUSES = (
    ("compile/seconds", "compiled"),
    ("goodput/compile_seconds", "compiled"),
    ("goodput/checkpoint_seconds", "checkpoint"),
    ("goodput/eval_seconds", "evaluation"),
    ("goodput/data_wait_seconds", "wait for data"),
)


class Outlier(NamedTuple):
    """A step that took far longer than the median."""

    step: int
    seconds: float
    over: float
    why: str


def step_times(run: RunData) -> Iterator[Markup]:
    """The section.

    Args:
        run: the run to show.
    """
    places, values = run.columns.measured(STEP_SECONDS)
    if not values:
        return
    median = statistics.median(values)
    found = outliers(run, places, values, median)
    total = sum(outlier.over for outlier in found)
    beyond = f"{counted(len(found), 'outlier')}: {seconds_text(total)} beyond it"
    text = (
        f"{counted(len(values), 'measured step')}, median {seconds_text(median)}; "
        f"{beyond if found else 'no outlier'}."
    )
    chart = histogram("measured steps", bins(values), x_title="step time", x_text=seconds_text)
    parts = [quiet(text), tag("div", chart, class_="charts")]
    if found:
        parts.append(_table(found))
    yield section("Step times", *parts)


def outlier_numbers(run: RunData) -> dict[str, tuple[float | None, str]]:
    """The percentiles of the step times, and how many are outliers."""
    summary = run.summary
    numbers: dict[str, tuple[float | None, str]] = {
        f"{name} step time": (time, seconds_text(time))
        for name in ("median", "p90", "p99")
        if (time := getattr(summary, f"{name}_seconds")) is not None
    }
    places, values = run.columns.measured(STEP_SECONDS)
    if values:
        found = outliers(run, places, values, statistics.median(values))
        beyond = seconds_text(sum(outlier.over for outlier in found))
        text = f"{len(found):,} (+{beyond})" if found else "none"
        numbers["outliers"] = (len(found), text)
    return numbers


def bins(values: Sequence[float]) -> list[Bin]:
    """Equal bins from the shortest step to the 99.5th percentile, and one bin for the rest."""
    ordered = sorted(values)
    low, top = ordered[0], percentile(ordered, 0.995)
    high = max(top, low * 1.01)
    width = (high - low) / _BINS
    counts = [0] * (_BINS + 1)
    for value in ordered:
        counts[min(int((value - low) / width), _BINS)] += 1
    found = [
        Bin(low=low + i * width, high=low + (i + 1) * width, count=counts[i]) for i in range(_BINS)
    ]
    if counts[_BINS]:  # however far out they are
        found.append(Bin(low=high, high=high + 2 * width, count=counts[_BINS]))
    return found


def outliers(
    run: RunData, places: Sequence[int], values: Sequence[float], median: float
) -> list[Outlier]:
    """The steps far above the median, longest first."""
    spread = statistics.median(abs(value - median) for value in values)
    limit = median + max(_FAR * spread, _LEAST * median)
    found = [
        Outlier(run.columns.numbers[i], seconds, seconds - median, _why(run, i))
        for i, seconds in zip(places, values, strict=True)
        if seconds > limit
    ]
    return sorted(found, key=lambda outlier: -outlier.seconds)


def _why(run: RunData, place: int) -> str:
    """What the step's record says about it."""
    parts: list[str] = []
    for name, words in _CAUSES:
        column = run.columns.values.get(name)
        seconds = column[place] if column is not None else 0.0
        if seconds > 0 and words not in " ".join(parts):
            parts.append(f"{words} {seconds_text(seconds)}")
    notes = run.metrics.notes.get(run.columns.numbers[place])
    return "; ".join([*([notes] if notes else []), *parts]) or "no cause in its record"


def _table(found: Sequence[Outlier]) -> Markup:
    columns: list[Column[Outlier] | Word[Outlier]] = [
        of_value("step time", lambda o: o.seconds, seconds_text),
        of_value("beyond the median", lambda o: o.over, seconds_text),
        Word("what its record says", lambda o: o.why),
    ]
    return table("outlier", found, lambda o: f"step {o.step}", columns, most=_MOST_OUTLIERS)
