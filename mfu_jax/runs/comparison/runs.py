"""Compares two runs: their metrics with intervals, and which run is faster."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mfu_jax.errors import UserError
from mfu_jax.names import PROFILE_SECONDS
from mfu_jax.runs.comparison.intervals import CONFIDENCE, Difference, compare_with_repeats
from mfu_jax.runs.metrics.files import MetricsRun
from mfu_jax.runs.metrics.step_table import STEP_SECONDS
from mfu_jax.util.formatting import columns, counted, percent, readable, seconds_text, span
from mfu_jax.verdict import COLUMNS, NOTABLE

# Repeats of one run differ by this much, whatever their intervals say: other machines or clocks.
SMALLEST = 0.01
_SAME = 1e-3  # relative: logs round tokens per second
_LOG_SECONDS = 1e-3  # a log line has three decimals
_FEW_WINDOWS = 30  # of 150 steps
_NOISY = 0.5  # half an interval; one as wide as this tells nothing
_WAITS = "goodput/data_wait_seconds"
_STEP = "step"
_MOST_PARTS = 3
_TIMES = 1.5  # from here on, a ratio says more than a percentage

TABLE_HEAD = "steps, trimmed mean"

Speed = Literal["faster", "slower", "same", "unknown"]

ScalarColumns = Mapping[str, Sequence[float]]
ReadColumn = Callable[[ScalarColumns], Sequence[float] | None]


@dataclass(frozen=True, kw_only=True)
class ComparedMetric:
    """A metric to compare.

    Attributes:
        name: its key in JSON.
        title: its name for display.
        read: its value in each step, from the columns of scalars; None where unknown.
        text: formats a value for display.
        less_is_better: true for times.
    """

    name: str
    title: str
    read: ReadColumn
    text: Callable[[float], str]
    less_is_better: bool = False


def _scalar(name: str) -> ReadColumn:
    return lambda columns: columns.get(name)


def _rate(amount: str) -> ReadColumn:
    def read(columns: ScalarColumns) -> Sequence[float] | None:
        amounts, seconds = columns.get(amount), columns[STEP_SECONDS]
        return None if amounts is None else list(map(operator.truediv, amounts, seconds))

    return read


def _with_waits(columns: ScalarColumns) -> Sequence[float]:
    # Of a step without a wait it is 0; if nobody times waits, they are part of the steps.
    seconds, waits = columns[STEP_SECONDS], columns.get(_WAITS)
    return seconds if waits is None else list(map(operator.add, seconds, waits))


STEP_TIME = ComparedMetric(
    name="step_time_seconds",
    title="step time",
    read=_scalar(STEP_SECONDS),
    text=seconds_text,
    less_is_better=True,
)
WITH_WAITS = ComparedMetric(
    name="step_time_and_data_wait_seconds",
    title="step time and wait for data",
    read=_with_waits,
    text=seconds_text,
    less_is_better=True,
)
TOKENS = ComparedMetric(
    name="tokens_per_sec_per_device",
    title="tokens/s/device",
    read=_rate("perf/per_device_tokens"),
    text=lambda value: f"{value:,.1f}",
)
METRICS = (
    STEP_TIME,
    WITH_WAITS,
    TOKENS,
    ComparedMetric(
        name="tflops_per_sec_per_device",
        title="TFLOP/s/device",
        read=_rate("perf/per_device_tflops"),
        text=readable,
    ),
    ComparedMetric(name="mfu", title="MFU", read=_scalar("perf/mfu"), text=percent),
    ComparedMetric(name="hfu", title="HFU", read=_scalar("perf/hfu"), text=percent),
)


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """One metric of two runs."""

    metric: ComparedMetric
    difference: Difference

    @property
    def speed(self) -> Difference:
        """The change of the quantity that grows as B gets better."""
        return self.difference.inverse if self.metric.less_is_better else self.difference

    def to_json(self) -> dict[str, Any]:
        """The trimmed means, the change and its interval as plain values."""
        found = self.difference
        return {
            "a": found.a,
            "b": found.b,
            "change": found.change,
            "low": found.low,
            "high": found.high,
            "is_real": found.is_real if found.is_known else None,
        }


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Run B compared with run A.

    Attributes:
        a: the name of run A: the older one, the baseline.
        b: the name of run B.
        steps: measured steps of A and of B.
        rows: the metrics that both runs have.
        decisive: the row that decides which run is faster.
        notes: caveats for the reader.
        split: more seconds for a step of B than for one of A, by what they go to: ``step``, and
            waits and pauses beside it.
        in_step: the same of the bars of their last profiles; empty if one has none.
    """

    a: str
    b: str
    steps: tuple[int, int]
    rows: tuple[MetricChange, ...]
    decisive: MetricChange
    notes: tuple[str, ...] = ()
    split: Mapping[str, float] = field(default_factory=dict)
    in_step: Mapping[str, float] = field(default_factory=dict)

    @property
    def split_text(self) -> str:
        """What the difference of the two runs' steps consists of; empty if it is not notable."""
        least = NOTABLE * self.rows[0].difference.a
        if not (parts := self._parts):
            return ""
        within = ", ".join(_largest(self.in_step, least).values())
        if _STEP in parts:
            parts[_STEP] = f"in the {parts[_STEP]}{f' (by profiles: {within})' * bool(within)}"
        return f"a step of B beside one of A: {', '.join(parts.values())}"

    @property
    def verdict(self) -> str:
        """One sentence: which run is faster, by how much, and how certain that is."""
        text = f"B {verdict(self.decisive.speed, *self.steps)}"
        largest = next(iter(self._parts), _STEP)
        if largest == _STEP:
            return text
        return f"{text}, in its steps alone; beside them, {self._parts[largest]}"

    @property
    def _parts(self) -> dict[str, str]:
        """The notable parts of the difference of the two runs' steps, largest first."""
        if not self.is_step_time_decisive:
            return {}
        return _largest(self.split, NOTABLE * self.rows[0].difference.a)

    @property
    def is_step_time_decisive(self) -> bool:
        """Whether steps of both runs do equal work, as far as known."""
        return self.decisive.metric is STEP_TIME

    def row(self, metric: ComparedMetric) -> MetricChange | None:
        """The row of a metric, if both runs have it."""
        return next((row for row in self.rows if row.metric is metric), None)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; ``change`` is B / A − 1."""
        speed = self.decisive.speed
        return {
            "a": self.a,
            "b": self.b,
            "steps_a": self.steps[0],
            "steps_b": self.steps[1],
            "verdict": self.verdict,
            "result": result(speed),
            "decided_by": self.decisive.metric.name,
            "faster": speed.change,
            "faster_low": speed.low,
            "faster_high": speed.high,
            "confidence": CONFIDENCE,
            "split": dict(self.split),
            "in_step": dict(self.in_step),
            "metrics": {row.metric.name: row.to_json() for row in self.rows},
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """The table and the verdict, for a terminal."""
        head = (TABLE_HEAD, "A", "B", "B / A", f"{CONFIDENCE:.0%} interval")
        lines = columns([head, *(self._cells(row) for row in self.rows)], "<>>>>")
        runs = zip("AB", (self.a, self.b), self.steps, strict=True)
        names = [f"{letter}: {name}, {counted(steps, 'step')}" for letter, name, steps in runs]
        notes = [f"note: {note}" for note in self.notes]
        split = textwrap.wrap(self.split_text, COLUMNS, break_on_hyphens=False)
        return "\n".join([*names, *lines, self.verdict, *split, *notes])

    def _cells(self, row: MetricChange) -> tuple[str, ...]:
        found, text = row.difference, row.metric.text
        return (
            row.metric.title,
            text(found.a),
            text(found.b),
            signed(found.change),
            interval(found),
        )


def _largest(seconds: Mapping[str, float], least: float) -> dict[str, str]:
    """The differences that matter, largest first, each with its name and sign."""
    found = sorted(seconds.items(), key=lambda item: -abs(item[1]))[:_MOST_PARTS]
    return {
        name: f"{name} {'+' if more > 0 else '−'}{span(abs(more))}"
        for name, more in found
        if abs(more) >= least
    }


def unseen(speed: Difference) -> float:
    """The change that slow noise, invisible in a short run, may cause.

    Args:
        speed: as for `result`.

    Returns:
        A fraction; 0 for runs of 150 steps or more.
    """
    windows = min(speed.windows)
    return SMALLEST * math.sqrt(_FEW_WINDOWS / windows) if windows < _FEW_WINDOWS else 0.0


def result(speed: Difference) -> Speed:
    """Whether B is faster: the interval excludes chance, and the change is at least 1%.

    Args:
        speed: the quantity that grows as a run gets better.
    """
    if not speed.is_known:
        return "unknown"
    if not speed.is_real or abs(speed.change) < max(SMALLEST, unseen(speed)):
        return "same"
    return "faster" if speed.change > 0 else "slower"


def verdict(speed: Difference, *steps: int) -> str:
    """What a change in speed means, worded as the end of a sentence.

    Args:
        speed: as for `result`.
        *steps: measured steps of each run, named if a run has too few.
    """
    found, half_width = result(speed), speed.half_width
    if found == "unknown" or half_width is None:
        return (
            f"cannot be compared with A: {steps[0]} and {steps[1]} measured steps; expected at "
            f"least 4 of each, better 20"
        )
    half = f"{100 * half_width:.2f}%"
    is_clear = speed.low is not None and speed.high is not None and half_width <= _NOISY
    if found == "same" and not is_clear:
        ends = [1 + (end or 0.0) for end in (speed.low, speed.high)]
        return f"cannot be told from A: {_times(1 + speed.change)} times as fast {_span(*ends)}"
    if found == "same":
        text = f"is as fast as A, as far as can be told: {signed(speed.change)} ± {half}"
        return f"{text}{_why_not_called(speed, *steps)}"
    if not 1 / _TIMES < 1 + speed.change < _TIMES and speed.low is not None:
        ends = sorted([1 + speed.low, 1 + (speed.high or 0.0)])
        if found == "slower":
            low, high = 1 / ends[1], 1 / ends[0]
            return f"takes {_times(1 / (1 + speed.change))} times as long {_span(low, high)}"
        return f"is {_times(1 + speed.change)} times as fast {_span(*ends)}"
    return f"is {percent(abs(speed.change))} ± {half} {found}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:,.0f}"


def _span(low: float, high: float) -> str:
    return f"({_times(low)} to {_times(high)})"


def _why_not_called(speed: Difference, *steps: int) -> str:
    """Why a change that excludes chance is still not reported as a change."""
    if not speed.is_real:
        return ""
    if abs(speed.change) < SMALLEST:
        return f", less than repeats of one run may differ ({SMALLEST:.0%})"
    return f", less than runs of {min(steps)} steps can tell ({percent(unseen(speed))})"


def signed(fraction: float) -> str:
    """A change in percent, with its sign."""
    return f"{'+' if fraction > 0 else ''}{percent(fraction)}"


def interval(difference: Difference) -> str:
    """The interval's ends."""
    if difference.low is None or difference.high is None:
        return "too few steps"
    return f"{signed(difference.low)} … {signed(difference.high)}"


def compare_with_runs(
    baselines: Sequence[MetricsRun], b: MetricsRun, *, warmup_steps: int
) -> RunComparison:
    """Compares the measured steps of a run with those of repeats of another run.

    Args:
        baselines: one or more; the scatter between several shows by how much repeats differ.
        b: the run.
        warmup_steps: as for `MetricsRun.summary`.

    Raises:
        UserError: a run has no measured step.
    """
    columns, of_b = (
        [_columns_of(run, warmup_steps) for run in baselines],
        _columns_of(b, warmup_steps),
    )
    if not any(run.steps.has(_WAITS) for run in (*baselines, b)):
        of_b[WITH_WAITS.name] = []
    rounding = max(map(_rounding, [*baselines, b], [*columns, of_b]))
    rows = tuple(
        MetricChange(
            metric=metric,
            difference=compare_with_repeats(values, of_b[metric.name], rounding=rounding),
        )
        for metric in METRICS
        if _is_comparable(*(values := [c[metric.name] for c in columns]), of_b[metric.name])
    )
    decisive, notes = _decisive(baselines, b, rows)
    pauses = [_pauses(run, warmup_steps) for run in (baselines[0], b)]
    bars = [_bars(run) for run in (baselines[0], b)]
    step = rows[0].difference
    return RunComparison(
        a=", ".join(run.path for run in baselines),
        b=b.path,
        steps=(
            sum(len(c[STEP_TIME.name]) for c in columns),
            len(of_b[STEP_TIME.name]),
        ),
        rows=rows,
        decisive=decisive,
        notes=notes,
        split={_STEP: step.b - step.a} | _more(*pauses),
        in_step=_more(*bars) if all(bars) else {},
    )


def _pauses(run: MetricsRun, warmup_steps: int) -> dict[str, float]:
    """Seconds beside a measured step, in the mean, by what they go to."""
    sums, steps = defaultdict[str, float](float), 0
    for kind, segment in run.segments(warmup_steps=warmup_steps):
        if kind == "step":
            steps += len(segment.numbers)
            for name, column in segment.columns.items():
                if name.startswith("goodput/") and name.endswith("_seconds"):
                    pause = name.removeprefix("goodput/").removesuffix("_seconds")
                    sums[pause.replace("_", " ")] += math.fsum(filter(math.isfinite, column))
    return {name: seconds / max(steps, 1) for name, seconds in sums.items()}


def _bars(run: MetricsRun) -> dict[str, float]:
    """Seconds of a profiled step, by bar."""
    start = f"{PROFILE_SECONDS}/"
    return {n.removeprefix(start): s for n, s in run.profile.items() if n.startswith(start)}


def _more(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: b.get(name, 0.0) - a.get(name, 0.0) for name in dict.fromkeys((*a, *b))}


def _columns_of(run: MetricsRun, warmup_steps: int) -> dict[str, list[float]]:
    """The values of the measured steps, by metric."""
    found: dict[str, list[float]] = {metric.name: [] for metric in METRICS}
    for kind, segment in run.segments(warmup_steps=warmup_steps):
        if kind == "step":
            columns = _timed(segment.columns)
            for metric in METRICS:
                found[metric.name] += metric.read(columns) or ()
    if not found[STEP_TIME.name]:
        raise UserError(
            f"{run.path!r} holds {counted(len(run.steps), 'step')}, none with a measured time",
            hint="pass warmup_steps=0, or a longer run",
        )
    return found


def _rounding(run: MetricsRun, columns: Mapping[str, Sequence[float]]) -> float:
    """The resolution of a run's times, relative to them; rates are derived from times."""
    return _LOG_SECONDS / statistics.median(columns[STEP_TIME.name]) if run.form == "log" else 0.0


def _timed(columns: ScalarColumns) -> ScalarColumns:
    """The columns without steps of 0 s, an effect of rounding in logs."""
    is_timed = [seconds > 0 for seconds in columns[STEP_SECONDS]]
    if all(is_timed):
        return columns
    return {name: list(itertools.compress(v, is_timed)) for name, v in columns.items()}


def _is_comparable(*values: Sequence[float]) -> bool:
    return all(column and min(column) > 0 for column in values)


def _decisive(
    baselines: Sequence[MetricsRun], b: MetricsRun, rows: Sequence[MetricChange]
) -> tuple[MetricChange, tuple[str, ...]]:
    """The step time, or tokens per second where steps differ in tokens; and notes."""
    by_metric = {row.metric.name: row for row in rows}
    (tokens_a, tokens_b), (tflops_a, tflops_b) = (
        _amounts(baselines, b, name)
        for name in ("perf/per_device_tokens", "perf/per_device_tflops")
    )
    notes = []
    decisive = STEP_TIME
    if _differ(tokens_a, tokens_b) and TOKENS.name in by_metric:
        decisive = TOKENS
        notes.append(
            f"a step of A has {tokens_a:,.0f} tokens per device, one of B {tokens_b:,.0f}: "
            f"tokens/s/device decides"
        )
    elif _differ(tflops_a, tflops_b):
        notes.append(
            f"a step of A has {readable(tflops_a)} model TFLOP per device, one of B "
            f"{readable(tflops_b)}: another model or convention"
        )
    return by_metric[decisive.name], tuple(notes)


def _amounts(baselines: Sequence[MetricsRun], b: MetricsRun, name: str) -> tuple[float, float]:
    """A per-step amount of the baseline that differs most from B, and that of B."""
    *of_a, of_b = (run.steps.longest.scalars.get(name, 0.0) for run in (*baselines, b))
    return max(of_a, key=lambda of_one: abs(of_one - of_b)), of_b


def _differ(a: float, b: float) -> bool:
    """Whether both are known and differ."""
    return a > 0 and b > 0 and abs(b / a - 1) > _SAME
