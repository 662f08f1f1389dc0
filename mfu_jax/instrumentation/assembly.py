"""Builds a logger from settings, for `instrument`, the flags and the reference trainer.

`sinks_of` is called before anything is compiled, so that an unwritable folder ends the run at
once; `logger_of`, once the cost is known; `setup_table` makes the logger's first text.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax

from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.instrumentation.counts import ModelCount
from mfu_jax.logger.assembly import file_sinks, metrics_file_of, open_run_log
from mfu_jax.logger.metric_logger import MetricLogger
from mfu_jax.logger.records.step_cost import StepCost
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.sinks.base import Sink, make_sink
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.settings import Settings
from mfu_jax.util.failsafe import Boundary
from mfu_jax.verdict import Verdict

_ONE = Fraction(1)


def sinks_of(
    settings: Settings, *, total_steps: int | None = None, progress: bool | None = False
) -> list[Sink]:
    """A console, plus JSONL, TensorBoard, … if the settings name a place; process 0 only.

    Args:
        settings: provide the paths, and the step from which to resume.
        total_steps: number of steps for the console's progress bar.
        progress: show the progress bar; see `ConsoleSink`.

    Raises:
        UserError: an output folder cannot be written.
    """
    if jax.process_index() != 0:
        return []
    sinks = [
        make_sink("console", total_steps=total_steps, progress=progress, line=settings.console_line)
    ]
    sinks += file_sinks(vars(settings), settings.start_step, settings.fsync_seconds)
    if settings.prometheus_textfile:
        sinks.append(make_sink("prometheus", port=None, textfile=settings.prometheus_textfile))
    if settings.webhook_url:
        run = settings.run_dir or os.path.dirname(settings.metrics_file)
        name = f"{os.path.basename(run.rstrip('/'))} on {platform.node()}".removeprefix(" ")
        sinks.append(make_sink("webhook", settings.webhook_url, run=name))
    return sinks


def logger_of(
    settings: Settings,
    *,
    cost: StepCost | None = None,
    sinks: Sequence[Sink] | None = None,
    compile_log: CompileLog | None = None,
    boundary: Boundary | None = None,
    run_log: RunLog | None = None,
) -> MetricLogger:
    """Makes the logger that the settings describe, with a run log in every process.

    Args:
        settings: step numbers, warm-up, log period, aborts; and the sinks.
        cost: cost of a step; None: each step is recorded with its own.
        sinks: used instead of `sinks_of(settings)`.
        compile_log: see `MetricLogger`, also for `boundary`.
        boundary: where failures are reported.
        run_log: used instead of one beside the settings' metrics file.

    Raises:
        UserError: an output folder cannot be written.
    """
    if sinks is None:
        sinks = sinks_of(settings)
    logger = MetricLogger(
        cost=cost,
        config=settings,
        sinks=sinks,
        compile_log=compile_log,
        boundary=boundary,
        run_log=run_log or (open_run_log(settings.metrics_file) if settings.metrics_file else None),
    )
    file = settings.metrics_file or metrics_file_of(sinks)
    logger.judge = functools.partial(_judged, str(file or ""), settings.start_step)
    return logger


def _judged(
    metrics_file: str,
    start_step: int,
    summary: Summary,
    setup: Mapping[str, Any],
    profile: Mapping[str, float],
) -> Verdict:
    """The verdict on a run that ends; see `MetricLogger.judge`."""
    from mfu_jax.runs.report.setup import Setup  # not needed before a run's end
    from mfu_jax.runs.report.verdict import run_verdict

    count = summary.steps + summary.warmup_steps + summary.compile_steps
    of_run = Setup.of(setup.get("values", {}), setup.get("texts", {}))
    return run_verdict(
        metrics_file,
        summary,
        of_run,
        wall=summary.seconds_by_use,
        profile=profile,
        is_of_process=True,
        steps=range(start_step, start_step + count),
    )


def setup_table(
    *,
    devices: str,
    peaks: StepPeaks | None,
    model: ModelCount | None,
    model_details: str,
    tokens_per_device: float | Fraction,
    flops_by_dtype: Mapping[str, int],
    parameters: str | None = None,
    metrics: str | None = None,
    left_out: str | None = None,
    steps: Fraction = _ONE,
) -> dict[str, Any]:
    """The set-up shown before the first log line, name → value.

    Args:
        devices: number and kind.
        peaks: the peaks for utilisation; None if not known.
        model: the model FLOPs, and what they do not include; None if not known.
        model_details: convention and derivation of the model FLOPs.
        tokens_per_device: tokens of one step on one device; 0 if unknown.
        flops_by_dtype: the matmuls to name in notes on peaks.
        parameters: number of weights, if known.
        metrics: which outputs of the step are logged, if chosen.
        left_out: which outputs are not logged, and why.
        steps: that one call makes, if not one: FLOPs and tokens are then a call's.
    """
    unit = "step" if steps == 1 else "call"
    flops = None if model is None else f"{float(model.per_device) / 1e12:.6g} ({model_details})"
    values: dict[str, Any] = {
        "devices": devices,
        "peak of one device": "not known" if peaks is None else str(peaks.main),
        "clock state": (peaks and peaks.clock_state) or None,
        "note on the clock": (peaks and peaks.clock_note) or None,
        "number of parameters": parameters,
        "calls per step": steps.denominator if steps < 1 else None,
        "steps per call": steps.numerator if steps > 1 else None,
        f"model TFLOP per device per {unit}": flops or "not known",
        "metrics": metrics,
        "metrics left out": left_out or None,
        f"tokens per device per {unit}": tokens_per_device or None,
    }
    unaccounted = () if model is None else model.unaccounted
    values |= {f"not counted exactly ({i})": text for i, text in enumerate(unaccounted, 1)}
    if model is not None and model.note:
        values["note on masks"] = model.note
    notes = () if peaks is None else peaks.notes(flops_by_dtype)
    values |= {f"note on peaks ({i})": text for i, text in enumerate(notes, 1)}
    return {name: value for name, value in values.items() if value is not None}
