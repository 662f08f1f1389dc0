"""One run, read from its files: the content of `mfu-jax report`."""

from __future__ import annotations

import array
import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.run_log.events import START
from mfu_jax.runs.goodput.run_time import CATEGORIES, RunTime, TimeSlice
from mfu_jax.runs.goodput.wall_clock import of_metrics, read_logged, read_run
from mfu_jax.runs.metrics.files import WARMUP_STEPS, MetricsRun, read_metrics
from mfu_jax.runs.metrics.run_files import logged_summary, metrics_file_of, read_beside
from mfu_jax.runs.report.collective_waits import CollectiveWaits
from mfu_jax.runs.report.processes import JobProcesses, read_processes
from mfu_jax.runs.report.setup import (
    ModelBreakdown,
    Setup,
    count_logged_model,
    count_model,
    read_setup,
)
from mfu_jax.runs.report.verdict import run_verdict
from mfu_jax.storage.addresses import path_of
from mfu_jax.util.formatting import columns, counted, percent, readable
from mfu_jax.verdict import COLUMNS, Verdict

_SHOWN = ("maxtext", "exact", "dense", "palm", "6n")
_FORMS = {
    "jsonl": "mfu_jax metrics",
    "maxtext": "MaxText metrics_file",
    "log": "log lines",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is read.

    Attributes:
        peak: the peak that MFU refers to; None: the run's own.
        warmup_steps: as for `MetricsRun.summary`.
        model: a bundled model or a file to count FLOPs from; empty: the run's own FLOPs.
        fields: changed fields of the model.
        convention: how the model is counted.
        price: of one device for one hour; None: not given.
        devices: number of devices in the job; None: from the run's set-up.
    """

    peak: hardware.Peak | None = None
    warmup_steps: int = WARMUP_STEPS
    model: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    convention: str = "maxtext"
    price: float | None = None
    devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run, from its files.

    Attributes:
        metrics: its steps.
        time: where its wall clock went.
        summary: of its measured steps.
        setup: its logged set-up.
        processes: its processes at their last exchange; None: one process, or unknown.
        reported_tflops: of a step on one device, as the run's files say.
        counted: the FLOPs of the model named in the options.
        options: how it was read.
        waits: its hosts' waits in collectives, from a profile; None: no profile of several hosts.
        bound_mfu: the MFU that its plan holds for possible; None: no plan.
    """

    metrics: MetricsRun
    time: RunTime
    summary: Summary
    setup: Setup
    processes: JobProcesses | None
    reported_tflops: float
    counted: ModelBreakdown
    options: Options
    waits: CollectiveWaits | None = None
    bound_mfu: float | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """The answer in a sentence."""
        numbers = self.metrics.steps.numbers
        begins = (attempt.first_step or 0 for attempt in self.time.attempts)
        return run_verdict(
            self.metrics.path,
            self.summary,
            self.setup,
            wall=self.time.time,
            profile=self.metrics.profile,
            peak=self.peak,
            convention=self.options.convention if self.options.model else "",
            bound_mfu=self.bound_mfu,
            steps=range(max(numbers[0], *begins, 0), numbers[-1] + 1),
        )

    @property
    def peak(self) -> tuple[str | None, float | None]:
        """The peak that MFU refers to, the options' or the run's own: its text and TFLOP/s."""
        if (given := self.options.peak) is not None:
            return str(given), given.tflops_per_sec
        return self.setup.peak, self.setup.peak_tflops

    @cached_property
    def answer(self) -> Mapping[str, Any]:
        """The output of ``mfu-jax report --json``, without the verdict."""
        run, (peak, peak_tflops) = self.metrics, self.peak
        return {
            "file": run.path,
            "form": run.form,
            "first_step": run.steps.numbers[0],
            "last_step": run.steps.numbers[-1],
            "restarts": run.restarts,
            "unreadable_lines": run.unreadable,
            "repeated_lines": run.repeated,
            **self.summary.to_json(),
            "reported_tflops": self.reported_tflops,
            "gpu": dict(run.gpu) or None,
            "conventions": {
                name: {"tflops": tflops, "mfu": mfu}
                for name, (tflops, mfu) in self._by_convention(self.counted).items()
            },
            "peak_tflops_per_device": peak_tflops,
            "peak": peak,
            **_process_totals(run, self.time),
            **_time(self.time, self.summary),
            "hosts": self.processes.answer if self.processes else None,
            "collective_waits": self.waits.to_json() if self.waits else None,
            "origin": _origin(run.path),
        }

    @property
    def cost(self) -> float | None:
        """The cost of all devices over the wall clock, in the price's currency."""
        price, wall = self.options.price, self.time.wall_seconds
        devices = self.options.devices or self.setup.devices
        if price is None or devices is None or wall is None:
            return None
        return price * devices * wall / 3600

    @cached_property
    def model(self) -> ModelBreakdown:
        """The model's FLOPs: from the options, else from the logged settings."""
        return self.counted if self.options.model else count_logged_model(self.setup)

    @property
    def conventions(self) -> dict[str, tuple[float, float | None]]:
        """Per convention: TFLOPs of a step on one device, and MFU."""
        return self._by_convention(self.model)

    def _by_convention(self, model: ModelBreakdown) -> dict[str, tuple[float, float | None]]:
        rate, seconds = self.summary.tflops_per_sec_per_device, self.summary.mean_seconds
        own, mfu = (rate or 0.0) * (seconds or 0.0), self.summary.mfu
        return {
            name: (tflops, mfu * tflops / own if mfu and own else None)
            for name, tflops in model.conventions.items()
        }

    @cached_property
    def columns(self) -> StepColumns:
        """The steps, as columns by metric."""
        return StepColumns.of(self.metrics, self.options.warmup_steps)

    @property
    def totals(self) -> Mapping[str, Any]:
        """The content of ``summary.json``: as logged by the last process, else from the files."""
        if logged := logged_summary(self.metrics.path):
            return logged
        spent = {use: seconds for use, seconds in self.time.time.items() if seconds}
        known = dataclasses.replace(
            self.summary, total_seconds=math.fsum(spent.values()), seconds_by_use=spent
        ).to_json()
        # Much of it is before the first step, which no record has.
        return known | {"compile_seconds": self.time.time.get("compile"), "compile_count": None}

    def render(self) -> str:
        """The run for a terminal."""
        return _text(self)


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """The steps of a run, with one column per metric.

    Attributes:
        numbers: of the steps.
        is_measured: 1 for a measured step, 0 for a compile or warm-up step.
        values: metric → value in each step; NaN where a step has none.
    """

    numbers: array.array[int]
    is_measured: bytearray
    values: Mapping[str, array.array[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: MetricsRun, warmup_steps: int) -> StepColumns:
        """The columns of a run."""
        values: dict[str, array.array[float]] = {}
        is_measured = bytearray()
        for kind, segment in run.segments(warmup_steps=warmup_steps):
            before, count = len(is_measured), len(segment.numbers)
            is_measured += (b"\1" if kind == "step" else b"\0") * count
            for name, column in segment.columns.items():
                if name not in values:
                    values[name] = array.array("d", [math.nan]) * before
                values[name].extend(column)
            for name in values.keys() - segment.columns.keys():
                values[name].extend(array.array("d", [math.nan]) * count)
        return cls(numbers=run.steps.numbers, is_measured=is_measured, values=values)

    def measured(self, name: str) -> tuple[list[int], list[float]]:
        """Positions and values of a metric in the measured steps that have it."""
        column = self.values.get(name, ())
        places = [i for i, v in enumerate(column) if self.is_measured[i] and math.isfinite(v)]
        return places, [column[i] for i in places]


def read_metrics_of(run: str) -> MetricsRun:
    """The steps of a run.

    Args:
        run: the run's folder, metrics file or log; ``-``: standard input.
    """
    return read_metrics(run if run == "-" else str(metrics_file_of(path_of(run))))


def answer_without_steps(run: str) -> tuple[Mapping[str, Any], str] | None:
    """What a run's log alone tells, as JSON and as text; None if it has measured steps.

    A process may end before its first step, and its time is lost nevertheless.

    Args:
        run: as for `read_metrics_of`.
    """
    time = None if run == "-" else read_logged(metrics_file_of(path_of(run)))
    if time is None or _has_steps(run, time):
        return None
    summary = Summary(steps=0)
    verdict = run_verdict(time.path, summary, read_setup(time.path), wall=time.time, profile={})
    answer = {"file": time.path, "mfu": time.mfu, "hfu": time.hfu, "verdict": verdict.to_json()}
    return answer | _time(time, summary), f"{verdict.render()}\n{time.render()}"


def _has_steps(run: str, time: RunTime) -> bool:
    try:
        return read_metrics_of(run).summary(warmup_steps=0).steps > 0
    except UserError:  # a file that is there, and cannot be read, has the steps that the log knows
        return time.steps > 0 and os.path.exists(time.path)


def read_run_data(run: str, options: Options) -> RunData:
    """Reads one run.

    Args:
        run: as for `read_metrics_of`.
        options: how to read it.

    Raises:
        UserError: it has no measured step, or the model is not this run's.
    """
    metrics = read_metrics_of(run)
    time = of_metrics(metrics) if run == "-" else read_run(metrics.path, metrics=metrics)
    metrics, reported, model = _recounted(metrics, options)
    summary = metrics.summary(warmup_steps=options.warmup_steps)
    if not summary.steps or not summary.mean_seconds:
        raise UserError(
            f"{run!r} holds {counted(len(metrics.steps), 'step')}, none with a measured time",
            hint="pass warmup_steps=0, or the metrics file instead of a log with 0.000 for "
            "its times",
        )
    time = time.with_utilization(summary.mfu, summary.hfu)
    return RunData(
        metrics=metrics,
        time=time,
        summary=summary,
        setup=read_setup(metrics.path),
        processes=read_processes(metrics.path),
        reported_tflops=reported,
        counted=model,
        options=options,
    )


def _recounted(run: MetricsRun, options: Options) -> tuple[MetricsRun, float, ModelBreakdown]:
    """The run with the options' model and peak, its own TFLOPs per step, and the model's."""
    from mfu_jax.runs.metrics.recounted import check_tokens, tflops_of_a_step, with_flops, with_peak

    reported, model = tflops_of_a_step(run), ModelBreakdown()
    if options.model:
        from mfu_jax.flops.analytic.conventions import find_convention
        from mfu_jax.flops.analytic.inputs.maxtext_keys import parse_override
        from mfu_jax.flops.analytic.inputs.overrides import load_model_config

        find_convention(options.convention)
        fields = {key: parse_override(key, text) for key, text in options.fields.items()}
        config = load_model_config(options.model, fields)
        check_tokens(run, config, options.model)
        model = count_model(config, options.convention)
        run = with_flops(run, model.conventions[options.convention])
    if options.peak is not None:
        run = with_peak(run, options.peak)
    return run, reported, model


_OF_A_PROCESS = (
    *("compile_seconds", "compile_count", "total_seconds", "seconds_by_use", "shares"),
    *("train_fraction", "clock_jumps", "dropped_records", "dropped_by_sink", "flags", "phases"),
)
"""Fields of a `Summary` that metrics files do not have."""


def _process_totals(run: MetricsRun, time: RunTime) -> dict[str, Any]:
    """What process 0 logged at its end; None if it was restarted, or logged nothing."""
    is_one = run.path != "-" and len(time.attempts) == 1
    logged = logged_summary(run.path) if is_one else {}
    totals = {name: logged.get(name) for name in _OF_A_PROCESS}
    if totals["compile_seconds"] is None:
        totals["compile_seconds"] = time.time.get("compile")
    return totals


def _time(run: RunTime, summary: Summary) -> dict[str, Any]:
    """Measured steps, and what the run log says; its numbers are None without one."""
    known = {
        "measured_steps": summary.steps,
        "goodput": run.goodput,
        "effective_mfu": run.effective_mfu,
        "wall_seconds": run.wall_seconds,
        "restarts": run.restarts,
        "lost_steps": run.lost_steps,
        "time": {name: run.time.get(name) for name in CATEGORIES},
        "attempts": [dataclasses.asdict(attempt) for attempt in run.attempts],
        "days": [_part(day) for day in run.days],
        "processes": [_part(process) for process in run.processes],
        "notes": run.notes,
    }
    return known | ({"steps": run.steps} if run.has_run_log else {})


def _origin(metrics_file: str) -> dict[str, Any]:
    """Where the last process ran, and by what; None where its log does not say."""
    start = read_beside(metrics_file, START)
    return {name: start.get(name) for name in ("host", "command", "versions", "commit")}


def _part(part: TimeSlice) -> dict[str, Any]:
    names = ("name", "wall_seconds", "goodput", "effective_mfu", "time")
    return {name: getattr(part, name) for name in names}


def _text(data: RunData) -> str:
    """The run's steps, MFU in several conventions, and where its time went."""
    run, answer = data.metrics, data.answer
    asides = [
        f"{count} {text}"
        for count, text in (
            (data.time.restarts, "restart" if data.time.restarts == 1 else "restarts"),
            (run.other_records, "records that are not steps"),
            (run.repeated, "lines that repeat a step"),
            (run.unreadable, "unreadable lines"),
        )
        if count
    ]
    lines = [
        data.verdict.render(),
        f"{_FORMS[run.form]}, steps {answer['first_step']} to {answer['last_step']}"
        + (f" ({', '.join(asides)})" if asides else ""),
        data.summary.render(),
    ]
    if answer["peak"]:
        lines += columns([("  peak       ", answer["peak"])], "<", width=COLUMNS, fold=1)
    if reported := answer["reported_tflops"]:
        lines.append(f"  model        {readable(reported)} TFLOP per step and device, as reported")
    for name in _SHOWN:
        if name in answer["conventions"]:
            row = answer["conventions"][name]
            lines.append(
                f"    {name:<10} {readable(row['tflops'])} TFLOP, MFU {percent(row['mfu'])}"
            )
    if any(name.startswith("gpu/") for name in run.gpu):
        lines.append(f"  GPUs         {_gpus(run.gpu)}")
    processes = data.processes.render() if data.processes else ""
    waits = data.waits.render() if data.waits else ""
    return "\n".join([*lines, *filter(None, [data.time.render(), processes, waits])])


def _gpus(reading: Mapping[str, float]) -> str:
    """The last GPU reading, in one line."""
    shown = {
        "gpu/power_watts": "W",
        "gpu/temperature_celsius": "°C",
        "gpu/sm_clock_mhz": "MHz",
        "gpu/tokens_per_joule": "tokens/J",
    }
    values = [f"{reading[name]:.4g} {unit}" for name, unit in shown.items() if name in reading]
    if "perf/mfu_at_clock" in reading:
        values.append(f"MFU at that clock {percent(reading['perf/mfu_at_clock'])}")
    if reading.get("gpu/throttled_power"):
        values.append("at the power limit, which lowers the clock")
    return f"{', '.join(values)} (at step {reading.get('step', 0):.0f})"
