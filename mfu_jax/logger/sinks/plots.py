"""Plots of a run, if matplotlib is installed: curves, step times, where the time went."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mfu_jax.logger.sinks.base import StepRecord
from mfu_jax.util.optional_deps import require

_MOST_POINTS = 2048
_INCHES, _DPI = (8.0, 3.5), 100
WIDTH, HEIGHT = (round(_DPI * inches) for inches in _INCHES)
_CURVES = {
    "MFU and HFU": ("perf/mfu", "perf/hfu"),
    "step time (s)": ("perf/step_time_seconds",),
    "loss": ("learning/loss",),
}


class CurveMemory:
    """Points of a few metrics over the whole run, in constant memory.

    When there are too many, every other one is dropped, and only every other new one is kept.
    """

    def __init__(self) -> None:
        self.names = tuple(name for names in _CURVES.values() for name in names)
        self._unknown = (math.nan,) * len(self.names)
        self._rows: list[tuple[Any, ...]] = []
        self._stride = 1
        self._seen = 0

    @property
    def steps(self) -> list[int]:
        """The steps of the points."""
        return [row[0] for row in self._rows]

    @property
    def values(self) -> dict[str, list[float]]:
        """Metric name → its value in each of those steps; NaN where it has none."""
        return {name: [row[i] for row in self._rows] for i, name in enumerate(self.names, 1)}

    def add(self, record: StepRecord) -> None:
        """Adds a record if it is a measured step."""
        if record.kind != "step":
            return
        self._seen += 1
        if self._seen % self._stride:
            return
        self._rows.append((record.step, *map(record.scalars.get, self.names, self._unknown)))
        if len(self._rows) >= _MOST_POINTS:
            self._stride *= 2
            del self._rows[::2]


def plots(memory: CurveMemory, seconds_by_use: Mapping[str, float]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the PNG file of each plot.

    Args:
        memory: the curves.
        seconds_by_use: the run's wall time by use.

    Raises:
        UserError: matplotlib is not installed.
    """
    figures = require("matplotlib.figure", "plots in TensorBoard", install="'mfu-jax[plots]'")
    for title, names in _CURVES.items():
        curves = {name: memory.values[name] for name in names}
        known = {n: v for n, v in curves.items() if any(map(math.isfinite, v))}
        if known:
            yield title, _drawn(figures, title, _curves(memory.steps, known))
    times = [t for t in memory.values["perf/step_time_seconds"] if math.isfinite(t)]
    if times:
        yield "step times", _drawn(figures, "step times (s)", _histogram(times))
    if uses := {use: spent for use, spent in seconds_by_use.items() if spent > 0}:
        yield "wall time", _drawn(figures, "wall time (s)", _bars(uses))


def _drawn(figures: Any, title: str, draw: Any) -> bytes:
    figure = figures.Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.set_title(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curves(steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Any:
    def draw(axes: Any) -> None:
        for name, values in curves.items():
            axes.plot(steps, values, label=name, linewidth=1.0)
        axes.set_xlabel("step")
        axes.legend()

    return draw


def _histogram(times: Sequence[float]) -> Any:
    def draw(axes: Any) -> None:
        axes.hist(times, bins=60)
        axes.set_ylabel("steps")

    return draw


def _bars(uses: Mapping[str, float]) -> Any:
    def draw(axes: Any) -> None:
        names = sorted(uses, key=lambda use: uses[use])
        axes.barh(names, [uses[name] for name in names])

    return draw
