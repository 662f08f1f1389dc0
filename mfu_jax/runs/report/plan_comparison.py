"""Compares a plan's prediction of a step with the run's measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mfu_jax import names
from mfu_jax.hardware.chips import find, table
from mfu_jax.names import THROTTLE_SCORE
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import columns, counted, percent, seconds_text
from mfu_jax.util.user_files import read_text, unreadable
from mfu_jax.verdict import StepGap

_EXPECTED = "what mfu-jax plan … --json prints; usually another file; pass that"
_MOST_BYTES = 2**24
_MATMULS = ("matmul", "kernel", "pipeline bubble")  # causes whose time follows the clock
_NOISE = 0.02  # of a measured time
_ROUNDED = 1e-3  # of FLOPs, as logs print them
_FROM_LOG = (
    "from the log alone: what a step itself takes beyond its plan is lower clock, as far as "
    "read, and unexplained; profile_steps=N-M divides it by op"
)


class PlannedRow(NamedTuple):
    """One number from the plan and from the run.

    Attributes:
        name: what it is.
        predicted: by the plan; None if it has no value.
        measured: in the run; None if it has no value.
        unit: ``seconds``, ``fraction`` or ``bytes``.
    """

    name: str
    predicted: float | None
    measured: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """Measured / predicted."""
        if self.predicted and self.measured is not None:
            return self.measured / self.predicted
        return None

    def text(self, value: float | None) -> str:
        """A value formatted for display."""
        if value is None:
            return "n/a"
        if self.unit == "bytes":
            return f"{value / 2**30:,.2f} GiB"
        return percent(value) if self.unit == "fraction" else seconds_text(value)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        return self.name, self.text(self.predicted), self.text(self.measured), ratio


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """A plan beside a run.

    Attributes:
        path: the plan's file.
        target: the chips planned for.
        rows: step time, MFU, HFU and memory.
        gap: what a step takes beyond the plan, and why; None if either time is not known.
        notes: what is unknown.
        bound_mfu: the MFU at the shortest step that the plan holds for possible, if it says so.
    """

    path: str
    target: str
    rows: tuple[PlannedRow, ...]
    gap: StepGap | None = None
    notes: tuple[str, ...] = ()
    bound_mfu: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "file": self.path,
            "target": self.target,
            "rows": [{**row._asdict(), "ratio": row.ratio} for row in self.rows],
            "gap": self.gap.to_json() if self.gap else None,
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """The tables for a terminal."""
        head = ("plan and run", "predicted", "measured", "measured / predicted")
        lines = columns([head, *(row.cells for row in self.rows)], "<>>>")
        notes = [f"note: {note}" for note in self.notes]
        lines = [f"plan for {self.target}: {self.path}", *lines, *notes]
        return "\n".join([*lines, *([f"\n{self.gap.render()}"] if self.gap else [])])


def read_plan(path: str) -> Mapping[str, Any]:
    """Reads a plan as printed by ``mfu-jax plan … --json``.

    Raises:
        UserError: the file holds no plan.
    """
    text = read_text(path, _EXPECTED, _MOST_BYTES)
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"no JSON: {error}", _EXPECTED) from None
    known = isinstance(plan, dict) and isinstance(plan.get("time_by_cause"), dict)
    if not known or not (_number(plan, "step_time_seconds") or 0) > 0:
        raise unreadable(path, "it has no step_time_seconds and time_by_cause", _EXPECTED)
    return dict(plan)


def clock_share(reading: Mapping[str, float], plan: Mapping[str, Any]) -> float | None:
    """The clock that a run read, as a share of the one at which its chips reach their peak.

    Args:
        reading: `MetricsRun.gpu`: NVML's clock of the slowest GPU, or a TPU's throttle score.
        plan: names the chips.
    """
    if (score := reading.get(THROTTLE_SCORE)) is not None:
        return 1 - min(score, 9.0) / 10
    peak = next((c.clock_ghz for c in table() if c.name == plan.get("hardware")), None)
    clock = reading.get("gpu/sm_clock_mhz")
    return min(1.0, clock / 1000 / peak) if clock and peak else None


def compare_with_plan(plan: Mapping[str, Any], path: str, run: RunData) -> PlanComparison:
    """Compares a plan with a run.

    Args:
        plan: as `read_plan` returns it.
        path: of its file.
        run: the run of the planned step.
    """
    summary = run.summary
    peak = max(run.columns.measured("memory/peak_bytes_in_use")[1], default=None)
    step = _number(plan, "step_time_seconds")
    rows = (
        PlannedRow("step time", step, summary.median_seconds, "seconds"),
        PlannedRow("MFU", _number(plan, "mfu"), summary.mfu, "fraction"),
        PlannedRow("HFU", _number(plan, "hfu"), summary.hfu, "fraction"),
        PlannedRow("peak memory", _number(plan, "memory_peak_bytes"), peak, "bytes"),
    )
    notes = [*_differences(plan, run), *_verdict(plan, summary.median_seconds)]
    mfu, bound = _number(plan, "mfu"), _number(plan, "step_time_bound_seconds")
    if _is_for_another_chip(plan, run):
        bound = None  # an MFU of another peak
    return PlanComparison(
        path=path,
        target=str(plan.get("target", "")),
        rows=rows,
        gap=_logged_gap(plan, run),
        notes=tuple(notes),
        bound_mfu=mfu * step / bound if mfu and step and bound else None,
    )


def _logged_gap(plan: Mapping[str, Any], run: RunData) -> StepGap | None:
    """A run's gap as far as its log divides it: a step with its share of waits and compilation."""
    time, summary, planned = run.time.time, run.summary, _number(plan, "step_time_seconds")
    median, mean = summary.median_seconds, summary.mean_seconds
    if planned is None or median is None or mean is None:
        return None
    steps, slow = summary.steps, mean - median
    if run.time.has_run_log and run.time.steps:
        steps, slow = run.time.steps, time.get("slow_steps", 0.0) / run.time.steps
        median = time.get("train", 0.0) / steps
    spent = {
        names.WAITING_HOST: _logged(run, "data_wait", "goodput/data_wait_seconds") / steps,
        "compile": _logged(run, "compile", "compile/seconds") / steps,
        "outlier steps": slow,
    }
    share, more = clock_share(run.metrics.gpu, plan), median - planned
    matmuls = sum(float(plan["time_by_cause"].get(cause, 0.0)) for cause in _MATMULS)
    clock = 0.0 if share is None else max(0.0, min(more, matmuls * (1 / share - 1)))
    return StepGap(
        target=str(plan.get("target", "")),
        planned_seconds=planned,
        measured_seconds=median + sum(spent.values()),
        causes={**spent, names.LOWER_CLOCK: clock, names.UNEXPLAINED: more - clock},
        notes=(_FROM_LOG,),
    )


def _logged(run: RunData, category: str, metric: str) -> float:
    """Seconds of process 0 by its run log, or by its metrics without one."""
    if run.time.has_run_log:
        return run.time.time.get(category, 0.0)
    return math.fsum(filter(math.isfinite, run.columns.values.get(metric, ())))


def _is_for_another_chip(plan: Mapping[str, Any], run: RunData) -> bool:
    chip, kind = plan.get("hardware"), run.setup.device_kind
    return bool(chip and kind) and chip not in [found.name for found in find(kind)]


def _differences(plan: Mapping[str, Any], run: RunData) -> Iterator[str]:
    """Where the run differs from the plan."""
    if _is_for_another_chip(plan, run):
        chip, kind = plan["hardware"], run.setup.device_kind
        yield f"the plan is for {chip}, the run was on {kind}: other hardware"
    devices, count = _number(plan, "devices"), run.setup.devices
    if devices and count and devices != count:
        yield f"the plan is for {counted(int(devices), 'device')}, the run had {count:,}"
    model, same = _number(plan, "model_flops"), plan.get("convention") == run.setup.convention
    done = max(run.columns.measured("perf/per_device_tflops")[1], default=0.0) * 1e12
    if model and done and same and abs(done / model - 1) > _ROUNDED:
        yield (
            f"the planned model needs {model / 1e12:,.4g} TFLOP a step and device, the run's "
            f"{done / 1e12:,.4g}: another model, batch, sequence length or number of devices"
        )


def _verdict(plan: Mapping[str, Any], seconds: float | None) -> Iterator[str]:
    """Where the measured step lies: within the plan's range, outside it, or below its bound."""
    bound, span = _number(plan, "step_time_bound_seconds"), plan.get("step_time_range")
    if seconds is None:
        return
    if bound and seconds < bound * (1 - _NOISE):
        yield (
            f"the run is faster than the plan's bound, {seconds_text(bound)}: it ran another "
            "program, or on other chips"
        )
    elif isinstance(span, list) and [type(end) for end in span] == [float, float]:
        low, high = map(seconds_text, span)
        place = "within" if span[0] <= seconds <= span[1] else "outside of"
        yield f"the measured step time is {place} the plan's range, {low} to {high}"


def _number(plan: Mapping[str, Any], key: str) -> float | None:
    value = plan.get(key)
    return float(value) if isinstance(value, int | float) else None
