"""Totals of a run, or of a window of it: step times, rates, and where the time went."""

from __future__ import annotations

import array
import dataclasses
import itertools
import math
import operator
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mfu_jax import names
from mfu_jax.logger.records.step_cost import StepCost, StepRates, add_costs
from mfu_jax.util.formatting import counted, loss_text, percent, readable, seconds_text, strict
from mfu_jax.verdict import COLUMNS, NOTABLE, TOLERANCE, Verdict

if TYPE_CHECKING:
    from mfu_jax.pages.markup import Markup

_MOST_LOSSES = 3
_CHART_POINTS = 60


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The value below which the given fraction of `ordered` lies, interpolated linearly.

    Args:
        ordered: ascending values, at least one.
        fraction: 0.5 for the median.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def fall_of(values: Sequence[float], last: int) -> tuple[float, float]:
    """What the last values fell from, and to what: a quartile, so that a fall that lasts stays one.

    Args:
        values: in the order of the steps.
        last: how many of them are compared with those before, which are as many or more.

    Returns:
        The upper quartile of those before, and the median of the last; NaN with too few.

    >>> fall_of([4.0] * 9 + [1.0, 1.0, 2.0], 3)
    (4.0, 1.0)
    """
    before, now = [*values][:-last], [*values][-last:]
    if len(before) < last:
        return math.nan, math.nan
    return percentile(sorted(before), 0.75), percentile(sorted(now), 0.5)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Totals over measured steps; compile and warm-up steps count only in the time shares.

    Attributes:
        steps: measured steps.
        warmup_steps: steps excluded as warm-up.
        compile_steps: steps excluded because they triggered a compilation.
        median_seconds: median step time; None without measured steps, like the fields below.
        p90_seconds: step time that one step in ten exceeds.
        p99_seconds: step time that one step in a hundred exceeds.
        mean_seconds: total time / steps.
        tokens_per_sec_per_device: tokens of all measured steps / their time: a mean, like all rates
            and utilisations below, of the steps for which it is known.
        tflops_per_sec_per_device: model TFLOPs (10¹²) of all measured steps / their time.
        mfu: optimal time of the model FLOPs of all measured steps / their time.
        hfu: likewise for the executed FLOPs.
        mbu: likewise for the bytes moved.
        tensor_active: share of cycles in which the tensor cores worked, by the devices' counters.
        tensor_active_by_count: the same by the executed FLOPs, over the same seconds.
        last_loss: loss of the last step.
        compile_seconds: time that JAX spent tracing, lowering or compiling.
        compile_count: executables compiled.
        total_seconds: all wall time of this process, including compilations before the first step.
        seconds_by_use: `total_seconds` by use: ``train``, ``compile``, ``eval``, ….
        clock_jumps: steps in which the wall clock jumped.
        dropped_records: records that were not delivered, summed over all sinks.
        dropped_by_sink: the same by sink and reason.
        flags: name of each impossible number → number of steps that have it.
        phases: totals of each phase over the measured steps; see `PhaseBook.totals`.
        verdict: what the totals mean, if the logger has a `judge`.
        times: seconds of each measured step of this process, for a notebook's chart; not in JSON.
    """

    steps: int
    warmup_steps: int = 0
    compile_steps: int = 0
    median_seconds: float | None = None
    p90_seconds: float | None = None
    p99_seconds: float | None = None
    mean_seconds: float | None = None
    tokens_per_sec_per_device: float | None = None
    tflops_per_sec_per_device: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    mbu: float | None = None
    tensor_active: float | None = None
    tensor_active_by_count: float | None = None
    last_loss: float | None = None
    compile_seconds: float = 0.0
    compile_count: int = 0
    total_seconds: float = 0.0
    seconds_by_use: Mapping[str, float] = dataclasses.field(default_factory=dict)
    clock_jumps: int = 0
    dropped_records: int = 0
    dropped_by_sink: Mapping[str, int] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, int] = dataclasses.field(default_factory=dict)
    phases: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    verdict: Verdict | None = None
    times: Sequence[float] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def has_steps(self) -> bool:
        """Whether any step was recorded."""
        return self.steps + self.warmup_steps + self.compile_steps > 0

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the process's wall time by use; they add up to 1."""
        if self.total_seconds <= 0:
            return {}
        return {use: spent / self.total_seconds for use, spent in self.seconds_by_use.items()}

    @property
    def train_fraction(self) -> float | None:
        """Fraction of the process's wall time spent in training steps.

        A run's goodput (`mfu_jax.runs.goodput`) also has the time before and between processes.
        """
        return self.shares.get("train")

    def to_json(self) -> dict[str, Any]:
        """All fields, and what derives from them, as plain values that `json.dump` accepts."""
        values = dataclasses.asdict(dataclasses.replace(self, verdict=None, times=()))
        del values["verdict"], values["times"]
        if self.verdict is not None:
            values["verdict"] = self.verdict.to_json()
        values |= {"shares": self.shares, "train_fraction": self.train_fraction}
        if values["last_loss"] is not None and not math.isfinite(values["last_loss"]):
            values["last_loss"] = str(values["last_loss"])
        return dict(strict(values))

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        from mfu_jax.pages.fragment import fragment

        rows = list(self._rows())
        labelled = [(label, value) for label, value in rows if label]
        phases = [value for label, value in rows if not label]
        title = self._head() if self.verdict is None else self.verdict.sentence
        chart = self._chart() if self.times else None
        return fragment(title, ("", ""), labelled, words=(1,), notes=phases, chart=chart)

    def _chart(self) -> Markup:
        from mfu_jax.pages.charts import Curve, curves, thinned

        points = thinned(range(len(self.times)), self.times, most=_CHART_POINTS)
        return curves(
            "step time",
            [Curve(name="", points=points)],
            x_title="measured step",
            x_text=lambda step: f"{step:,.0f}",
            y_text=seconds_text,
            has_zero=True,
        )

    def render(self, columns: int = COLUMNS) -> str:
        """A few lines of text for the end of a run, at most that wide but for commands."""
        rows = (
            textwrap.fill(
                f"  {label:<13}{value}" if label else f"  {value}",
                sys.maxsize if label == "next" else columns,  # to be pasted
                subsequent_indent=" " * 15,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for label, value in self._rows()
        )
        verdict = [] if self.verdict is None else [self.verdict.render(columns)]
        return "\n".join([*verdict, self._head(), *rows])

    def _head(self) -> str:
        left_out = {"compile": self.compile_steps, "warm-up": self.warmup_steps}
        kinds = " and ".join(f"{count} {kind}" for kind, count in left_out.items() if count)
        steps = "step" if sum(left_out.values()) == 1 else "steps"
        aside = f" ({kinds} {steps} excluded)" if kinds else ""
        return f"summary: {counted(self.steps, 'measured step')}{aside}"

    def _rows(self) -> Iterator[tuple[str, str]]:
        """The lines of the text: label, value; a phase has no label."""
        if self.steps:
            statistics = ("mean", "median", "p90", "p99")
            times = (getattr(self, f"{name}_seconds") for name in statistics)
            shown = zip(statistics, times, strict=True)
            yield "step time", ", ".join(f"{name} {_readable(time, ' s')}" for name, time in shown)
            tokens = self.tokens_per_sec_per_device
            rate = f"mean {_readable(self.tflops_per_sec_per_device)} TFLOP/s/device"
            yield "rates", rate + (f", {tokens:.1f} tokens/s/device" if tokens else "")
            mbu = "" if self.mbu is None else f", MBU {percent(self.mbu)}"
            yield "utilisation", f"mean MFU {percent(self.mfu)}, HFU {percent(self.hfu)}{mbu}"
        if self.tensor_active is not None:
            count = self.tensor_active_by_count
            by_count = "" if count is None else f", {percent(count)} by count"
            yield "tensor cores", f"active {percent(self.tensor_active)} by counter{by_count}"
        for name, values in self.phases.items():
            yield "", _phase_line(name, values)
        if self.last_loss is not None:
            yield "last loss", loss_text(self.last_loss, decimals=4)
        if self.compile_count:
            spent = readable(self.compile_seconds)
            yield "compiling", f"{spent} s for {counted(self.compile_count, 'executable')}"
        if self.total_seconds > 0:
            shares = ", ".join(f"{use} {percent(share)}" for use, share in self.shares.items())
            yield "wall time", f"{readable(self.total_seconds)} s of this process: {shares}"
        if self.clock_jumps:
            yield "clock jumps", f"{self.clock_jumps} (the monotonic clock is used)"
        for name, count in self.dropped_by_sink.items():
            yield "not written", f"{counted(count, 'record')}, {name}"
        for flag, count in self.flags.items():
            yield "impossible", f"{flag} in {counted(count, 'step')}"
        if self.verdict is not None:
            for loss in self.verdict.losses[:_MOST_LOSSES]:
                if loss.fraction >= NOTABLE:
                    yield "lost to", str(loss)
            for step in self.verdict.next_steps:
                yield "next", str(step)


def _readable(value: float | None, unit: str = "") -> str:
    return "n/a" if value is None else f"{readable(value)}{unit}"


def _phase_line(name: str, values: Mapping[str, float]) -> str:
    seconds = readable(values["seconds"] / values["times"])
    text = f"phase {name}: {counted(int(values['times']), 'time')} {seconds} s"
    if (rate := values.get("tflops_per_sec_per_device")) is None:
        return text
    utilisation = f"MFU {percent(values.get('mfu'))}, HFU {percent(values.get('hfu'))}"
    is_possible = max(values.get("mfu", 0.0), values.get("hfu", 0.0)) <= 1 + TOLERANCE
    end = "" if is_possible else ", impossible: over 100%"
    return f"{text}, {readable(rate)} TFLOP/s/device, {utilisation}{end}"


_MEANS = {
    "tokens_per_sec_per_device": "perf/per_device_tokens",
    "tflops_per_sec_per_device": "perf/per_device_tflops",
    **{name: f"perf/{name}" for name in ("mfu", "hfu", "mbu")},
}
"""Field of a summary → the amount, or the utilisation, of a step."""
_UTILISATIONS = ("perf/mfu", "perf/hfu", "perf/mbu", "perf/mfu_at_clock")


def perf_means(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means of the ``perf/`` scalars of several steps' records, each of the steps that have it.

    Of a rate or a utilisation it is the work of these steps / their time, as in a `Summary`; of a
    time or an amount of work it is the plain mean.

    >>> quick = {"perf/step_time_seconds": 1.0, "perf/mfu": 0.4}
    >>> slow = {"perf/step_time_seconds": 3.0, "perf/mfu": 0.2}
    >>> perf_means([quick, slow])
    {'perf/step_time_seconds': 2.0, 'perf/mfu': 0.25}
    """
    values: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    for scalars in steps:
        for name, value in scalars.items():
            if name.startswith("perf/"):
                values[name].append(value)
                if name.endswith("_per_sec") or name in _UTILISATIONS:
                    seconds[name].append(scalars["perf/step_time_seconds"])
    return {name: statistics.fmean(each, seconds.get(name)) for name, each in values.items()}


_State = tuple[Mapping[str, tuple[float, float]], int, StepRates | None]


class StepStatistics:
    """Accumulates measured steps at eight bytes each, so a long run has exact percentiles."""

    def __init__(self) -> None:
        self._seconds = array.array("d")
        # Amounts or optimal seconds, each with the measured seconds of the steps that have it; the
        # number of steps in these sums; and the rates of those after. Replaced at once, as another
        # thread may ask for a summary.
        self._state: _State = dict.fromkeys(_MEANS.values(), (0.0, 0.0)), 0, None

    def __len__(self) -> int:
        return len(self._seconds)

    @property
    def times(self) -> Sequence[float]:
        """Seconds of each step."""
        return self._seconds[:]

    def add(self, seconds: float, rates: StepRates) -> None:
        """Adds one step, usually with the same rates as the one before."""
        if rates is not self._state[2]:
            self._state = self._sums(), len(self._seconds), rates
        self._seconds.append(seconds)

    def _sums(self) -> Mapping[str, tuple[float, float]]:
        """The sums over all steps."""
        sums, settled, rates = self._state
        times = self._seconds[settled:]
        if rates is None or not times:
            return sums
        count, spent, known = len(times), sum(times), {**rates.amounts, **rates.optimal}
        return {
            name: (pair[0] + count * known[name], pair[1] + spent) if name in known else pair
            for name, pair in sums.items()
        }

    def add_many(self, columns: Mapping[str, Sequence[float]]) -> None:
        """Adds steps with the same ``perf/`` scalars, as metric name → its value in each step.

        An amount of 0 is not known.
        """
        sums, seconds = dict(self._sums()), columns["perf/step_time_seconds"]
        for name in sums.keys() & columns:
            (total, spent), values, known = sums[name], iter(columns[name]), seconds
            if "_device_" in name:
                known = [*itertools.compress(seconds, columns[name])]
            else:
                values = map(operator.mul, values, seconds)
            sums[name] = sum(values, total), sum(known, spent)
        self._seconds.extend(seconds)
        self._state = sums, len(self._seconds), None

    def fields(self) -> dict[str, Any]:
        """The fields of `Summary` that derive from the measured steps."""
        if not self._seconds:
            return {"steps": 0}
        ordered = sorted(self._seconds)
        total = math.fsum(ordered)
        return {
            "steps": len(ordered),
            "median_seconds": percentile(ordered, 0.5),
            "p90_seconds": percentile(ordered, 0.9),
            "p99_seconds": percentile(ordered, 0.99),
            "mean_seconds": total / len(ordered),
            **{
                field: total / spent
                for field, (total, spent) in zip(_MEANS, self._sums().values(), strict=True)
                if spent
            },
        }


class ActivityTotals:
    """Mean activity of the tensor cores, by counter and, over the same readings, by count."""

    def __init__(self) -> None:
        self._alone: list[float] = []
        self._compared: list[tuple[float, float]] = []

    def add(self, scalars: Mapping[str, float]) -> None:
        """Adds a record's reading, if it has one."""
        if (counter := scalars.get(names.TENSOR_ACTIVE)) is not None:
            if (count := scalars.get(names.TENSOR_ACTIVE_BY_COUNT)) is None:
                self._alone.append(counter)
            else:
                self._compared.append((counter, count))

    def fields(self) -> dict[str, Any]:
        """The fields of `Summary` that derive from the readings."""
        of_fields = ("tensor_active", "tensor_active_by_count")
        readings = zip(*self._compared, strict=True) if self._compared else [self._alone]
        return {k: statistics.fmean(each) for k, each in zip(of_fields, readings) if each}  # noqa: B905


class PhaseTotals:
    """Totals of each phase, added on one thread."""

    def __init__(self) -> None:
        self._of_name: dict[str, tuple[int, float, StepCost | None]] = {}

    def add(self, name: str, times: int, seconds: float, cost: StepCost | None) -> None:
        """Adds `times` runs of a phase, which took `seconds` in total."""
        before, spent, known = self._of_name.get(name, (0, 0.0, None))
        costs = [part for part in (known, cost) if part is not None]
        total = add_costs(costs) if costs else None
        self._of_name[name] = before + times, spent + seconds, total

    def values(self) -> dict[str, dict[str, float]]:
        """All totals.

        Returns:
            Phase → ``times``, total ``seconds``, and, if known, ``tflops_per_sec_per_device``,
            ``mfu`` and ``hfu``.
        """
        return {name: _phase_values(*total) for name, total in self._of_name.copy().items()}


def _phase_values(times: int, seconds: float, cost: StepCost | None) -> dict[str, float]:
    rates = cost.rates(seconds) if cost is not None and seconds > 0 else {}
    of_phases = {
        "tflops_per_sec_per_device": "perf/per_device_tflops_per_sec",
        "mfu": "perf/mfu",
        "hfu": "perf/hfu",
    }
    known = {name: rates[of_step] for name, of_step in of_phases.items() if of_step in rates}
    return {"times": times, "seconds": seconds, **known}
